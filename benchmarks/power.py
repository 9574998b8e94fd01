"""A disk that forgets: of a folder, what a power cut leaves is what was synced."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path


class Disk:
    """Takes note at every ``os.fsync`` below a folder: of a file its content, of a folder which names it has.

    Args:
        root: what is in it now is on the disk.

    Attributes:
        watch: called before and after each sync.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, tuple[int, bool]]] = {}
        self.watch: Callable[[], None] = lambda: None
        self._kept: dict[int, int] = {}
        for path in (root, *root.rglob("*")):
            descriptor = os.open(path, os.O_RDONLY)
            self._note(descriptor)
            os.close(descriptor)

    def fsync(self, file: object) -> None:
        """In place of ``os.fsync``."""
        descriptor = file if isinstance(file, int) else file.fileno()
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(self.root):
            self.watch()
            self._note(descriptor)
            self.watch()

    def _note(self, descriptor: int) -> None:
        path, number = Path(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_ino
        if path.is_dir():
            self.folders[number] = {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(path)}
        else:
            self.files[number] = path.read_bytes()
        if number not in self._kept:  # held open, for else another file could get its number
            self._kept[number] = os.dup(descriptor)

    def after_a_cut(self, to: Path, names_first: bool) -> Path:
        """Write what a power cut would leave now; returns ``to``, which is replaced.

        Args:
            to: the new folder.
            names_first: the names are as they are now, as file systems may write names before contents, and what was
                never synced is zeros. Otherwise names and contents are those that were synced.
        """
        shutil.rmtree(to, ignore_errors=True)
        self._with_names_of_now(self.root, to) if names_first else self._as_synced(self.root.stat().st_ino, to)
        return to

    def _as_synced(self, number: int, to: Path) -> None:
        to.mkdir()
        for name, (inside, is_folder) in self.folders.get(number, {}).items():
            if is_folder:
                self._as_synced(inside, to / name)
            else:
                (to / name).write_bytes(self.files.get(inside, b""))

    def _with_names_of_now(self, place: Path, to: Path) -> None:
        to.mkdir()
        for entry in os.scandir(place):
            if entry.is_dir():
                self._with_names_of_now(Path(entry), to / entry.name)
            else:
                synced, zeros = self.files.get(entry.inode(), b""), bytes(entry.stat().st_size)
                (to / entry.name).write_bytes(synced + zeros[len(synced) :])


Strike = Callable[[], None]


def failing(folder: Path, at: Callable[[Strike], Callable[[], None]], names_first: bool) -> Callable[[], None]:
    """To be called in a run's process before anything else: the power fails, and the folder is what was on the disk.

    Args:
        folder: of the run, in a folder where nothing else is that counts.
        at: given what strikes, returns what is to be called to have it strike.
        names_first: as of ``Disk.after_a_cut``.
    """

    def prepare() -> None:
        disk = Disk(folder.parent)
        os.fsync = disk.fsync
        at(lambda: strike(disk))()

    def strike(disk: Disk) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent.parent) as beside:
            left = disk.after_a_cut(Path(beside) / "left", names_first) / folder.name
            shutil.rmtree(folder, ignore_errors=True)
            if left.exists():
                left.rename(folder)
        os.killpg(0, signal.SIGKILL)

    return prepare
