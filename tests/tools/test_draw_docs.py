"""The script that draws the pictures of the documents."""

import sys

import pytest

from tools import draw_docs


def test_the_output_folder_is_made_and_what_cannot_be_one_is_refused(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "new" / "images"
    monkeypatch.setattr(sys, "argv", ["draw_docs.py", "--output-dir", str(folder)])
    assert draw_docs.main() == 0
    assert sorted(path.name for path in folder.iterdir()) == ["loop.png", "peer.png"]
    monkeypatch.setattr(sys, "argv", ["draw_docs.py", "--output-dir", str(folder / "loop.png")])
    with pytest.raises(SystemExit, match="2"):
        draw_docs.main()
    assert "loop.png: File exists; name a folder" in capsys.readouterr().err
