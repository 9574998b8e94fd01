"""What is packed here is put together there, by a Python that has nothing but its standard library."""

import random
import subprocess
import sys
import zipfile

import pytest
from scripted import SCRIPTS, script

pytest.importorskip("tomllib")
gpu_pack = script("gpu_pack")


def unpack(*folders, into):
    line = [sys.executable, "-I", "-S", SCRIPTS / "gpu_pack.py", "unpack", *folders, "--into", into]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.fixture
def packed(tmp_path):
    """A folder of parts, with a wheel and a file of 2.5 MB; everything that a check takes is said to be there."""
    import tomllib

    project = tomllib.loads((gpu_pack.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for extra in gpu_pack.EXTRAS for line in project["optional-dependencies"][extra]]
    names = [line.partition(">")[0].partition("[")[0] for line in (*project["dependencies"], *extras, *gpu_pack.PEERS)]
    there, wheel, folder = tmp_path / "there.txt", tmp_path / "carried-1.0-py3-none-any.whl", tmp_path / "model"
    there.write_text("\n".join(names))
    folder.mkdir()
    (folder / "weights").write_bytes(random.Random(0).randbytes(2_500_000))
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carried/__init__.py", "here = True\n")
        archive.writestr("carried-1.0.dist-info/METADATA", "Name: carried\nVersion: 1.0\n")
    out = tmp_path / "out"
    flags = ["pack", "--there", there, "--out", out, "--part-mb", "1", "--add", wheel, folder]
    assert gpu_pack.main(list(map(str, flags))) == 0
    return out


def test_parts_that_come_one_by_one_are_put_together(packed, tmp_path):
    parts = sorted(packed.glob("part-*"))
    assert len(parts) == 3 and max(part.stat().st_size for part in parts) == gpu_pack.MB
    place, carried = tmp_path / "place", tmp_path / "carried"
    for number, part in enumerate(parts, start=1):
        carried.mkdir()
        for path in (packed / gpu_pack.MANIFEST, part):
            (carried / path.name).write_bytes(path.read_bytes())
        done = unpack(carried, into=place)
        assert done.returncode == (0 if number == 3 else 1), done.stderr
        assert ("missing: part-2, part-3" in done.stdout) == (number == 1)
        for path in carried.iterdir():
            path.unlink()
        carried.rmdir()
    assert (place / "model" / "weights").read_bytes() == (tmp_path / "model" / "weights").read_bytes()
    code = "import carried, importlib.metadata as m; print(carried.here, m.version('granite-scu'))"
    asked = [sys.executable, "-S", "-c", code]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=place / gpu_pack.SITE, check=False)
    assert done.stdout.split()[0] == "True", done.stderr


def test_a_part_that_was_damaged_on_the_way_is_refused(packed, tmp_path):
    part = packed / "part-2"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    done = unpack(packed, into=tmp_path / "place")
    assert done.returncode == 2 and "part-2: is not what was packed" in done.stderr
    done = unpack(tmp_path / "place" / gpu_pack.KEPT, into=tmp_path / "place")
    assert done.returncode == 1 and "2 of 3 parts are there; missing: part-2" in done.stdout
    (packed / gpu_pack.MANIFEST).write_text('{"python": ')
    done = unpack(packed, into=tmp_path / "place")
    assert done.returncode == 2 and done.stderr == "error: manifest.json: was damaged on the way; carry it again\n"
    done = unpack(packed, into=part)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
