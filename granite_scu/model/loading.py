"""Load the frozen model, its configuration and its tokenizer, and refuse what is not what its files say."""

import json
import logging
import os
import subprocess
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from granite_scu.config import own_python
from granite_scu.config.errors import UserError
from granite_scu.config.progress import tracked
from granite_scu.config.settings import TINY_MODEL, BaseConfig
from granite_scu.model.attention import CPU_ATTENTION
from granite_scu.model.base_files import (
    check_finite,
    check_kind,
    check_report,
    check_weights,
    has_weights,
    quantised_by,
)
from granite_scu.model.finding import hub_errors, resolve
from granite_scu.model.mamba2 import kernels, mamba
from granite_scu.model.mamba2.proof import Sizes
from granite_scu.storage.run_folder import read_json

log = logging.getLogger(__name__)

TESTED_TYPES = ("granite", "granitemoe", "granitemoehybrid", "granite_swa", "granitemoe_swa", "llama")
"""Model types that are tested: dense Granite 3.x, 4.1 and 4.2, Granite 3.x with experts, hybrids and dense ones of 4.0,
those with sliding windows that follow 4.2, and Llama by SmolLM2 (tests/real). Others load with a warning."""

# Left in full precision under 4 bits, besides what is no linear layer (docs/guides/qlora.md): the output head, tied to
# the embedding, sets the loss directly.
UNQUANTISED = ["lm_head"]

READ_PAST = {
    "falcon_h1": ("out_proj",),
    "falcon_mamba": ("dt_proj", "out_proj"),
    "jamba": ("dt_proj",),
    "mamba": ("dt_proj", "out_proj"),
}
"""The layers, by type of model, whose matrices transformers or its kernels read without a call of the layer: past an
adapter, and as if they were never in 4 bits. Mamba-2 layers that run our forward have none."""

CPU = torch.device("cpu")

FLASH = "flash_attention_2"

WEIGHT_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "32-true": torch.float32}
"""What the frozen weights are held in under each of Lightning's precisions."""


def device_named(name: str, flag: str = "--device") -> torch.device:
    """The device that a flag names; ``auto`` is the GPU where there is one.

    Raises:
        UserError: there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{flag} cuda: there is no CUDA device; use {flag} cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The model's own tokenizer. Raises UserError when it cannot be had, or does not work."""
    with hub_errors(name):
        return read_tokenizer(resolve(name), ours=name == TINY_MODEL)


def load_model_config(name: str) -> PretrainedConfig:
    """The model's transformers configuration. Raises UserError when it cannot be had, or no such model is trained."""
    with hub_errors(name):
        config = AutoConfig.from_pretrained(resolve(name), trust_remote_code=False)
    check_kind(config, name)
    return config


def default_config() -> PretrainedConfig:
    """The transformers configuration of the default model, which is known without a download."""
    return AutoConfig.from_pretrained(str(files("granite_scu.model") / "assets" / "granite-4.0-h-1b"))


def known_config(name: str) -> PretrainedConfig:
    """A model's transformers configuration, the default model's without asking the hub. Raises UserError as above."""
    return default_config() if name == BaseConfig.name else load_model_config(name)


def untested(name: str) -> str | None:
    """That nobody has tried models of this one's type, in one line; None where they are tested."""
    kind = known_config(name).model_type
    tested = f"{name} is a {kind} model: not tested; tested are {', '.join(TESTED_TYPES)}"
    return None if kind in TESTED_TYPES else tested


def meta_model(name: str) -> PreTrainedModel:
    """The model without memory; where its weights are on this machine, they are proved to be what it is made of.

    Raises:
        UserError: as ``load_model_config``, or the weights are missing, damaged or of another model.
    """
    config = known_config(name)
    if local_weights(name, config) is not None:
        return _read(name, device_map="meta")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def local_weights(name: str, config: PretrainedConfig) -> list[list[Any]] | None:
    """What changes where the weights on this machine do: their files, with sizes and times; None without any."""
    folder = Path(resolve(name))
    if name == BaseConfig.name or not has_weights(folder) or quantised_by(config):
        return None
    states = {str(file): file.stat() for file in sorted(folder.iterdir()) if file.is_file()}
    return [[file, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for file, s in states.items()]


def _read(name: str, **how: Any) -> PreTrainedModel:
    """What ``from_pretrained`` makes of a model's files. Raises UserError where that is not all of them."""
    transformers_logging.disable_progress_bar()  # ours shows what takes long
    with hub_errors(name):
        place = resolve(name)
        if Path(place).is_dir():
            check_weights(Path(place), name)
        model, found = AutoModelForCausalLM.from_pretrained(
            place,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told by us, with their names
            **how,
        )
    check_report(model, found, name)
    return model


def embedding_rows(config: PretrainedConfig) -> int | None:
    """Tokens that a model has an embedding for; None where its configuration does not say."""
    return getattr(config.get_text_config(), "vocab_size", None)


def max_positions(config: PretrainedConfig) -> int | None:
    """Tokens of a text that a model was made for; None where its configuration does not say, or no layer knows a
    position, as of Granite 4.0 H."""
    rotary = getattr(config, "position_embedding_type", "rope") == "rope"
    return getattr(config, "max_position_embeddings", None) if rotary else None


def has_position_table(config: PretrainedConfig) -> bool:
    """Whether a model looks positions up in a table, as OPT and GPT-J do: one beyond ``max_positions`` is an error.

    Rotary ones are computed, so that a longer text is merely one that the model was not made for.
    """
    most = max_positions(config)
    if not most or hasattr(config, "rope_parameters"):
        return False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    words = model.get_input_embeddings()
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not words]
    tables += [buffer for name, buffer in model.named_buffers() if name.endswith("embed_positions")]
    return any(most <= len(table) <= most + 2 for table in tables)  # some have rows before the first position


def choose_attention(config: PretrainedConfig, asked: str, taken: str) -> str:
    """The attention implementation that a model runs in.

    Args:
        config: of the model.
        asked: ``--attn``.
        taken: what the machine makes of that for a model that has them all; ``auto`` where none was asked.

    Raises:
        UserError: the model lacks what was asked for.
    """
    taken = "sdpa" if taken == "auto" else taken
    kind = _class_of(config)
    flash = getattr(kind, "_compatible_flash_implementations", None) or [FLASH]  # what a class names is all it takes
    lacking = {"sdpa": not getattr(kind, "_supports_sdpa", True), FLASH: FLASH not in flash}
    if not lacking.get(taken):
        return taken
    instead = "eager" if lacking["sdpa"] else "sdpa"
    if asked != "auto":
        raise UserError(
            f"--attn {asked}: transformers has no such attention for {config.model_type} models; use --attn {instead}"
        )
    return instead


def attention_on(device: torch.device, config: PretrainedConfig, attention: str) -> str:
    """What transformers is told for an attention of ``choose_attention``: a CPU has one that is faster than SDPA's."""
    replaceable = getattr(_class_of(config), "_supports_attention_backend", False)
    return CPU_ATTENTION if attention == "sdpa" and device.type == "cpu" and replaceable else attention


def _class_of(config: PretrainedConfig) -> type | None:
    return AutoModelForCausalLM._model_mapping.get(type(config), None)


def four_bit_layers(name: str) -> set[str]:
    """The layers of a model that ``load_model`` holds in 4 bits, by transformers' own rule, without loading it.

    Raises:
        UserError: as ``meta_model``, or bitsandbytes is not installed.
    """
    four_bits = _four_bits(torch.bfloat16, known_config(name))
    quantizer = AutoHfQuantizer.from_config(four_bits, pre_quantized=False)
    model = meta_model(name)
    quantizer.preprocess_model(model, device_map=None)
    return _in_four_bits(model)


def _four_bits(dtype: torch.dtype, config: PretrainedConfig) -> BitsAndBytesConfig:
    """How a model's 4-bit weights are made, for products in ``dtype``. Raises UserError without bitsandbytes."""
    if find_spec("bitsandbytes") is None:
        raise UserError("--4bit-quantization: bitsandbytes is not installed; pip install 'granite-scu[quant]'")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[*UNQUANTISED, *READ_PAST.get(config.model_type, ())],
    )


def _in_four_bits(model: PreTrainedModel) -> set[str]:
    from bitsandbytes.nn import Linear4bit  # late: it need not be installed

    return {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def _take_precision(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Of a base whose files are in 4 bits transformers leaves what it was made for: its products, and its weights."""
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = dtype
    for parameter in model.parameters():
        # Packed weights may be stored as floats too, which are no numbers.
        if parameter.is_floating_point() and getattr(parameter, "quant_state", None) is None:
            parameter.data = parameter.data.to(dtype)


def load_model(
    config: BaseConfig, dtype: torch.dtype, attention: str = "sdpa", device: torch.device = CPU
) -> PreTrainedModel:
    """The frozen causal language model in ``dtype``, its Mamba-2 layers ready for training.

    Args:
        config: what to load and how.
        dtype: of the weights; of the products with 4-bit weights.
        attention: what the machine makes of the attention that ``config`` asks for.
        device: where the model will run: 4-bit weights are made there, others come on the CPU, for the Trainer to move.

    Raises:
        UserError: unknown model, attention that it lacks, 4 bits without bitsandbytes or of a model that has no layer
            for them, or no compiled kernels where they are insisted on.
    """
    known = known_config(config.name)
    attention = choose_attention(known, config.attention, attention)
    kwargs: dict = {"dtype": dtype, "attn_implementation": attention_on(device, known, attention)}
    if config.quantize_4bit:
        kwargs["quantization_config"] = _four_bits(dtype, known)
        kwargs["device_map"] = {"": device}  # without it every process would quantise on the first GPU
    with _showing_progress(f"loading the weights of {config.name}"):
        model = _read(config.name, **kwargs)
    check_finite(model, config.name)
    if quantised_by(known):
        _take_precision(model, dtype)
    if config.quantize_4bit and not _in_four_bits(model):
        kind = model.config.model_type
        raise UserError(f"--4bit-quantization: transformers holds no layer of {kind} models in 4 bits; leave it out")
    if config.quantize_4bit and device.type == "cpu":
        # On the CPU what was not quantised is a view of the mapped files, whose other pages would stay with it.
        for parameter in model.parameters():
            if parameter.is_floating_point():  # packed weights are bytes
                parameter.data = parameter.data.clone()
    for module in model.modules():
        # bitsandbytes on a CPU with AVX512-BF16 would repack the weights in place in the first evaluation, and
        # asserts there that a layer's outputs are a multiple of 32; those of Granite's Mamba in_proj are not.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model.requires_grad_(False)
    mixers = mamba.layers_of(model)
    mamba.check(model)
    if mixers:
        sizes = Sizes.of(next(iter(mixers.values())))
        mamba.install(model, kernels.choose(config.kernels, device, dtype, sizes))
    return model


@contextmanager
def _showing_progress(phase: str) -> Iterator[None]:
    """What transformers would show a bar of its own for while the context lasts, has ours, or a line now and then."""

    def ours(theirs: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        items = given[0] if given else None
        if not isinstance(items, Collection):
            return theirs(*given, **named)
        # Of several processes one shows it.
        return tracked(
            items, phase, Console(stderr=True, quiet=getattr(rank_zero_only, "rank", 0) != 0), announced=False
        )

    before = transformers_logging.set_tqdm_hook(ours)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of forward passes in one of Lightning's precisions."""
    dtype = WEIGHT_DTYPES[precision]
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def announce_kernels(model: torch.nn.Module) -> None:
    """Say what the Mamba-2 layers run in, if there are any."""
    if found := mamba.kernels_in_use(model):
        log.info("Mamba-2 layers run in %s", found.name)


TEXT = "The quick brown fox: 3 < 5, na\u00efve.\n\n\tdef f(x):  return x\n"
"""What is tried on."""

_SECONDS, _MEMORY = 5, 4 << 30
_MAX_TOKENS = 20 * len(TEXT)
_LARGEST_ID, _LONGEST = 10_000_000, 10_000

_TRY = f"""
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
    resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY}, {_MEMORY}))
except ImportError:  # on Windows
    pass
from tokenizers import Tokenizer
try:
    tokenizer = Tokenizer.from_file(sys.argv[1])
    ids = tokenizer.encode({TEXT!a}).ids
    if len(ids) > {_MAX_TOKENS}:
        sys.exit(f"it makes {{len(ids):,}} tokens of {len(TEXT)} characters")
    tokens = tokenizer.get_vocab()
    if (largest := max(tokens.values(), default=0)) > {_LARGEST_ID}:
        sys.exit(f"it has a token of the number {{largest}}")
    if (longest := max(map(len, tokens), default=0)) > {_LONGEST}:
        sys.exit(f"it has a token of {{longest:,}} characters")
    tokenizer.decode(ids)
except Exception as error:
    sys.exit(str(error))
"""


def read_tokenizer(path: str, ours: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or of a model on the hub. It has been tried, a folder's in a process of its own first.

    At some contents of a ``tokenizer.json`` the tokenizers library, which is written in Rust, ends the process; others
    make millions of tokens of a page. No schema says which.

    Args:
        path: the folder, or the hub id.
        ours: it comes with this package, and needs no process of its own to be tried in.

    Raises:
        ValueError: its files are wrong. What transformers raises for one that is not there passes.
    """
    if not ours and (file := Path(path) / "tokenizer.json").is_file():
        _try_file(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer.decode(tokenizer(TEXT)["input_ids"])
        texts = (tokenizer.eos_token, tokenizer.chat_template)
    except (AttributeError, TypeError, ArithmeticError, LookupError, AssertionError) as error:
        raise ValueError(f"its tokenizer's files are wrong ({type(error).__name__}: {error})") from error
    if not all(isinstance(text, str | dict | None) for text in texts):
        raise ValueError("its tokenizer's end of text or chat template is no text")
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files as transformers 4, vLLM and llama.cpp's converter read them too.

    Transformers 5 has new names for its general class and for further special tokens, and reads the old ones too.
    """
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = read_json(file)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    for of_this_machine in ("backend", "is_local", "local_files_only"):
        settings.pop(of_this_machine, None)
    file.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _try_file(file: Path) -> None:
    """Raises ValueError where the library refuses a ``tokenizer.json`` or ends, takes longer than 5 seconds or more
    than 4 GiB, or makes more tokens of a text than any tokenizer would."""
    line = own_python.command(_TRY, str(file))
    alone = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # threads reserve memory
    try:
        done = subprocess.run(
            line, env=alone, stdin=subprocess.DEVNULL, capture_output=True, timeout=12 * _SECONDS, check=False
        )
        code, words = done.returncode, done.stderr.decode(errors="replace").strip().splitlines()
    except subprocess.TimeoutExpired:
        code, words = -1, []
    if code == 1 and words:
        raise ValueError(f"its tokenizer.json cannot be used: {words[-1][:150]}")
    if code:
        limits = f"{_SECONDS} seconds or {_MEMORY >> 30} GiB"
        raise ValueError(f"its tokenizer.json cannot be used: the library ends at it, or takes more than {limits}")
