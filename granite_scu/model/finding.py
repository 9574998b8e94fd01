"""Where a base model's files are: embedded, in a folder, in a GGUF file or on the hub; and why they cannot be had."""

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from granite_scu.config import hub
from granite_scu.config.errors import UserError
from granite_scu.config.settings import TINY_MODEL, check_model
from granite_scu.model import gguf_file
from granite_scu.model.base_files import check_files, no_safetensors


def resolve(name: str) -> str:
    """Where a model's files are: the embedded folder, a local folder, or the hub id as given.

    A GGUF file, or a folder with one, is dequantised into a folder the first time that it is named.

    Raises:
        UserError: a path where nothing is, or whose files are not those of a model that can be trained.
    """
    if name == TINY_MODEL:
        return str(files("granite_scu.model") / "assets" / TINY_MODEL)
    check_model(name)
    path = Path(name).expanduser()
    if not path.exists():
        return name
    if file := gguf_file.find(path, name):
        return str(gguf_file.dequantised(file, name))
    check_files(path, name)
    return str(path)


def download(name: str) -> Path:
    """The folder of a model's files: where they are, or the hub cache, into which what is missing is loaded.

    Raises:
        UserError: they cannot be had.
    """
    with hub_errors(name):
        found = resolve(name)
        if Path(found).is_dir():
            return Path(found)
        return Path(snapshot_download(found, allow_patterns=["model*.safetensors", "*.json", "*.jinja"]))


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turns what transformers raises for a model that it cannot find, reach or build into one line."""
    try:
        with nullcontext() if Path(resolve(name)).is_dir() else hub.asked_for(name):
            yield
    except UserError:
        raise
    except Exception as error:  # a configuration with a wrong value has errors of many kinds
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
            raise  # what to do about that, the run says
        raise UserError(f"--model {name}: cannot be loaded: {_why(name, error)}") from error


def _why(name: str, error: BaseException) -> str:
    """What an error comes from, and what to do about it. The hub is blamed where it was asked for something."""
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return f"it is gated; accept its licence at {constants.ENDPOINT}/{name}, then log in with: hf auth login"
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return "the hub has no model of that name, or it is private; check the spelling, or log in with: hf auth login"
    instead = f"give a local folder, or use the embedded {TINY_MODEL}"
    if any(isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled) for cause in causes):
        if constants.HF_HUB_OFFLINE:
            return f"it is not in the cache, and HF_HUB_OFFLINE forbids to ask the hub; unset that, {instead}"
        return (
            f"{constants.ENDPOINT} cannot be reached, and the model is not in the cache; check the network, {instead}"
        )
    reason = " ".join(str(error).split())
    if "does not recognize this architecture" in reason:
        kind = re.search(r"model type `([^`]+)`", reason)
        return (
            f"transformers {importlib.metadata.version('transformers')} does not know its type"
            f"{f' {kind[1]}' if kind else ''}; a newer one may: pip install --upgrade transformers"
        )
    if "trust_remote_code" in reason:
        return "it comes with code of its own, which is never run; take a model that transformers itself has"
    if "AutoModelForCausalLM" in reason:
        return "it is no causal language model; take one that continues text"
    if "a file named model.safetensors" in reason:
        return no_safetensors(name)
    if "gguf" in name.lower():
        return f"a repository of GGUF files; download one and give its path: hf download {name} FILE --local-dir ."
    if "Couldn't instantiate the backend tokenizer" in reason:
        return "it has no tokenizer; copy tokenizer.json and tokenizer_config.json from the model that it was made of"
    if "sentencepiece" in reason or "tiktoken" in reason:
        return "its tokenizer is a tokenizer.model alone, which takes a package to read: pip install sentencepiece"
    if isinstance(error, LookupError):  # such an error says a key or a place, and no word about it
        reason = f"{type(error).__name__}: {reason}"
    reason = reason[:200].rstrip(".")
    return f"{reason or type(error).__name__}; its files are damaged, incomplete or not for transformers"
