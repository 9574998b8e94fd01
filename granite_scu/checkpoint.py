"""Checkpoints as folders: an adapter that PEFT loads as it lies, and the state that goes on from it.

    checkpoint-<step>/adapter_model.safetensors  adapter_config.json  state.ckpt

The base model is never in them.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from granite_scu.errors import UserError
from granite_scu.run_folder import RunFolder, replacing

STATE = "state.ckpt"


def save_adapter(model: Any, folder: Path, base_name: str) -> None:
    """Write a PEFT adapter into ``folder``, naming its base as the user did and not by a path of this machine.

    Args:
        model: the PeftModel.
        folder: made when it is missing; files of the same names are replaced.
        base_name: embedded name, local folder or hub id of the base model.
    """
    config = model.peft_config[model.active_adapter]
    loaded_from, config.base_model_name_or_path = config.base_model_name_or_path, base_name
    try:
        # False: the vocabulary is never changed here, and "auto" would ask the hub about it.
        model.save_pretrained(folder, save_embedding_layers=False)
    finally:
        config.base_model_name_or_path = loaded_from
    (Path(folder) / "README.md").unlink(missing_ok=True)  # PEFT's empty template; ours is written at the end


class AdapterCheckpointIO(CheckpointIO):
    """Writes Lightning's checkpoint as a folder, whole or not at all, with the adapter beside the state."""

    def __init__(self) -> None:
        self.module = None  # set by whoever builds the trainer; the state alone cannot write a PEFT adapter

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        with replacing(Path(path)) as folder:
            save_adapter(self.module.model, folder, self.module.base.name)
            torch.save(checkpoint | {"random": _random_state()}, folder / STATE)

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True) -> dict:
        """The checkpoint; torch's generators are put where they were when it was saved, which dropout needs."""
        checkpoint = load_state(Path(path))
        _restore_random_state(checkpoint["random"])
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        raise NotImplementedError("checkpoints are removed by callbacks.checkpoints")


def _random_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_state(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def load_state(path: Path) -> dict[str, Any]:
    """What a checkpoint folder holds beside the adapter.

    Raises:
        UserError: the file is damaged, or not a checkpoint of ours.
    """
    try:
        return torch.load(path / STATE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"--resume-from-checkpoint {path}: {STATE} is damaged; go on from another") from error


def find(resume: str, output_dir: str | Path) -> Path:
    """The checkpoint folder that ``--resume-from-checkpoint`` names.

    Raises:
        UserError: there is none.
    """
    if resume == "last":
        found = RunFolder(output_dir).checkpoints()
        if not found:
            raise UserError(f"--resume-from-checkpoint last: {output_dir} holds no checkpoint")
        return found[-1]
    path = Path(resume).expanduser()
    if not (path / STATE).is_file():
        raise UserError(f"--resume-from-checkpoint {resume}: is not a checkpoint folder (no {STATE} in it)")
    return path
