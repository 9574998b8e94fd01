"""Checkpoints as folders: an adapter that PEFT loads as it lies, and the state to continue from.

    checkpoint-<step>/adapter_model.safetensors  adapter_config.json  state.ckpt  best/  manifest.json

The base model is never in them; ``best/`` is the best validated adapter so far. The folder gets its name when
everything in it is on the disk, and the manifest tells whether it still is what was written.
"""

import io
import logging
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from packaging.version import InvalidVersion, Version

from granite_scu.config.errors import UserError
from granite_scu.storage import manifest
from granite_scu.storage.atomic import adding_to, replacing
from granite_scu.storage.checkpoint_list import STATE
from granite_scu.storage.run_folder import BEST_ADAPTER

log = logging.getLogger(__name__)


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
    try:
        with adding_to(folder) as beside:
            # False: the vocabulary is never changed here, and "auto" would ask the hub about it.
            model.save_pretrained(beside, save_embedding_layers=False)
            (beside / "README.md").unlink(missing_ok=True)  # PEFT's empty template; ours is written at the end
    finally:
        config.base_model_name_or_path = loaded_from


class AdapterCheckpointIO(CheckpointIO):
    """Writes Lightning's checkpoint as a folder, completely or not at all, with the adapter beside the state.

    Args:
        module: whose adapter is saved: the state alone cannot write a PEFT adapter. Loading needs none.
    """

    def __init__(self, module: Any = None) -> None:
        self.module = module

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path, state = Path(path), io.BytesIO()
        _require_readable(checkpoint.get("callbacks", {}))
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


def _require_readable(states: dict[str, Any]) -> None:
    """Refuse to save what ``load_state`` would not read, such as a number of NumPy's in a callback of the user's."""
    for name, state in states.items():
        torch.save(state, saved := io.BytesIO())
        saved.seek(0)
        try:
            torch.load(saved, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UserError(
                f"--trainer.callbacks: the state of {name} holds more than numbers, texts and tensors, and no run "
                "could continue from its checkpoint; let its state_dict give those of Python and PyTorch"
            ) from error


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
        UserError: the file cannot be read, is damaged, or not a checkpoint of ours.
    """
    try:
        state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
        return state
    except PermissionError as error:
        raise UserError(f"--resume-from-checkpoint {path}: {STATE} cannot be read ({error.strerror})") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"--resume-from-checkpoint {path}: {STATE} is damaged; continue from another") from error


_CONTROL, _VERSION = "callbacks.ShannonControl", "pytorch-lightning_version"
_SCHEMA: dict[str, Any] = {
    "global_step": int, "epoch": int, "micro_batches": int, "frozen": dict, "settings": dict, "state_dict": dict,
    "optimizer_states": list, "lr_schedulers": list, "loops": dict, "callbacks": dict,
    _CONTROL: dict, f"{_CONTROL}.name": str, f"{_CONTROL}.latest": dict, f"{_CONTROL}.ticks": int,
    _VERSION: str, "random.python": tuple, "random.numpy": tuple, "random.cpu": torch.Tensor,
}  # fmt: skip
"""What the state of a checkpoint holds, as far as it is looked at before training, and of which kind."""


def check_state(state: dict[str, Any], path: Path) -> None:
    """Refuse the state of a checkpoint that no run of ours has written.

    Args:
        state: as ``load_state`` has read it.
        path: of the checkpoint, for the message.

    Raises:
        UserError: names what is missing, or of another kind.
    """
    for place, kind in _SCHEMA.items():
        found: Any = state
        for name in place.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if not isinstance(found, kind) or (place == _VERSION and not _is_version(found)):
            raise UserError(
                f"--resume-from-checkpoint {path}: {STATE} is of no run ({place} is missing, or of another kind); "
                "continue from another"
            )


def _is_version(text: str) -> bool:
    """Whether Lightning, which compares the version of a checkpoint with its own, can read it."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True
