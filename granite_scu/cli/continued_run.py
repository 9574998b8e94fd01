"""The settings of a run that ``--resume-from-checkpoint`` continues, from its folder, which may come from anybody."""

import logging
import re
from collections import ChainMap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from granite_scu.cli.config_layers import A_FLAG, Layer, of_file
from granite_scu.config.errors import UserError
from granite_scu.config.settings import TEXTS, RunConfig
from granite_scu.storage.checkpoint_list import AUTO, LAST
from granite_scu.storage.run_folder import RunFolder
from granite_scu.storage.working_folder import as_seen_from_here, found_from_here

log = logging.getLogger(__name__)


def settings_of_the_run(given: dict[str, Any], files: Sequence[Layer], usual: Sequence[Layer]) -> list[Layer]:
    """The configuration file of the run that is continued, where it is there, and over it where the run and its files
    are now. All that the user gives comes over both.

    Args:
        given: what flags and keys say, by dotted key.
        files: that are given, one of which may name the run folder.
        usual: what changes defaults, which may name it where nobody does.

    Raises:
        UserError: the file names code, or the run's chat template is missing.
    """
    asked = ChainMap(given, *(layer.values for layer in reversed(files)))
    resume = asked["run.resume"]
    if resume in (LAST, AUTO):
        named = [*asked.maps, *(layer.values for layer in usual), {"run.output_dir": RunConfig.output_dir}]
        output = str(ChainMap(*named)["run.output_dir"])
    else:
        output = str(Path(resume).parent)
    folder = Path(output).expanduser()
    now = {"run.output_dir": output, "run.overwrite": False}  # it replaced another run once, and may not again
    file = folder / "config.yaml"
    if not file.is_file():
        return [Layer(A_FLAG, now)]
    if resume == AUTO and not RunFolder(folder).checkpoints():
        log.warning("%s: ended before its first checkpoint, and begins again with what you give, without its settings; "
                    "for those add --config %s", folder, file)  # fmt: skip
        return []
    layer = of_file(str(file))
    _check_plain(layer, asked)
    # The checkpoint says how many blocks were validated, whatever the batch.
    layer.values.pop("trainer.limit_val_batches", None)
    return [layer, Layer(A_FLAG, now | _files_from_here(layer.values, folder, asked))]


def _check_plain(run: Layer, asked: Collection[str]) -> None:
    """Refuse the configuration of a run folder that names code: a folder may come from anybody.

    Settings of Lightning's Trainer may name classes and functions of any module, which are then imported and called.
    So may the controller. In a file that the user gives with ``--config`` they may. What is ``asked`` for takes the
    place of the file's own. Raises UserError.
    """
    for key, value in run.values.items():
        if key in asked:
            continue
        is_plain = re.fullmatch(r"[\w:+-]*", value) if isinstance(value, str) else not isinstance(value, list | dict)
        if key.startswith("trainer.") and not is_plain:
            remedy = "give a file that has it with --config, or take it out of this one"
        elif key == "control.controller" and ":" in str(value):
            remedy = f"where you trust it, add --controller {value}"
        else:
            continue
        raise UserError(f"{run.origin}{run.lines[key]}: {key} names code, which a run folder may not; {remedy}")


_PATHS = ("base.name", "lora.adapter", "data.cache_dir")
"""Settings that may be a path, or else a name, which is left as it is."""


def _files_from_here(settings: dict[str, Any], folder: Path, asked: Collection[str]) -> dict[str, Any]:
    """The files of the run that is continued by where they are now: it may have been started in another folder."""
    from granite_scu.data.sources.read import is_path  # late: numpy

    now: dict[str, Any] = {}
    if settings.get("data.chat_template") is not None and "data.chat_template" not in asked:
        now |= _template_of_the_run(folder)
    for key in (f"data.{name}" for name in TEXTS):
        sources = settings.get(key) or []
        sources = [sources] if isinstance(sources, str) else sources
        # Anything else the parser refuses.
        if isinstance(sources, list) and all(isinstance(source, str) for source in sources):
            found = [as_seen_from_here(source, folder) if is_path(source) else source for source in sources]
            if found != sources:
                now[key] = found
    for key in _PATHS:
        value = settings.get(key)
        if isinstance(value, str) and (found := found_from_here(value, folder)) != value:
            now[key] = found
    cache = now.get("data.cache_dir", settings.get("data.cache_dir"))
    if "data.cache_dir" not in asked and not _holds_tokens(cache):
        # A run folder may be a stranger's: nothing is written into a folder that it names and that is not ours.
        log.warning("--cache-dir %s: holds no kept tokens; the usual folder is taken, unless you give the flag", cache)
        now["data.cache_dir"] = None
    return now


def _template_of_the_run(folder: Path) -> dict[str, Any]:
    """The chat template that lies in the run folder, arguments included. What its settings name is not read: they may
    be a stranger's, and what is read would be published with the adapter."""
    saved = folder / "chat_template.jinja"
    if not saved.is_file():
        raise UserError(
            f"{saved}: is missing, and the run was trained with a chat template; give it by --chat-template"
        )
    return {"data.chat_template": str(saved), "data.chat_template_args": None, "data.system": ""}


def _holds_tokens(cache: Any) -> bool:
    """Whether a folder of kept tokens is one; no folder stands for the usual one."""
    kept = "?" * 32 + "/meta.json"  # by ``prepared`` in data/tokens/cache.py, which loads numpy
    return cache is None or (isinstance(cache, str) and any(Path(cache).expanduser().glob(kept)))
