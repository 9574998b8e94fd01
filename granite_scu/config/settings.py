"""The configuration of a run: plain dataclasses, the one source of every default.

They are filled from YAML and flags (see ``cli`` and ``flags``) and import nothing heavy, so that a wrong
request is refused at once. A field's docstring line gives its meaning and unit; values that follow
from others (steps an epoch, N, the precision ``auto`` stands for) are computed where they are used.
"""

import codecs
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar, cast

from granite_scu.config.errors import UserError
from granite_scu.config.untrusted_input import parse_json
from granite_scu.control import Controller, build, find, tracks
from granite_scu.control.loop import AT_REST

TINY_MODEL = "tiny-granite-h"
"""The name of the embedded model."""

NO_ENCODINGS = ("utf-7", "unicode-escape", "raw-unicode-escape", "punycode", "idna", "undefined")
"""Codecs of Python that no file of text is written in, and that may yield what is no text."""

MAX_PASSES = 1000
"""As often a source may be read in an epoch; the epoch's documents are listed in memory."""

HUB_PREFIX = "hf:"
DEFAULT_DATASET = f"{HUB_PREFIX}Salesforce/wikitext:wikitext-2-raw-v1"
"""What is read when nothing is named."""

DEFAULT_STEPS, DEFAULT_RATE, DEFAULT_WARMUP, DEFAULT_EVERY = 1000, 1e-4, 50, 10
"""The guides' steps, learning rate, warm-up and steps between ticks: of data that fill them (``training.defaults``)."""

MIN_TICKS = 30
"""Of a run whose controller was asked for; half as many of one that holds drift, whose ticks cost more."""

ADVISED_DRIFT = "5%"
"""The budget that is named to a run without one: with it SmolLM2 gave more right answers than with 2 %, and lost as few
others (research/evidence/real/findings.md)."""


def usual_every(steps: int) -> int:
    """Steps between the ticks of a controller that was asked for."""
    return min(DEFAULT_EVERY, max(1, steps // MIN_TICKS))


DEFAULT_RANK, DEFAULT_ALPHA = 16, 32.0
"""Of adapters that start from nothing."""

SEED = 42

PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}
"""Lightning's names by those of ``--precision``."""

SHORT_PRECISIONS = {name: short for short, name in PRECISIONS.items()}

LOGGERS = ("wandb", "mlflow", "trackio")
"""What may log a run beside TensorBoard and CSV; each is an extra of the package."""

IGNORED = -100
"""Label of a token that is not learned and not measured: what PyTorch's cross-entropy leaves out."""

SET_BY_THE_RUN = {
    "devices": "--multi-gpu",
    "num_nodes": "--multi-gpu under torchrun or SLURM",
    "strategy": "--multi-gpu",
    "max_epochs": "--num-epochs",
    "val_check_interval": "--eval-steps",
    "check_val_every_n_epoch": "--eval-steps",
    "enable_checkpointing": "--save-steps",
    "gradient_clip_val": "--gradient-clip",
    "fast_dev_run": "--max-steps",
    "overfit_batches": "--max-steps",
    "limit_train_batches": "--max-steps",
}
"""Arguments of Lightning's Trainer that follow from other settings, and which those are."""


_Rule: TypeAlias = tuple[Callable[[Any], bool], str]
"""What values a setting may have, and how to say it."""

MAX_COUNT = 10**12
"""Steps, tokens and whatever else is counted: more is a slip, and no float or index takes every number."""

MAX_BATCH, MIN_BLOCK, MAX_BLOCK = 2**20, 8, 2**18
"""Blocks on a device and tokens in a block: no device there is has room for more, and each is looked at in turn."""

MIN_GENERAL, MAX_GENERAL = 1024, 2**20
"""Tokens of general text: a quarter of fewer is too noisy to steer by; more says nothing more and takes long."""

MAX_SAVE_STEPS = 500
"""Optimizer steps between two checkpoints of a long run."""

MAX_WORKERS = 256
"""Loader processes: tokens are read faster than any device takes them, and each process costs a start and memory."""

_POSITIVE: _Rule = (
    lambda value: 1e-12 <= value <= 1e15,
    "must be positive and finite, from 1e-12 to 1e15",
)
_NOT_NEGATIVE: _Rule = (lambda value: 0 <= value < math.inf, "must be finite and not negative")
_SHARE: _Rule = (lambda value: 0 < value <= 1, "must be in (0, 1]")
_BELOW_1: _Rule = (lambda value: 0 <= value < 1, "must be in [0, 1)")
_BETWEEN_0_AND_1: _Rule = (lambda value: 0 < value < 1, "must lie between 0 and 1")
_TIME: _Rule = (
    lambda value: re.fullmatch(r"(?=.*[1-9])\d+:\d\d:\d\d:\d\d", value) is not None,
    "must have the form DD:HH:MM:SS, as 00:01:30:00, and be no less than a second",
)


def _at_least(least: int, unit: str = "", most: int = MAX_COUNT) -> _Rule:
    return lambda value: least <= value <= most, f"must be at least {least}{unit}, and at most {most:,}"


def check(valid: bool, flag: str, value: object, remedy: str) -> None:
    """Refuse a value of a flag, with what to do, unless it is valid. Raises UserError."""
    if not valid:
        text = str(value)
        raise UserError(f"{flag} {text if len(text) <= 300 else f'{text[:60]}...'}: {remedy}")


def share(value: float | str) -> float:
    """A share as a number, of 0.1 or 10%. Raises ValueError where it is neither."""
    text = str(value)
    number = float(f"{float(text.removesuffix('%')) / 100:.12g}") if text.endswith("%") else float(text)
    if not math.isfinite(number):
        raise ValueError("is not finite")
    return number


def setting(default: Any, name: str = "", rule: _Rule | None = None) -> Any:
    """A field that is called otherwise than its flag, or has a rule of its own.

    Args:
        default: its value where nobody gives one.
        name: its flag, or where it has none its dotted key, as ``--group.key``.
        rule: that its value keeps to; null is what a setting without a value has.
    """
    return field(default=default, metadata={"name": name, "rule": rule})


def name_of(setting: Field[Any]) -> str:
    """What a setting is called on the command line: its flag, or its dotted key where it has none."""
    return setting.metadata.get("name") or f"--{setting.name.replace('_', '-')}"


class Group:
    """Settings: making them makes numbers of shares, and refuses a value that its field's rule does not allow."""

    NO_INFLUENCE: ClassVar[tuple[str, ...]] = ()
    """Those that change no number of a run: where files lie, how fast it goes, or what is compared otherwise: text,
    template and adapter by their checksums, the length as a number of steps."""

    def __post_init__(self) -> None:
        for each in fields(cast(Any, self)):
            given = value = getattr(self, each.name)
            if value is None:
                continue
            if each.type in (float | str, float | str | None):
                try:
                    object.__setattr__(self, each.name, value := share(value))
                except ValueError:
                    check(False, name_of(each), given, "is no share, such as 10% or 0.1")
            if rule := each.metadata.get("rule"):
                check(rule[0](value), name_of(each), given if isinstance(given, str) else value, rule[1])


def is_path(text: str) -> bool:
    """Whether a text is a path that leads through folders of this machine (of either kind of system)."""
    return text.startswith((".", "~")) or PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()


def last_part(text: str) -> str:
    """Of a path its last name, which says nothing about the machine; what is none as it is.

    >>> last_part("/home/ada/chats.jsonl"), last_part("hf:owner/name")
    ('chats.jsonl', 'hf:owner/name')
    """
    return (PureWindowsPath(text).name or text) if is_path(text) else text  # splits at slashes of both kinds


def is_local(model: str) -> bool:
    """Whether a base model is named by a folder or a GGUF file, which says nothing to anybody else."""
    is_one = Path(model).exists() or is_path(model) or model.endswith(".gguf") or model.count("/") != 1
    return model != TINY_MODEL and is_one


def check_model(name: str) -> None:
    """Refuse the name of a base model that is a folder or file which is not there. Asks nobody.

    Raises:
        UserError: it is one.
    """
    if is_local(name) and not Path(name).expanduser().exists():
        what = "file" if name.endswith(".gguf") else "folder"
        raise UserError(
            f"--model {name}: no such {what}, and not a hub id (owner/name) or {TINY_MODEL}; where an adapter's base "
            "was moved, give its new place by --model"
        )


Settings = TypeVar("Settings")


def from_record(kind: type[Settings], record: Mapping[str, Any], **changes: Any) -> Settings:
    """Settings as a run folder records them, but for ``changes``; what this version has no field for is left out."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in record.items() if name in known} | changes)


def check_template(name: str) -> None:
    """Refuse the path of a chat template that is not there. A name is looked up by who has the tokenizer.

    Raises:
        UserError: it is one.
    """
    is_one = is_path(name) or "/" in name or name.endswith(".jinja")
    missing = is_one and not Path(name).expanduser().is_file()
    check(not missing, "--chat-template", name, "no such file; name one that holds a chat template")


def check_template_args(arguments: list[str] | None) -> None:
    """Refuse arguments of a chat template that are none.

    Raises:
        UserError: one is not of the form name=value.
    """
    _check_named(arguments, "--chat-template-args", "enable_thinking=false")


def _check_named(arguments: list[str] | None, flag: str, example: str) -> None:
    for argument in arguments or []:
        name, _, value = argument.partition("=")
        check(name.isidentifier() and value != "", flag, argument, f"must be name=value, such as {example}")


def named_values(arguments: list[str] | None) -> dict[str, Any]:
    """The values of ``name=value``, in JSON or as texts; a list is a tuple."""
    found: dict[str, Any] = {}
    for argument in arguments or []:
        name, _, value = argument.partition("=")
        try:
            made = parse_json(value)
        except ValueError:
            made = value
        found[name] = tuple(made) if isinstance(made, list) else made
    return found


def check_system(prompt: str) -> str:
    """The system prompt, unless it is none.

    Raises:
        UserError: it is empty, or no UTF-8 text.
    """
    check(bool(prompt.strip()), "--system", repr(prompt), "the text is empty; leave it out")
    is_text = not any("\ud800" <= sign <= "\udfff" for sign in prompt)
    check(is_text, "--system", ascii(prompt), "is not UTF-8 text; correct it")
    return prompt


Recomputed = bool | Literal["selective"]
"""Whether activations are computed again in the backward pass; selective: all but products."""


@dataclass(frozen=True)
class BaseConfig(Group):
    """The frozen model.

    Attributes:
        name: hub id, local folder, or ``tiny-granite-h`` for the embedded model.
        quantize_4bit: hold the linear layers in 4 bits (nf4, double quantisation), as QLoRA does.
        attention: attention kernel; ``auto`` takes flash_attention_2 where it is installed, sdpa elsewhere, and eager
            for models that have nothing else.
        kernels: of the Mamba-2 layers; ``auto`` takes compiled ones where installed and proven right, and PyTorch
            elsewhere; ``cuda`` insists on compiled ones; ``hub`` fetches, and insists on, the hub's.
        gradient_checkpointing: recompute activations in the backward pass, about 30 % slower; selective, of a compiled
            model all but products, about 5 %; null takes what the run is predicted to fit with, fastest first.
        compile: compile the decoder's layers (torch.compile); null does on a GPU with Triton if that saves time.
        compile_mode: mode of torch.compile; max-autotune without CUDA graphs.
    """

    name: str = setting("ibm-granite/granite-4.0-h-1b", "--model")
    quantize_4bit: bool = setting(False, "--4bit-quantization")
    attention: Literal["sdpa", "eager", "flash_attention_2", "auto"] = setting("auto", "--attn")
    kernels: Literal["auto", "torch", "cuda", "hub"] = "auto"
    gradient_checkpointing: Recomputed | None = None
    compile: bool | None = setting(None, "--torch-compile")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(bool(self.name.strip()), "--model", "''", "is empty; name a model, or leave it out")


@dataclass(frozen=True)
class LoraConfig(Group):
    """The adapter: delta W = scale B A on every targeted matrix, with scale = alpha / rank.

    Attributes:
        rank: rank r of each update; null takes 16, or that of ``adapter``.
        alpha: numerator of the update's scale alpha / r; null takes 32, or that of ``adapter``.
        rslora: rank-stabilised LoRA, whose scale is alpha / sqrt(r); of ``adapter`` its own holds.
        dropout: probability of dropping an input of the adapter.
        experts: adapt the experts of a mixture too, each by matrices of its own; their adapters are several times as
            large as all others together.
        targets: what to adapt: attention, mlp, mamba, all, or names of layers, also with commas; null adapts every
            linear layer of attention, Mamba and MLP, or the layers of ``adapter``.
        adapter: folder of a LoRA adapter to start from: rank, alpha and layers are its own, S measures how far training
            moves it.
    """

    NO_INFLUENCE = ("adapter",)

    rank: int | None = setting(None, "--lora-r", _at_least(1))
    alpha: float | None = setting(None, "--lora-alpha", _POSITIVE)
    rslora: bool = False
    dropout: float | str = setting(0.0, "--lora-dropout", _BELOW_1)
    experts: bool = setting(False, "--lora-experts")
    targets: list[str] | str | None = setting(None, "--lora-targets")
    adapter: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets is not None:
            names = [name.strip() for part in listed(self.targets) for name in part.split(",") if name.strip()]
            check(bool(names), "--lora-targets", "''", "is empty; give attention, mlp, mamba, all or names of layers")
            object.__setattr__(self, "targets", None if names == ["all"] else names)
        without = "adapters of experts have no dropout; leave out one of --lora-dropout and --lora-experts"
        check(not (self.experts and self.dropout), "--lora-dropout", self.dropout, without)

    @property
    def scale(self) -> float:
        """What B A is multiplied by, where there is no adapter that has its own: alpha / r, or alpha / sqrt(r)."""
        lora = self.resolved()
        assert lora.rank is not None and lora.alpha is not None
        return lora.alpha / (math.sqrt(lora.rank) if self.rslora else lora.rank)

    def resolved(self) -> "LoraConfig":
        """With the rank and the alpha that nulls stand for where there is no adapter to take them from."""
        rank = DEFAULT_RANK if self.rank is None else self.rank
        return replace(self, rank=rank, alpha=DEFAULT_ALPHA if self.alpha is None else self.alpha)


@dataclass(frozen=True)
class OptimizerConfig(Group):
    """AdamW, by default without weight decay: only a controller regularises, where one is asked for.

    Attributes:
        learning_rate: peak rate; null follows from the width of the model, and 1e-4 where the data fill a long run.
        schedule: course of the rate after warm-up, down to zero at the last step.
        warmup_steps: optimizer steps of linear warm-up; null takes a twentieth of the run, and 50 at most.
        beta2: decay of Adam's second moment, which remembers about 1 / (1 - beta2) steps.
        gradient_clip: largest gradient norm, data and penalty together; 0 does not clip.
        weight_decay: AdamW's own decay of A and B, which no controller steers; for comparison.
    """

    learning_rate: float | None = setting(None, rule=_POSITIVE)
    schedule: Literal["cosine", "linear", "constant"] = setting("cosine", "--lr-scheduler")
    warmup_steps: int | None = setting(None, rule=_at_least(0))
    beta2: float = setting(0.999, "--adam-beta2", _BETWEEN_0_AND_1)
    gradient_clip: float = setting(1.0, rule=_at_least(0))
    weight_decay: float = setting(0.0, "--optimizer.weight_decay", _NOT_NEGATIVE)

    def resolved(self) -> "OptimizerConfig":
        """With the guides' values for nulls, where no data have settled them."""
        rate = DEFAULT_RATE if self.learning_rate is None else self.learning_rate
        return replace(
            self, learning_rate=rate, warmup_steps=DEFAULT_WARMUP if self.warmup_steps is None else self.warmup_steps
        )


@dataclass(frozen=True)
class PriorConfig(Group):
    """What ParamBPT is measured against.

    Attributes:
        sigma: standard deviation of the Gaussian prior on each entry of delta W.
        n_tokens: N, the tokens that the description of the adapter is spread over;
            null takes the supervised tokens of the training set.
    """

    sigma: float = setting(0.02, "--prior-sigma", _POSITIVE)
    n_tokens: int | None = setting(None, rule=_POSITIVE)


@dataclass(frozen=True)
class DataConfig(Group):
    """The text and how it is cut.

    Attributes:
        path: file, folder or pattern of txt, md, jsonl, json, csv, tsv or parquet, also as .gz or .zst; stdlib-docs
            or stdlib-source for an embedded corpus; hf:owner/name or hf:owner/name:config for a data set of the hub;
            several, or the flag again, are all read; null takes wikitext-2 from the hub.
        validation_data: as path, to validate on; alone it is what is tested on too.
        test_data: as path, to test on; alone it leaves validation to held_out_share.
        held_out_share: of the documents of path, half of it to validate on and half to test on, or all of it for the
            one that has no file of its own; 0 holds nothing out; null takes a fifth of text, and of conversations a
            tenth, or a little more of a few (at most a fifth).
        text_column: field of a record (jsonl, json, csv, parquet) that holds the text.
        record_format: fields that records are read by: text (text_column), messages, prompt-completion, alpaca
            (instruction, input, output), sharegpt (conversations), or a pair such as question-answer; auto recognises
            them, and takes a text where there is one.
        encoding: of text files, such as latin-1.
        block_size: tokens in a block.
        batch_size: blocks in a micro-batch on each device.
        eval_batch_size: blocks in an evaluation batch; null takes batch_size.
        num_epochs: passes over the training blocks after which the run ends; null leaves it to max_steps, and where
            that is not given either, to how many documents there are.
        num_workers: loader processes.
        weights: how often each source is read in an epoch of training; a fraction reads another part in
            each; null reads each once.
        chat_template: of conversations: a file that holds a chat template, or the name of one of the model's own; null
            takes the model's.
        chat_template_args: arguments of the chat template, such as enable_thinking=false; a value is JSON or a text.
        system: system prompt of conversations that begin without one. It is saved in the run's chat template, so that
            later questions get it too.
        control_tokens: what becomes of control tokens such as <|end_of_text|> that stand in the text itself: text reads
            them as any other words, tokens lets them act, refuse stops the run.
        loss_on: of conversations: completion supervises what the assistant says, all every token.
        packing: blocks cuts the documents in a row every block_size tokens; best-fit puts each in one piece into the
            block where it leaves the least room; auto takes best-fit where there are conversations.
        on_long: what becomes of a document that is longer than a block: split, truncate, drop or error; auto splits
            text and makes blocks as long as the longest conversation.
        split_seed: of the division into training, validation and test documents.
        cache_dir: where tokens are kept; null takes granite-scu in XDG_CACHE_HOME or ~/.cache.
        isolate_documents: documents that share a block do not see one another, in attention, convolution and scan.
        train_tokens: train on about so many tokens of the training split, blocks spread evenly over it; null takes all.
        stream: read, tokenise and pack the training text during training, and keep nothing of it: for text
            larger than the disk.
    """

    NO_INFLUENCE = (
        *("path", "validation_data", "test_data", "cache_dir", "chat_template", "chat_template_args", "system"),
        *("num_workers", "eval_batch_size", "num_epochs"),
    )

    path: list[str] | str | None = setting(None, "--data-dir")
    validation_data: list[str] | str | None = None
    test_data: list[str] | str | None = None
    held_out_share: float | str | None = setting(
        None,
        rule=(
            lambda value: value == 0 or 1e-3 <= value < 1,
            "must be 0, or at least 0.1% and less than 100%: the rest is trained on",
        ),
    )
    text_column: str = "text"
    record_format: Literal[
        "auto",
        "text",
        "messages",
        "prompt-completion",
        "alpaca",
        "sharegpt",
        "input-output",
        "question-answer",
        "instruction-response",
        "prompt-response",
        "user-assistant",
    ] = "auto"
    encoding: str = "utf-8"
    block_size: int = setting(1024, rule=_at_least(MIN_BLOCK, " tokens", MAX_BLOCK))
    batch_size: int = setting(8, rule=_at_least(1, most=MAX_BATCH))
    eval_batch_size: int | None = setting(None, rule=_at_least(1, most=MAX_BATCH))
    num_epochs: float | None = setting(None, rule=_POSITIVE)
    num_workers: int = setting(0, rule=_at_least(0, most=MAX_WORKERS))
    weights: list[float] | None = setting(None, "--data-weights")
    chat_template: str | None = None
    chat_template_args: list[str] | None = None
    system: str = ""
    control_tokens: Literal["text", "tokens", "refuse"] = "text"
    loss_on: Literal["completion", "all"] = "completion"
    packing: Literal["auto", "blocks", "best-fit"] = "auto"
    on_long: Literal["auto", "split", "truncate", "drop", "error"] = "auto"
    split_seed: int = 0
    cache_dir: str | None = None
    isolate_documents: bool = True
    train_tokens: int | None = setting(None, "--data.train_tokens", _at_least(1))
    stream: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        known = _is_encoding(self.encoding)
        check(known, "--encoding", self.encoding, "no such encoding; try utf-8, latin-1 or utf-16")
        of_text = self.record_format in ("auto", "text") or self.text_column == DataConfig.text_column
        remedy = f"has no text column; leave it or --text-column {self.text_column} out"
        check(of_text, "--record-format", self.record_format, remedy)
        given = {"--data-dir": self.path, "--validation-data": self.validation_data, "--test-data": self.test_data}
        for flag, names in given.items():
            check(names != [], flag, "[]", "names no text; name a file or a folder, or leave it out")
            check(all(name.strip() for name in listed(names)), flag, "''",
                  "is empty; name a file or a folder, or leave it out")  # fmt: skip
        self._check_held_out()
        check_template_args(self.chat_template_args)
        if self.system:
            check_system(self.system)
        if self.weights is not None:
            valid = all(0 <= weight <= MAX_PASSES for weight in self.weights) and any(self.weights)
            remedy = f"must be passes from 0 to {MAX_PASSES}, and not all zero"
            check(valid, "--data-weights", self.weights, remedy)
            remedy = f"there are {len(self.sources)} sources; give a weight for each --data-dir"
            check(len(self.weights) == len(self.sources), "--data-weights", self.weights, remedy)
        self._check_sources()

    def _check_sources(self) -> None:
        for flag, names in (("--data-dir", self.sources), *self.files.values()):
            places = [os.path.abspath(os.path.expanduser(name)) for name in names]
            again = next((name for name, place in zip(names, places, strict=True) if places.count(place) > 1), None)
            twice = ", and --data-weights 2 to read it twice" if flag == "--data-dir" else ""
            check(again is None, flag, again, f"named twice; name it once{twice}")
        for flag, value, why in (
            ("--num-epochs", self.num_epochs, "nobody knows how long a pass over a stream is; give --max-steps"),
            ("--data-weights", self.weights, "the sources of a stream are read in turn, a document each"),
            ("--data.train_tokens", self.train_tokens, "a stream is not counted; give --max-steps"),
        ):
            check(not self.stream or value is None, flag, value, f"not with --stream: {why}")

    def _check_held_out(self) -> None:
        own = self.files
        remedy = "validation and test have files of their own; leave it out"
        check(not (self.held_out_share and len(own) == 2), "--held-out-share", self.held_out_share, remedy)
        for split, (flag, names) in own.items():
            # A data set of the hub may have a split for each, which shows when it is there.
            twice = [name for name in names if name in self.sources and not name.startswith(HUB_PREFIX)]
            remedy = f"is trained on too, as --data-dir; leave it out, or name other text to {_USES[split]} on"
            check(not twice, flag, ", ".join(twice), remedy)
        validated = [name for name in listed(self.validation_data) if not name.startswith(HUB_PREFIX)]
        twice = [name for name in listed(self.test_data) if name in validated]
        remedy = "is --validation-data too; leave it out here, and it is validated and tested on"
        check(not twice, "--test-data", ", ".join(twice), remedy)

    @property
    def sources(self) -> list[str]:
        """What is trained on, and held out of; nothing where the hub's default is."""
        return listed(self.path)

    @property
    def files(self) -> dict[str, tuple[str, list[str]]]:
        """The splits that are read from files of their own: the flag that names them, and they."""
        given = {"validation": self.validation_data, "test": self.test_data}
        return {split: (f"--{split}-data", listed(names)) for split, names in given.items() if names is not None}

    def named_for(self, split: str) -> tuple[str, str]:
        """The flag that names the text of a split, and what that text is called in messages."""
        flag, names = self.files.get(split, ("--data-dir", [self.named]))
        return flag, ", ".join(names)

    @property
    def tested(self) -> list[str]:
        """The names of the text that is tested on: files of their own, or what a part of is held out of."""
        flag = "validation" if self.doubles else "test"
        return self.files[flag][1] if flag in self.files else self.sources or [self.named]

    @property
    def is_validated(self) -> bool:
        """Whether anything is validated on."""
        return self.held_out_share != 0 or self.validation_data is not None

    @property
    def doubles(self) -> bool:
        """Whether what is validated on is tested on too."""
        return self.validation_data is not None and self.test_data is None and not self.held_out_share

    @property
    def named(self) -> str:
        """What the text is called in messages."""
        return ", ".join(self.sources) or DEFAULT_DATASET.rpartition(":")[2]


@dataclass(frozen=True)
class TrainerConfig(Group):
    """What a run may set of Lightning's Trainer, under its names; the rest follows from other settings.

    Attributes:
        accelerator: device; without a GPU, cpu must be asked for.
        precision: of the products, under Lightning's names; null takes the best of the device.
        deterministic: deterministic kernels, slower on a GPU.
        max_steps: optimizer steps; with --num-epochs, whichever is reached first; -1 does not limit them.
        max_time: longest training time, DD:HH:MM:SS.
        accumulate_grad_batches: micro-batches in a step.
        limit_val_batches: batches in a validation; with a smaller --eval-batch-size it covers less text.
        log_every_n_steps: optimizer steps between log lines.
        logger: loggers of Lightning's beside ours, each by class_path and init_args.
        callbacks: callbacks of Lightning's beside ours, the same way.
        profiler: Lightning's profiler: simple or advanced.
        detect_anomaly: have PyTorch look for the operation that made a gradient not finite; slow.
    """

    NO_INFLUENCE = (
        *("accelerator", "precision", "max_steps", "log_every_n_steps", "logger", "callbacks"),
        *("profiler", "detect_anomaly"),
    )

    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = "auto"
    precision: Literal["bf16-mixed", "16-mixed", "32-true"] | None = None
    deterministic: bool | Literal["warn"] | None = None
    max_steps: int = setting(-1, rule=(lambda value: value == -1 or _at_least(1)[0](value), _at_least(1)[1]))
    max_time: str | None = setting(None, rule=_TIME)
    accumulate_grad_batches: int = setting(4, "--gradient-accumulation-steps", _at_least(1))
    limit_val_batches: int = setting(50, "--eval-iters", _at_least(1))
    log_every_n_steps: int = setting(10, "--logging-steps", _at_least(1))
    logger: list[dict[str, Any]] | dict[str, Any] | str | bool | None = setting(None, "--trainer.logger")
    callbacks: list[dict[str, Any]] | dict[str, Any] | None = setting(None, "--trainer.callbacks")
    profiler: Literal["simple", "advanced"] | None = setting(None, "--trainer.profiler")
    detect_anomaly: bool = setting(False, "--trainer.detect_anomaly")


def check_refused(name: str, law: object, asked: Collection[str]) -> None:
    """Refuse flags that a law does not go together with, as it says itself.

    Args:
        name: of the law.
        law: it, or its class.
        asked: the flags in question that are given, as ``--actuator decoupled``.

    Raises:
        UserError: names the first of them, and why.
    """
    for flag, reason in getattr(law, "refuses", {}).items():
        if flag in asked:
            raise UserError(f"--controller {name}: cannot go together with {flag}: {reason}; leave out one of them")


@dataclass(frozen=True)
class ControlConfig(Group):
    """How lambda is steered, once every ``every`` optimizer steps (a tick).

    Each controller takes the settings that it knows; null is its own default, found in its file in ``control``.

    Attributes:
        controller: name of the law, one of ``CONTROLLERS``, or where its class is, as ``package.module:Class``. A
            run has none that was given no setting of a controller but ``every``, and no budget of drift.
        target_s: the setpoint S*, a share such as 0.1 or 10%. None serves all data and models
            (docs/research/results.md), so pi has no default. A law without a setpoint ignores it.
        every: optimizer steps between ticks; null takes 10, and fewer in a short run.
        kp: proportional gain: change of ln lambda per unit of error, which pi takes in the logit of S.
        ki: integral gain, per tick.
        ema_alpha: weight of the newest measurement in the smoothed ln S; 1 does not smooth. Of pi what is logged, what
            the deadband looks at and what judges the run (reachability, equilibrium): the law has a filter of its own.
        deadband: errors |ln(S / S*)| below this leave the integral alone.
        lambda_init: lambda at the start.
        lambda_min: lower bound of lambda.
        lambda_max: upper bound of lambda.
        lambda_end: lambda at the end of the run, of the schedules linear and cosine.
        controller_args: settings of the law that have no flag, such as gain=0.3; a value is JSON or a text.
        measure: what ParamBPT counts: delta (the update) or factors (A and B themselves, initialisation included).
        actuator: how lambda acts: loss (its gradient joins the loss's) or decoupled (shrinks the update after a step).
    """

    controller: str = "pi"
    target_s: float | str | None = setting(None, rule=_BETWEEN_0_AND_1)
    every: int | None = setting(None, "--control-every", _at_least(1))
    kp: float | None = setting(None, rule=_POSITIVE)
    ki: float | None = setting(None, rule=_POSITIVE)
    ema_alpha: float | str | None = setting(None, rule=_SHARE)
    deadband: float | None = setting(None, rule=_NOT_NEGATIVE)
    lambda_init: float | None = None
    lambda_min: float = setting(1e-6, rule=_POSITIVE)
    lambda_max: float = 1e6
    lambda_end: float | None = None
    controller_args: list[str] | None = None
    measure: Literal["delta", "factors"] = "delta"
    actuator: Literal["loss", "decoupled"] = "loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.lambda_min, self.lambda_max
        check(high <= 1e30, "--lambda-max", high, "must not exceed 1e30, which fp32 still holds")
        check(low <= high, "--lambda-max", high, f"must be at least --lambda-min, here {low:g}; give both")
        first = self.lambda_init
        check(first is None or first > 0, "--lambda-init", first, "must be positive")
        bounds = f"must lie in [{low:g}, {high:g}] (--lambda-min, --lambda-max)"
        for flag, value in (("--lambda-init", self.lambda_init), ("--lambda-end", self.lambda_end)):
            check(value is None or low <= value <= high, flag, value, bounds)
        _check_named(self.controller_args, "--controller-args", "gain=0.3")
        self._check_measure()
        if self.controller != "pi" or self.target_s is not None:  # without one it may be to hold drift
            self.law()

    def law(self) -> Controller[Any]:
        """The law with its settings. A class from outside is imported.

        Raises:
            UserError: there is none of that name, a setting is not in its range, or does not go together with another.
        """
        try:
            return build(self.controller, **self._of_law())
        except (TypeError, ValueError) as error:
            words = str(error).replace("give target_s", "give --target-s")
            raise UserError(f"--controller {self.controller}: {words}") from error

    def _of_law(self) -> dict[str, Any]:
        law = find(self.controller)
        starts_for_loss = "lambda_init" in law.__dataclass_fields__ and self.lambda_init is None
        remedy = f"{self.controller}'s first lambda is one for the loss, here thousands of times too weak"
        check(not starts_for_loss or self.actuator == "loss", "--actuator", self.actuator,
               f"{remedy}; give --lambda-init")  # fmt: skip
        check_refused(self.controller, law, (f"--actuator {self.actuator}", f"--measure {self.measure}"))
        found = {name: value for name, value in vars(self).items() if name not in ("controller", "every")}
        if not tracks(law):
            found["target_s"] = None  # a law that uses none is not judged by it
        return found | {"own": named_values(found.pop("controller_args"))}

    def _check_measure(self) -> None:
        """What pi knows beforehand, it knows of the update."""
        if self.controller == "pi" and self.measure != "delta":
            remedy = "pi cannot schedule its gains by it, for A is not zero before training; give --kp and --ki"
            check(None not in (self.kp, self.ki), "--measure", self.measure, remedy)


@dataclass(frozen=True)
class DriftConfig(Group):
    """How far the model may move elsewhere: its KL divergence from what it was as training began, on general text.

    Attributes:
        max_drift: budget of drift, per cent of the bits per token that the base itself needs for general text, such as
            5%: instead of S the controller holds drift at most there; null holds none.
        general_data: general text: auto lets the base model write it before training; or files, as --data-dir.
        general_tokens: tokens of general text that are written, or read of the files.
    """

    NO_INFLUENCE = ("general_data", "general_tokens")

    max_drift: float | str | None = None
    general_data: list[str] | str = "auto"
    general_tokens: int = setting(8192, rule=_at_least(MIN_GENERAL, " tokens", MAX_GENERAL))

    def __post_init__(self) -> None:
        given = self.max_drift
        super().__post_init__()
        if self.max_drift is not None:
            budget = float(self.max_drift)
            given = given if isinstance(given, str) else f"{given:g}"
            has_unit = "%" in str(given) or budget < 1
            check(has_unit, "--max-drift", given, f"give the unit, as {budget:g}% of the base's bits")
            remedy = "must be at least 0.001% and less than 100% of the base's bits"
            check(1e-5 <= budget < 1, "--max-drift", given, remedy)
        names = listed(self.general_data)
        named = bool(names) and all(name.strip() for name in names)
        check(named, "--general-data", "''", "is empty; leave it out, or name a file")
        alone = "auto" not in names or len(names) == 1
        check(alone, "--general-data", " ".join(names), "auto stands alone; leave it out, or the files")

    @property
    def general_files(self) -> list[str]:
        """The user's files of general text; none where the base writes it."""
        names = listed(self.general_data)
        return [] if names == ["auto"] else names


AT_ONE = 0.04
"""The budget of drift that a lambda of about 1 holds."""

LEAST, MOST = AT_REST, 1e3
"""What lambda may begin with where it holds drift; the first is also its lower bound."""

LOOKING_AHEAD = ("lead=2", "kp_limit=4")
"""Settings of the law that holds drift. What is ahead is known less well than what is, so the gain is half."""


def holding_drift(control: ControlConfig, budget: float, given: Collection[str]) -> ControlConfig:
    """The settings of the law that holds S, as it holds drift at the budget p: F / H takes the place of S / (1 - S).

    Lambda begins at 1 for a budget of 4 %, nats against nats, and higher for a smaller one. That, or what it is told to
    begin with where that is more, is also the most that it may be: under Adam a weight that drowns the loss makes steps
    of the anchor's noise, which drift by as much and learn nothing. What is then beyond the budget at the end is scaled
    down to it. Drift rises within a few steps, and what lambda does to it shows as late as Adam's momentum lets it, so
    the law looks ahead.

    Args:
        control: as it is asked for.
        budget: p.
        given: names of the fields that the user gave.
    """
    low, high = (getattr(control, name) if name in given else usual
                 for name, usual in (("lambda_min", LEAST), ("lambda_max", MOST)))  # fmt: skip
    of_budget = min(max((AT_ONE / budget) ** 1.5, low), high)
    start = control.lambda_init if "lambda_init" in given and control.lambda_init else of_budget
    most = high if "lambda_max" in given else max(start, of_budget)
    own: dict[str, Any] = {"lambda_min": low, "lambda_init": start, "lambda_max": most}
    own["controller_args"] = [*LOOKING_AHEAD, *(control.controller_args or [])]
    return replace(control, controller="pi", target_s=budget / (1 + budget), **own)


MIN_DRIFT_TICKS = 3
"""The first tick tells how fast drift grows, the next moves lambda, and one must see what that did."""


def check_drift(every: int, steps: int) -> None:
    """Refuse a budget of drift in a run that is over before lambda has moved.

    Raises:
        UserError: there are too few ticks.
    """
    if (ticks := math.ceil(steps / every)) < MIN_DRIFT_TICKS:
        denser = f"set --control-every to at most {steps // MIN_DRIFT_TICKS}, or " if steps >= 3 else ""
        raise UserError(
            f"--max-drift: the run measures drift {ticks} times (its steps, {steps}, by --control-every {every}), and "
            f"needs {MIN_DRIFT_TICKS}; {denser}train for longer (--num-epochs, or --max-steps)"
        )


@dataclass(frozen=True)
class RunConfig(Group):
    """The run folder, and what happens when.

    Attributes:
        output_dir: the run folder.
        overwrite: replace a run folder that is not empty.
        resume: checkpoint folder to continue from, ``last`` for the newest intact one of output_dir, ``auto`` for that
            where there is one and the beginning where there is none.
        save_steps: optimizer steps between checkpoints; null makes it half of the run, and 500 at most.
        keep: checkpoints kept.
        eval_steps: optimizer steps between validations; null makes it a fifth to a tenth of the run, and 500 at most.
        logger: log to wandb, mlflow or trackio as well, several after one another; TensorBoard and CSV are always
            written.
        logger_offline: such loggers keep to this machine, whatever their own settings say, and ask for no login.
        samples: questions that base model and adapter answer at the end, of held-out chats (of texts, two are
            continued), and as many general ones, 30 at most; the report quotes them. What two minutes for each kind
            leave unanswered, ``granite-scu eval`` asks. 0 leaves them out.
        early_stopping: validations without improvement after which the run stops; beyond a budget of drift none counts;
            null never stops early.
        stop_at_equilibrium: ticks after which the run stops if a closed loop has held S, and the data's bits have not
            fallen, over all of them; null never stops for that.
        auto_batch_size: take the largest micro-batch that fits, found by training on it; the blocks of an optimizer
            step (batch size times accumulation) stay as many.
        memory_fraction: largest share of the GPU's memory this process may take; null takes what it needs.
        tf32: take fp32 products of the model in TF32, ten bits of mantissa, where the GPU has it; lambda's and S's own
            are always exact.
        multi_gpu: train on every visible GPU, one process each, or on what torchrun or SLURM started.
        gpus: GPUs to train on, one process each, of those that are visible; a plan takes any number; null takes one, or
            all with multi_gpu.
        fsdp: share the frozen layers out over the processes, for a model that one GPU cannot hold; adapters stay whole.
        expected_mfu: share of the device's peak that a step should reach; a run that stays below says what to change.
            Hardware presets set it; null expects nothing.
    """

    NO_INFLUENCE = (
        *("output_dir", "overwrite", "resume", "save_steps", "keep", "memory_fraction", "tf32", "multi_gpu", "gpus"),
        *("fsdp", "expected_mfu", "samples", "logger", "logger_offline"),
    )

    output_dir: str = "./granite_cuda_output"
    overwrite: bool = False
    resume: str | None = setting(None, "--resume-from-checkpoint")
    save_steps: int | None = setting(None, rule=_at_least(1))
    keep: int = setting(2, rule=_at_least(1))
    eval_steps: int | None = setting(None, rule=_at_least(1))
    logger: list[str] | str | None = None
    logger_offline: bool = setting(False, "--run.logger_offline")
    samples: int = setting(30, rule=(lambda value: 0 <= value <= 1000, "must be from 0 to 1000"))
    early_stopping: int | None = setting(None, rule=_at_least(1, " validation"))
    stop_at_equilibrium: int | None = setting(None, rule=_at_least(8, " ticks"))
    auto_batch_size: bool = False
    memory_fraction: float | str | None = setting(None, rule=_SHARE)
    tf32: bool = True
    multi_gpu: bool = False
    gpus: int | None = setting(None, rule=_at_least(1))
    fsdp: bool = False
    expected_mfu: float | str | None = setting(None, "--run.expected_mfu", _BETWEEN_0_AND_1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(bool(self.output_dir.strip()), "--output-dir", "''", "is empty; name a folder")
        check(not re.search("[\ud800-\udfff]", self.output_dir), "--output-dir", ascii(self.output_dir),
               "has bytes that are not UTF-8, which records of the run cannot have; choose another name")  # fmt: skip
        check(self.resume is None or bool(self.resume.strip()), "--resume-from-checkpoint", "''",
               "is empty; name a checkpoint, last or auto, or leave it out")  # fmt: skip
        for name in self.loggers:
            check(name in LOGGERS, "--logger", name, f"there are {', '.join(LOGGERS)}; separate several by spaces")

    @property
    def on_several(self) -> bool:
        """Whether more than one process may be meant."""
        return self.multi_gpu if self.gpus is None else self.gpus > 1

    @property
    def loggers(self) -> list[str]:
        """The loggers that were asked for, each once."""
        return list(dict.fromkeys([self.logger] if isinstance(self.logger, str) else self.logger or []))


class Intervals(NamedTuple):
    """Optimizer steps between two validations, and between two checkpoints."""

    validation: int
    checkpoint: int


def intervals_of(asked: RunConfig, steps: int) -> Intervals:
    """The intervals of a run whose validations are settled: checkpoints as asked for, or as suit the length."""
    return Intervals(asked.eval_steps or steps, asked.save_steps or min(MAX_SAVE_STEPS, max(1, steps // 2)))


def _is_encoding(name: str) -> bool:
    try:
        "".encode(name)
        return codecs.lookup(name).name not in NO_ENCODINGS
    except (LookupError, ValueError):
        return False


_USES = {"validation": "validate", "test": "test"}
"""What is done with each split that is held out."""


TEXTS = ("path", "validation_data", "test_data")
"""Settings of the data that name texts."""


def listed(names: list[str] | str | None) -> list[str]:
    """The names of sources, of which one may stand alone."""
    return [] if names is None else [names] if isinstance(names, str) else names
