"""Files and folders get their names completely or not at all, even where the power fails."""

import errno
import os
import stat
from pathlib import Path

import pytest
from power import Disk

from granite_scu.storage.atomic import adding_to, ensure_folder, replacing, sweep, take_place


def contents(path: Path) -> object:
    """A file's text; of a folder what is in it, but for what is not whole yet."""
    if path.is_dir():
        return {entry.name: contents(entry) for entry in path.iterdir() if not entry.name.startswith(".")}
    return path.read_text() if path.exists() else None


def replace_file(place: Path) -> None:
    with replacing(place / "file") as temporary:
        temporary.write_text("new")


def replace_folder(place: Path) -> None:
    with replacing(place / "folder") as temporary:
        (temporary / "inner").mkdir(parents=True)
        (temporary / "inner" / "part").write_text("new")


def rename_folder(place: Path) -> None:
    (place / ".written").mkdir()
    (place / ".written" / "part").write_text("new")
    take_place(place / ".written", place / "folder")


def add_files(place: Path) -> None:
    with adding_to(place) as beside:
        (beside / "more").mkdir()
        (beside / "more" / "part").write_text("new")


def add_to_a_new_folder(place: Path) -> None:
    with adding_to(place / "a" / "b") as beside:
        (beside / "part").write_text("new")


@pytest.mark.parametrize(
    ("write", "name", "new"),
    [
        (replace_file, "file", "new"),
        (replace_folder, "folder", {"inner": {"part": "new"}}),
        (rename_folder, "folder", {"part": "new"}),
        (add_files, "more/part", "new"),
        (add_to_a_new_folder, "a", {"b": {"part": "new"}}),
        (lambda place: ensure_folder(place / "a" / "b"), "a", {"b": {}}),
    ],
)
@pytest.mark.parametrize("names_first", [False, True])
def test_a_power_cut_leaves_what_was_there_or_what_is_new(tmp_path, monkeypatch, write, name, new, names_first):
    place, seen = tmp_path / "place", []
    (place / "folder").mkdir(parents=True)
    for path in (place / "file", place / "folder" / "part"):
        path.write_text("old")
    disk, old = Disk(place), contents(place / name)
    monkeypatch.setattr(os, "fsync", disk.fsync)

    def look() -> None:
        left = disk.after_a_cut(tmp_path / "after", names_first)
        sweep(left.rglob(".*"))
        seen.append(contents(left / name))

    disk.watch = look
    write(place)
    disk.watch()
    assert seen[-1] == contents(place / name) == new
    between = [{}, {"b": {}}] if name == "a" else []  # folders above a new one come before it
    assert all(found in (old, new, *between) for found in seen)


def begin_to_replace(path: Path, part: str) -> None:
    with replacing(path) as temporary:
        (temporary / part).parent.mkdir(exist_ok=True)
        (temporary / part).write_text("half")
        raise KeyboardInterrupt


@pytest.mark.parametrize(("name", "part"), [("file", "."), ("folder", "part"), ("not there yet", ".")])
def test_a_crash_while_writing_leaves_what_was_there_and_nothing_else(tmp_path, name, part):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    before = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        begin_to_replace(tmp_path / name, part)
    assert contents(tmp_path) == before and not list(tmp_path.glob(".*"))


def test_what_is_the_same_is_left_and_what_is_linked_elsewhere_is_not_written_on(tmp_path):
    (tmp_path / "copy").mkdir()
    for name in ("same", "other"):
        (tmp_path / name).write_text("old")
        (tmp_path / "copy" / name).hardlink_to(tmp_path / name)
    before = (tmp_path / "same").stat()  # the time of access aside, as comparing reads it
    (tmp_path / f".new.{os.getpid()}.tmp" / "half").mkdir(parents=True)  # in a container all have the same number
    with adding_to(tmp_path) as beside:
        (beside / "same").write_text("old")
        (beside / "other").write_text("new")
    after = (tmp_path / "same").stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_mode) == (before.st_ino, before.st_mtime_ns, before.st_mode)
    assert contents(tmp_path) == {"same": "old", "other": "new", "copy": {"same": "old", "other": "old"}}


def test_a_library_that_fails_half_way_leaves_every_file(tmp_path):
    """It may truncate first, as ``save_pretrained`` does, and then find the disk full."""
    (tmp_path / "template").write_text("old")

    def save_half(folder):
        (folder / "template").write_text("")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "template"))

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as failed, adding_to(tmp_path) as beside:
        save_half(beside)
    assert failed.value.filename == str(tmp_path / "template")
    assert contents(tmp_path) == {"template": "old"} and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_modes_follow_the_umask_whatever_a_library_gave(tmp_path, umask):
    before = os.umask(umask)
    try:
        for context in (adding_to(tmp_path / "added"), replacing(tmp_path / "replaced")):
            with context as temporary:
                temporary.mkdir(exist_ok=True)
                os.close(os.open(temporary / "weights", os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("weights")}
    assert modes == {0o666 & ~umask}
