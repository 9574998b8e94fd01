"""What is wrong with the files of a base model: seen before anything is loaded, and told with a remedy."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from granite_scu.config.errors import UserError
from granite_scu.config.untrusted_input import parse_json
from granite_scu.storage.run_folder import ADAPTER_CONFIG

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN = "pytorch_model.bin"

_POINTER = b"version https://git-lfs"
"""What begins the few lines that a clone without git-lfs has in place of a large file."""


def check_files(folder: Path, name: str) -> None:
    """Refuse a folder that is no saved model, or holds pointers in place of its small files.

    Args:
        folder: where the model is.
        name: as ``--model`` has it.

    Raises:
        UserError: with what to do instead.
    """
    if not (folder / "config.json").is_file():
        if (folder / ADAPTER_CONFIG).is_file():
            raise UserError(
                f"--model {name}: the folder holds an adapter, no whole model; give its base by --model, and this "
                f"folder by --adapter {name} to continue from it"
            )
        raise UserError(f"--model {name}: the folder holds no config.json, so it is not a saved model")
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"--model {name}: the folder holds an adapter beside the whole model, which transformers would put on top "
            f"of it; move {ADAPTER_CONFIG} away, or the model to a folder of its own"
        )
    for file in ("config.json", "tokenizer.json", "tokenizer.model"):
        if (folder / file).is_file():
            _refuse_pointer(folder / file, name)
    _check_dtype(folder / "config.json", name)


def _check_dtype(file: Path, name: str) -> None:
    """Refuse a type of numbers that PyTorch has none of; transformers fails at it as it reads the tokenizer."""
    try:
        config = parse_json(file.read_bytes())
        dtype = config.get("dtype") or config.get("torch_dtype") or "auto"
    except (ValueError, AttributeError):  # what is wrong with such a file, transformers says
        return
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UserError(f"--model {name}: config.json has the dtype {dtype!r}; write bfloat16, float16 or float32")


def check_weights(folder: Path, name: str) -> None:
    """Refuse weights that are not there, not whole, or not in safetensors; only the heads of the files are read.

    Args:
        folder: where the model is.
        name: as ``--model`` has it.

    Raises:
        UserError: names the file, and what to do.
    """
    for file in weight_files(folder, name):
        _refuse_pointer(file, name)
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise UserError(f"--model {name}: {file.name} is cut or damaged ({error}); download it again") from error


def has_weights(folder: Path) -> bool:
    """Whether there are weights, in whatever state; a configuration alone can be planned with."""
    return any((folder / file).exists() for file in (SINGLE, INDEX, BIN, f"{BIN}.index.json"))


def weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files of a saved model, as transformers chooses them.

    Raises:
        UserError: there are none, or one of several is missing.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        _refuse_pointer(folder / INDEX, name)
        try:
            shards = sorted(set(parse_json((folder / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"--model {name}: {INDEX} is damaged ({error}); download it again") from error
        for shard in map(str, shards):
            if Path(shard).name != shard:
                raise UserError(f"--model {name}: {INDEX} names {shard}, which is no file of the folder itself")
            if not (folder / shard).is_file():
                raise UserError(f"--model {name}: {shard} is missing, which {INDEX} names; download it again")
        return [folder / shard for shard in shards]
    if has_weights(folder):
        raise UserError(f"--model {name}: {no_safetensors(name)}")
    raise UserError(f"--model {name}: the folder has no file named {SINGLE}; only safetensors and GGUF are read")


def no_safetensors(name: str) -> str:
    """What is wrong with weights in PyTorch's old format, and the command that converts them."""
    return (
        "its weights are pickles (pytorch_model.bin), which can hold code; convert them to safetensors, and train on "
        'the new folder: python -c "from transformers import AutoModelForCausalLM, AutoTokenizer; '
        f"[kind.from_pretrained({name!r}).save_pretrained('converted') for kind in (AutoModelForCausalLM, "
        'AutoTokenizer)]"'
    )


def check_kind(config: PretrainedConfig, name: str) -> None:
    """Refuse a model that does not continue text, or whose weights are quantised in a way that cannot be trained on.

    Args:
        config: of the model.
        name: as ``--model`` has it.

    Raises:
        UserError: with what to take instead.
    """
    kind = type(config)
    reads_both_ways = kind in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False) or reads_both_ways:
        raise UserError(
            f"--model {name}: a {config.model_type} model is no causal language model; take one that continues text"
        )
    if config.get_text_config() is not config and not hasattr(config, "num_hidden_layers"):
        raise UserError(
            f"--model {name}: a {config.model_type} model reads pictures or sound beside text, which cannot be trained "
            "on here; take one of text alone"
        )
    if getattr(config, "quantization", None):
        raise UserError(f"--model {name}: its weights are quantised for MLX, and {_INSTEAD}")
    method = quantised_by(config)
    if method and method != "bitsandbytes 4-bit":
        raise UserError(f"--model {name}: its weights are quantised ({method}), and {_INSTEAD}")


_INSTEAD = (
    "an adapter cannot be trained on those; take the model that it was made from, with --4bit-quantization to save "
    "memory, or a GGUF file, which is dequantised"
)


IN_4_BITS = "bitsandbytes 4-bit"
"""The one method whose weights are trained upon as they are."""


def quantised_by(config: PretrainedConfig) -> str | None:
    """The method by which the weights in a model's files are quantised; None where they are not."""
    written = getattr(config, "quantization_config", None)
    if not written:
        return None
    settings = written if isinstance(written, dict) else written.to_dict()
    if settings.get("load_in_4bit") and settings.get("quant_method", "bitsandbytes") == "bitsandbytes":
        return IN_4_BITS
    return str(settings.get("quant_method", "by an unknown method"))


def head_of(file: Path, size: int, name: str) -> bytes:
    """The first bytes of a file of the model that ``--model`` names. Raises UserError where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(size)
    except OSError as error:
        raise UserError(f"--model {name}: {file.name} cannot be read ({error.strerror})") from error


def _refuse_pointer(file: Path, name: str) -> None:
    if head_of(file, len(_POINTER), name) == _POINTER:
        raise UserError(
            f"--model {name}: {file.name} is a git-lfs pointer, not the file itself; fetch it: "
            f"git -C {name} lfs install && git -C {name} lfs pull"
        )


_COMPUTED = re.compile(r"\.(inv_freq|masked_bias|position_ids|num_batches_tracked|attn(\.attention)?\.bias)$")
"""What files of older versions hold besides weights, and every model computes itself."""


def check_report(model: PreTrainedModel, found: dict[str, Any], name: str) -> None:
    """Refuse a model that is not what its files hold: transformers would fill up with random numbers, and only log it.

    Args:
        model: that was loaded; may be without memory.
        found: what ``from_pretrained(output_loading_info=True)`` returned besides it.
        name: as ``--model`` has it.

    Raises:
        UserError: names up to three tensors of each kind that differ.
    """
    kind, whole = model.config.model_type, len(model.state_dict())
    missing, unexpected = found["missing_keys"], {k for k in found["unexpected_keys"] if not _COMPUTED.search(k)}
    misshapen = {
        f"{key} is {_shape(has)} and should be {_shape(wanted)}" for key, has, wanted in found["mismatched_keys"]
    }
    wrong = [
        f"{said} ({', '.join(sorted(keys)[:3])}{', ...' * (len(keys) > 3)})"
        for keys, said in (
            (missing, f"lack {len(missing)} of the {whole} tensors of this {kind} model"),
            (unexpected, f"hold {len(unexpected)} tensors that it has no place for"),
            (misshapen, f"hold {len(misshapen)} tensors of other shapes than config.json says"),
        )
        if keys
    ]
    if wrong:
        raise UserError(
            f"--model {name}: its files {', and '.join(wrong)}; download the model again, or give its weights the "
            "config.json that belongs to them"
        )


def check_finite(model: PreTrainedModel, name: str) -> None:
    """Refuse weights with NaN or infinity in them, which would look like a learning rate that is too high.

    Raises:
        UserError: names the first tensor.
    """
    for key, parameter in model.named_parameters():
        values = _numbers(parameter)
        if values.is_floating_point() and values.numel() and not all(map(torch.isfinite, values.aminmax())):
            raise UserError(
                f"--model {name}: {key} holds NaN or infinity in {str(values.dtype).removeprefix('torch.')}, so that "
                "the model can only say NaN; download it again, or take another"
            )


def _numbers(parameter: Tensor) -> Tensor:
    """A parameter, or what tells whether one in 4 bits was finite before: the mean or the sizes of its blocks."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    return state.offset if state.nested else state.absmax


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes))
