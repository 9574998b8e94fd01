"""A model in a GGUF file: dequantised once into a folder of safetensors, which everything else reads.

Training, evaluation and merging so have the same weights, and the minutes that the conversion takes are spent once.
"""

import functools
import glob
import hashlib
import logging
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from granite_scu.config.errors import UserError
from granite_scu.model.base_files import INDEX, SINGLE, check_kind, check_report, head_of
from granite_scu.storage.atomic import errors_of_rust, remove, replacing
from granite_scu.storage.kept import cache_folder

log = logging.getLogger(__name__)

INSTALL = "pip install 'granite-scu[gguf]'"


def find(path: Path, name: str) -> Path | None:
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
                    for leftover in cache.glob(f".{glob.escape(folder.name)}.*.tmp"):  # of a process that was killed
                        remove(leftover)
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
        reason = " ".join(str(error).split())[:200].rstrip(".")
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
