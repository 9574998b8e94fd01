"""Whether a run may have its folder. Needs neither torch nor Lightning: it is asked before they are imported, too."""

from collections.abc import Iterator
from pathlib import Path

from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import RunConfig
from granite_scu.data.sources import files
from granite_scu.data.sources.read import is_path
from granite_scu.storage import checkpoint_list
from granite_scu.storage.run_folder import LOCK, RunFolder


def check_folder(folder: RunFolder, request: Request) -> None:
    """Refuse a run folder that must not be written to. Makes and deletes nothing.

    Raises:
        UserError: it holds something else, another process runs in it, or clearing it would delete what the run reads.
    """
    in_place = checkpoint_list.lies_in(folder, request.run.resume)
    folder.check(makes_way(folder, request.run), resuming=in_place)
    if (folder.path / LOCK).is_file():  # otherwise nobody has it, and a refusal leaves nothing behind
        folder.lock()
        folder.unlock()
    _check_apart(folder, request)
    if request.run.overwrite and not in_place:
        here = folder.path.resolve()
        for flag, path in _read(request):
            if here in (path.resolve(), *path.resolve().parents):
                raise UserError(f"--overwrite: would delete {flag} {path}, which lies in {here}; move one of them")


def _read(request: Request) -> Iterator[tuple[str, Path]]:
    """What the run reads of this machine's files, each with its flag: of a pattern or a folder every file."""
    for source in filter(is_path, request.data.sources):
        yield "--data-dir", Path(source).expanduser()
        yield from (("--data-dir", file) for file in files.find(source))
    named = {"--model": request.base.name, "--replay": request.control.replay, "--adapter": request.lora.adapter}
    for flag, name in named.items():
        if name and (path := Path(name).expanduser()).exists():
            yield flag, path


def _check_apart(folder: RunFolder, request: Request) -> None:
    """Refuse a run folder in which text is looked for, and kept tokens in the run folder: the next run would fail."""
    here = folder.path.resolve()
    for source in filter(is_path, request.data.sources):
        root = Path(source).expanduser()
        searched = root if root.is_dir() else Path(str(root).partition("**")[0]) if "**" in source else None
        if searched and searched.resolve() in (here, *here.parents):
            raise UserError(
                f"--output-dir {folder.path}: lies in --data-dir {source}, so that the next run would read this one's "
                "files as text; choose a folder elsewhere"
            )
    cache = request.data.cache_dir
    if cache and here in (Path(cache).expanduser().resolve(), *Path(cache).expanduser().resolve().parents):
        raise UserError(f"--cache-dir {cache}: lies in --output-dir {folder.path}; choose a folder elsewhere")


def makes_way(folder: RunFolder, asked: RunConfig) -> bool:
    """Whether a run that lies in the folder is replaced: as was asked, or because it ended before a checkpoint."""
    in_place = checkpoint_list.lies_in(folder, asked.resume)
    begun = asked.resume == checkpoint_list.AUTO and not in_place and not folder.trained
    return begun or (asked.overwrite and not in_place)
