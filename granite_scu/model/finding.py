"""Where a base model's files are: embedded, in a folder, in a GGUF file or on the hub; and why they cannot be had."""

import functools
import glob
import hashlib
import importlib.metadata
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from granite_scu.config import hub
from granite_scu.config.errors import UserError, one_line
from granite_scu.config.settings import TINY_MODEL, check_model
from granite_scu.model.base_files import INDEX, SINGLE, check_files, check_kind, check_report, head_of, no_safetensors
from granite_scu.storage.atomic import errors_of_rust, replacing, sweep
from granite_scu.storage.kept import cache_folder

log = logging.getLogger(__name__)

INSTALL = "pip install 'granite-scu[gguf]'"


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
    if file := gguf_of(path, name):
        return str(dequantised(file, name))
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
    reason = one_line(error)
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


def gguf_of(path: Path, name: str) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a folder without other weights; None for no such.

    Raises:
        UserError: the folder holds several, or the file is none.
    """
    if path.is_file():
        if head_of(path, 4, name) != b"GGUF":
            raise UserError(f"--model {name}: is no GGUF file; name the folder of the model, or a .gguf file")
        return path
    if any((path / weights).exists() for weights in (SINGLE, INDEX)):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        listed = ", ".join(file.name for file in found)
        raise UserError(f"--model {name}: the folder holds {len(found)} GGUF files; name one of them: {listed}")
    return found[0] if found else None


def dequantised(file: Path, name: str) -> Path:
    """The folder that holds the model of a GGUF file with whole weights; made when there is none.

    Training, evaluation and merging so have the same weights, and the minutes that the conversion takes are spent once.
    Values that were quantised are kept in bf16, others in the file's own type.

    Args:
        file: the GGUF file.
        name: as ``--model`` has it.

    Raises:
        UserError: the package gguf is missing, or the file cannot be read as a causal language model.
    """
    stat = file.stat()
    return _dequantised(file.resolve(), stat.st_size, stat.st_mtime_ns, name)


@functools.cache
def _dequantised(file: Path, size: int, changed: int, name: str) -> Path:
    key = hashlib.sha256(f"{file}\n{size}\n{changed}".encode()).hexdigest()[:16]
    try:
        cache = cache_folder() / "gguf"
    except RuntimeError as error:
        raise UserError(f"--model {name}: this user has no home folder for its weights; set XDG_CACHE_HOME") from error
    folder = cache / f"{file.stem}-{key}"
    if not folder.is_dir():
        if find_spec("gguf") is None:
            raise UserError(f"--model {name}: GGUF files need the package gguf, which is not installed; {INSTALL}")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not folder.is_dir():  # another process may have made it meanwhile
                    sweep(cache.glob(f".{glob.escape(folder.name)}.*"))
                    log.info("%s: dequantising it into %s, which is done once", name, folder)
                    with replacing(folder) as made, errors_of_rust(made):
                        write_whole(file, made, name)
        except OSError as error:
            place = f"{error.filename or cache}: {error.strerror or error}"
            raise UserError(
                f"--model {name}: its dequantised weights cannot be written ({place}); make room, or set XDG_CACHE_HOME"
            ) from error
    log.info("%s: is a GGUF file, so its dequantised weights are taken, which are in %s", name, folder)
    return folder


def write_whole(file: Path, folder: Path, name: str) -> None:
    """Write the model of a GGUF file, with whole weights, and its tokenizer; arguments and errors as ``dequantised``.

    Args:
        folder: that is written to.
    """
    at: dict = {"gguf_file": file.name, "local_files_only": True}
    try:
        settings = getattr(transformers, "GgufConfig", None)  # versions without it dequantise every file
        whole = {"quantization_config": settings(dequantize=True)} if settings else {}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **at)
        model, found = AutoModelForCausalLM.from_pretrained(
            file.parent,
            **at,
            dtype="auto",
            **whole,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # a file with a wrong value in it has errors of many kinds
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
            raise
        reason = one_line(error)[:200].rstrip(".")
        raise UserError(
            f"--model {name}: cannot be read as a GGUF file ({reason}); it is cut, or of a kind that transformers does "
            "not read: download it again, or take the model that it was made from"
        ) from error
    check_kind(model.config, name)
    check_report(model, found, name)
    if file.stat().st_size < 4 * model.num_parameters() and model.dtype == torch.float32:
        model.to(torch.bfloat16)  # fewer bytes than fp32 has: they were quantised, and fp32 would only be larger
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
