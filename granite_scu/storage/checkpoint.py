"""Checkpoints as folders: an adapter that PEFT loads as it lies, and the state that goes on from it.

    checkpoint-<step>/adapter_model.safetensors  adapter_config.json  state.ckpt  best/  manifest.json

The base model is never in them; ``best/`` is the best validated adapter so far. The folder gets its name when
everything in it is on the disk, and the manifest tells whether it still is what was written.
"""

import io
import logging
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from safetensors import SafetensorError

from granite_scu.config.errors import UserError
from granite_scu.storage import manifest
from granite_scu.storage.run_folder import BEST_ADAPTER, RunFolder, replacing

log = logging.getLogger(__name__)

STATE = "state.ckpt"

LAST, AUTO = "last", "auto"
"""What ``--resume-from-checkpoint`` takes beside a folder: the newest checkpoint; the same, or a fresh start."""


def save_adapter(model: Any, folder: Path, base_name: str) -> None:
    """Write a PEFT adapter into ``folder``, naming its base as the user did and not by a path of this machine.

    Args:
        model: the PeftModel.
        folder: made when it is missing; files of the same names are replaced, each at once.
        base_name: embedded name, local folder or hub id of the base model.

    Raises:
        OSError: it cannot be written.
    """
    config = model.peft_config[model.active_adapter]
    loaded_from, config.base_model_name_or_path = config.base_model_name_or_path, base_name
    beside = Path(folder) / f".adapter.{os.getpid()}.tmp"
    try:
        # False: the vocabulary is never changed here, and "auto" would ask the hub about it.
        model.save_pretrained(beside, save_embedding_layers=False)
        (beside / "README.md").unlink(missing_ok=True)  # PEFT's empty template; ours is written at the end
        for file in beside.iterdir():
            with replacing(Path(folder) / file.name) as temporary:
                file.rename(temporary)
    except SafetensorError as error:  # it is written in Rust, whose errors are words
        raise _as_os_error(error, beside) from error
    finally:
        config.base_model_name_or_path = loaded_from
        shutil.rmtree(beside, ignore_errors=True)


def _as_os_error(error: SafetensorError, path: Path) -> Exception:
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else error


class AdapterCheckpointIO(CheckpointIO):
    """Writes Lightning's checkpoint as a folder, whole or not at all, with the adapter beside the state.

    Args:
        module: whose adapter is saved: the state alone cannot write a PEFT adapter. Loading needs none.
    """

    def __init__(self, module: Any = None) -> None:
        self.module = module

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path, state = Path(path), io.BytesIO()
        torch.save(checkpoint | {"random": _random_state()}, state)  # into memory: a full disk is then an OSError
        with replacing(path) as folder:
            save_adapter(self.module.model, folder, self.module.base.name)
            (folder / STATE).write_bytes(state.getbuffer())
            if (path.parent / BEST_ADAPTER).is_dir():
                shutil.copytree(path.parent / BEST_ADAPTER, folder / BEST_ADAPTER)
            manifest.write(folder)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        """The checkpoint; random generators are put where they were when it was saved, which dropout needs."""
        checkpoint = load_state(Path(path))
        _restore_random_state(checkpoint["random"])
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        raise NotImplementedError("checkpoints are removed by callbacks.checkpoints")


def _random_state() -> dict[str, Any]:
    """Of every generator there is. Ranks draw alike, so that one's states are all the others'."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), position, has_gauss, gauss),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_state(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def load_state(path: Path) -> dict[str, Any]:
    """What a checkpoint folder holds beside the adapter.

    Raises:
        UserError: the file is damaged, or not a checkpoint of ours.
    """
    try:
        state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
        return state
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"--resume-from-checkpoint {path}: {STATE} is damaged; go on from another") from error


def find(resume: str, output_dir: str | Path) -> Path | None:
    """The checkpoint folder that ``--resume-from-checkpoint`` names, whole to the last byte.

    Of ``last`` and ``auto`` it is the newest that is whole; those passed over are named in the log.

    Returns:
        None where ``auto`` finds no checkpoint.

    Raises:
        UserError: there is none, or it is damaged.
    """
    if resume in (LAST, AUTO):
        return _newest(resume, RunFolder(output_dir))
    path = Path(resume).expanduser()
    if not (path / STATE).is_file():
        hint = f"; the newest of that run is {LAST} --output-dir {path}" if RunFolder(path).checkpoints() else ""
        raise UserError(f"--resume-from-checkpoint {resume}: is not a checkpoint folder (no {STATE} in it){hint}")
    if problem := manifest.damage(path):
        raise UserError(f"--resume-from-checkpoint {resume}: {problem}; go on from another, or from the last that is "
                        f"whole with --resume-from-checkpoint {LAST} --output-dir {path.parent}")  # fmt: skip
    return path


def _newest(resume: str, folder: RunFolder) -> Path | None:
    problems: list[str] = []
    for path in reversed(folder.checkpoints()):
        if (problem := manifest.damage(path)) is None:
            for line in problems:
                log.warning("%s; going on from %s instead", line, path.name)
            return path
        problems.append(f"{path.name}: {problem}")
    if problems:
        raise UserError(f"--resume-from-checkpoint {resume}: none in {folder.path} is whole ({'; '.join(problems)})")
    if resume == LAST:
        raise UserError(f"--resume-from-checkpoint {LAST}: {folder.path} holds no checkpoint")
    return None


def prune(folder: RunFolder, keep: int) -> None:
    """Remove the checkpoints that are older than the newest ``keep`` whole ones. A damaged one counts for nothing."""
    whole = 0
    for path in reversed(folder.checkpoints()):
        if whole >= keep:
            shutil.rmtree(path)
        elif manifest.damage(path) is None:
            whole += 1
