"""What can be refused of the run folder and the loggers before torch and Lightning are imported."""

import os
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from granite_scu.config.errors import UserError, one_line
from granite_scu.config.request import Request
from granite_scu.config.settings import RunConfig
from granite_scu.data.sources import files
from granite_scu.data.sources.read import is_path
from granite_scu.storage import checkpoint_list
from granite_scu.storage.run_folder import LOCK, RunFolder

NEEDED = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "trackio": ("trackio",)}
"""The modules that each logger needs; of mlflow with those of its store on this machine."""

STORES = ("http", "https", "databricks", "databricks-uc", "uc", "sqlite", "mysql", "postgresql", "mssql")
"""Kinds of MLflow's address: servers and databases. Plain files it no longer writes."""


def check_loggers(names: Sequence[str], offline: bool) -> None:
    """Refuse loggers that cannot log. Asks nobody, neither the network nor the user.

    Args:
        names: of the loggers.
        offline: whether they keep to this machine.

    Raises:
        UserError: one is not installed, wandb refuses its settings or knows no key for a run that is not offline, or
            MLflow's address is no server and no database.
    """
    for name in names:
        if missing := [module for module in NEEDED[name] if not _is_installed(module)]:
            raise UserError(f"--logger {name}: {missing[0]} is not installed; pip install 'granite-scu[{name}]'")
    if "wandb" in names and not _wandb_can_log(offline):
        raise UserError(
            "--logger wandb: nobody is logged in; log in with: wandb login, or log on this machine alone with "
            "WANDB_MODE=offline"
        )
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    kind = uri.partition(":")[0].partition("+")[0]
    if "mlflow" in names and not offline and uri and kind not in STORES:
        shown = re.sub("//.*@", "//***@", uri)  # it may hold a password
        raise UserError(
            f"--logger mlflow: MLFLOW_TRACKING_URI {shown}: is neither a server (https://...) nor a database "
            "(sqlite:///mlflow.db), and MLflow no longer writes plain files; unset it to log into the run folder"
        )


def _is_installed(module: str) -> bool:
    found = find_spec(module)
    return found is not None and found.origin is not None  # a folder ./wandb, as wandb makes it, is no package


def _wandb_can_log(offline: bool) -> bool:
    """Whether wandb has a key, or needs none."""
    import wandb

    try:
        mode = wandb.setup().settings.mode
    except (ValueError, wandb.errors.Error) as error:  # the former is pydantic's
        raise UserError(
            f"--logger wandb: it refuses its settings ({one_line(error)}); correct the environment's WANDB_ variables"
        ) from error
    if offline or mode != "online":
        return True
    try:
        return wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError as error:
        raise UserError(f"--logger wandb: {error}; log in with: wandb login") from error


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
        yield from (("--data-dir", file) for file in files.search(source)[0])
    named = {"--model": request.base.name, "--adapter": request.lora.adapter}
    named["--resume-from-checkpoint"] = request.run.resume
    for flag, name in named.items():
        if name and (path := Path(name).expanduser()).exists():
            yield flag, path


def _check_apart(folder: RunFolder, request: Request) -> None:
    """Refuse a run folder in which text is looked for, and kept tokens in the run folder: the next run would fail."""
    here = folder.path.resolve()
    cache = request.data.cache_dir and Path(request.data.cache_dir).expanduser().resolve()
    for source in filter(is_path, request.data.sources):
        root = Path(source).expanduser()
        searched = root if root.is_dir() else Path(str(root).partition("**")[0]) if "**" in source else None
        for name, place in {f"--output-dir {folder.path}": here, f"--cache-dir {cache}": cache}.items():
            if searched and place and searched.resolve() in (place, *place.parents):
                raise UserError(
                    f"{name}: lies in --data-dir {source}, so that the next run would read this one's files as "
                    "text; choose a folder elsewhere"
                )
    if cache and here in (cache, *cache.parents):
        raise UserError(f"--cache-dir {cache}: lies in --output-dir {folder.path}; choose a folder elsewhere")


def makes_way(folder: RunFolder, asked: RunConfig) -> bool:
    """Whether a run that lies in the folder is replaced: as was asked, or because it ended before a checkpoint."""
    in_place = checkpoint_list.lies_in(folder, asked.resume)
    begun = asked.resume == checkpoint_list.AUTO and not in_place and not folder.trained
    return begun or (asked.overwrite and not in_place)
