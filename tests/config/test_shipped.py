from pathlib import Path

import pytest

from granite_scu.config import shipped


@pytest.mark.parametrize("name", ["qlora", "qlora.yaml", "configs/qlora.yaml", "hardware/gpu_4090"])
def test_a_file_that_comes_along_is_found_by_its_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path(shipped.find(name))
    assert file.is_file() and file.is_relative_to(shipped.folder())


def test_a_file_of_the_users_own_goes_first_and_what_is_neither_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("qlora").write_text("base: {}\n")
    for name in ("qlora", "none.yaml", "~nobody-of-this-name/x.yaml", "{data: {batch_size: 2}}", "../pyproject"):
        assert shipped.find(name) == name
