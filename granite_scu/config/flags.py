"""The table of the flags of ``scripts/train_granite_cuda.py``: each stands for one dotted key of the configuration.

A flag's default is the configuration's own. ``cli.script_flags`` makes the parser of the table, and translates.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from granite_scu.config import settings as config
from granite_scu.control import CONTROLLERS
from granite_scu.control.diagnostics.setpoint import FRACTION
from granite_scu.control.laws.pi import MARGINAL_SAVING

PRECISIONS = {"auto": "null", **config.PRECISIONS}
GROUPS = {
    "base": config.BaseConfig,
    "lora": config.LoraConfig,
    "optimizer": config.OptimizerConfig,
    "prior": config.PriorConfig,
    "data": config.DataConfig,
    "control": config.ControlConfig,
    "run": config.RunConfig,
}
"""The configuration's groups and the dataclass of each."""


@dataclass(frozen=True)
class Flag:
    """A flag of the script.

    Attributes:
        name: the flag, with hyphens; the same with underscores is accepted.
        key: the dotted key of the configuration that it sets.
        kind: type of its value, or a function that makes it of the text; ``bool`` makes a switch with a ``--no-`` form.
        help: meaning, and unit where there is one.
        choices: the values it may take.
        default: shown in the help where the configuration's own default is written another way.
        many: whether several values may follow the flag.
    """

    name: str
    key: str
    kind: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] = ()
    default: Any = None
    many: bool = False


NUMBER_OF_ITS_OWN = {"--early-stopping": 3, "--stop-at-equilibrium": 30}
"""Flags that may stand without their number, and the one that they then mean."""


WORKED_OUT = {
    "kp": "scheduled by how fast the adapter gets to S*",
    "ki": "Kp / min(tau, 10), tau the ticks that the adapter takes to S*",
    "lambda_init": f"{MARGINAL_SAVING:g} (S*/(1 - S*))^(-2/3)",
}
"""Settings that the default law works out where they are not given, and how."""


def _of_law(setting: str) -> str:
    """The default of a setting that each controller has its own of: the default law's, or the first's that knows it."""
    usual = config.ControlConfig.controller
    name = next(name for name in (usual, *CONTROLLERS) if setting in CONTROLLERS[name].__dataclass_fields__)
    default = CONTROLLERS[name].__dataclass_fields__[setting].default
    return f"the controller's own; {name}'s: {WORKED_OUT[setting] if default is None else default}"


def ratio_or_auto(text: str) -> str:
    """The value of ``--target-s``, whose range the configuration checks."""
    try:
        understood = text == "auto" or math.isfinite(float(text))
    except ValueError:
        understood = False
    if not understood:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a ratio between 0 and 1 nor auto")
    return text


SECTIONS: dict[str, tuple[Flag, ...]] = {
    "what": (
        Flag("--model", "base.name", str, "hub id, local folder, or tiny-granite-h for the embedded model"),
        Flag("--data-dir", "data.path", str, "file, folder or pattern of txt, md, jsonl, csv, tsv or parquet, also "
             "as .gz or .zst; stdlib-docs, stdlib-source or package-docs for an embedded corpus; hf:owner/name or "
             "hf:owner/name:config for a data set of the hub; several are read one after the other",
             default="wikitext-2 from the hub", many=True),
        Flag("--data-weights", "data.weights", float, "how often each --data-dir is read in an epoch of training; "
             "fractions read a part", default="1 each", many=True),
        Flag("--text-column", "data.text_column", str, "field of a record (jsonl, csv, parquet) that holds the text"),
        Flag("--encoding", "data.encoding", str, "of text files, such as latin-1"),
        Flag("--split-seed", "data.split_seed", int, "of the division into training, validation and test documents"),
        Flag("--cache-dir", "data.cache_dir", str, "where tokens are kept", default="~/.cache/granite-scu"),
        Flag("--stream", "data.stream", bool, "read and tokenise the text while training goes on and keep nothing: for "
             "text larger than the disk"),
        Flag("--output-dir", "run.output_dir", str, "run folder"),
        Flag("--overwrite", "run.overwrite", bool, "replace a run folder that is not empty"),
        Flag("--adapter", "lora.adapter", str, "folder of a LoRA adapter to start from: rank, alpha and layers are its "
             "own, S measures how far training moves it", default="none: a new one"),
        Flag("--seed", "seed_everything", int, "seed of everything random", default=config.SEED),
    ),
    "length": (
        Flag("--max-steps", "trainer.max_steps", int, "optimizer steps; with --num-epochs, whichever is reached first",
             default=f"{config.DEFAULT_STEPS}, off when --num-epochs is given alone"),
        Flag("--num-epochs", "data.num_epochs", float, "passes over the training text"),
        Flag("--max-time", "trainer.max_time", str, "longest training time, DD:HH:MM:SS; covers the probe of "
             "--target-s auto too"),
    ),
    "step": (
        Flag("--batch-size", "data.batch_size", int, "blocks in a micro-batch on each device"),
        Flag("--eval-batch-size", "data.eval_batch_size", int, "blocks in an evaluation batch", default="--batch-size"),
        Flag("--gradient-accumulation-steps", "trainer.accumulate_grad_batches", int, "micro-batches in a step"),
        Flag("--block-size", "data.block_size", int, "tokens in a block; also --max-length"),
        Flag("--loss-on", "data.loss_on", str, "of messages and of prompt and completion: what the assistant says, or "
             "all", ("completion", "all")),
        Flag("--packing", "data.packing", str, "blocks cuts documents in a row; best-fit keeps each in one piece; auto "
             "takes that for conversations", ("auto", "blocks", "best-fit")),
        Flag("--on-long", "data.on_long", str, "what becomes of a document longer than a block",
             ("split", "truncate", "drop", "error")),
        Flag("--isolate-documents", "data.isolate_documents", bool, "documents in a block do not see one another, in "
             "attention, convolution and scan"),
        Flag("--learning-rate", "optimizer.learning_rate", float, "peak learning rate"),
        Flag("--lr-scheduler", "optimizer.schedule", str, "course of the rate", ("cosine", "linear", "constant")),
        Flag("--warmup-steps", "optimizer.warmup_steps", int, "optimizer steps of warm-up"),
        Flag("--gradient-clip", "optimizer.gradient_clip", float, "largest gradient norm; 0 does not clip"),
        Flag("--adam-beta2", "optimizer.beta2", float, "decay of Adam's second moment"),
        Flag("--lora-r", "lora.rank", int, "rank of the adapters", default=config.DEFAULT_RANK),
        Flag("--lora-alpha", "lora.alpha", float, "scale of the adapters, times the rank",
             default=config.DEFAULT_ALPHA),
        Flag("--lora-dropout", "lora.dropout", float, "probability of dropping an adapter's input"),
    ),
    "precision and speed": (
        Flag("--precision", "trainer.precision", str, "of the products; auto takes what the device does best",
             tuple(PRECISIONS), default="auto"),
        Flag("--4bit-quantization", "base.quantize_4bit", bool, "hold the frozen layers in 4 bits (QLoRA)"),
        Flag("--torch-compile", "base.compile", bool, "compile the model"),
        Flag("--compile-mode", "base.compile_mode", str, "mode of torch.compile",
             ("default", "reduce-overhead", "max-autotune")),
        Flag("--gradient-checkpointing", "base.gradient_checkpointing", bool,
             "recompute activations in the backward pass: less memory, slower"),
        Flag("--attn", "base.attention", str, "attention kernel", ("sdpa", "eager", "flash_attention_2", "auto")),
        Flag("--kernels", "base.kernels", str, "of the Mamba-2 layers; auto takes compiled ones where installed and "
             "proven right on the GPU, cuda insists on them", ("auto", "torch", "cuda")),
        Flag("--memory-fraction", "run.memory_fraction", float, "largest share of the GPU's memory to take, 0 to 1",
             default="what is needed"),
        Flag("--tf32", "run.tf32", bool, "fp32 products of the model in TF32 where the GPU has it"),
        Flag("--num-workers", "data.num_workers", int, "loader processes"),
        Flag("--prefetch-factor", "data.prefetch_factor", int, "batches that each loader process holds ready"),
        Flag("--deterministic", "trainer.deterministic", bool, "deterministic kernels, slower on a GPU", default=False),
    ),
    "machine": (
        Flag("--accelerator", "trainer.accelerator", str, "device; without a GPU, cpu must be asked for",
             ("auto", "cpu", "cuda")),
        Flag("--multi-gpu", "run.multi_gpu", bool, "every visible GPU, or what torchrun or SLURM started"),
        Flag("--auto-batch-size", "run.auto_batch_size", bool, "the largest micro-batch that fits, found by training "
             "on it; --batch-size times --gradient-accumulation-steps, the blocks of a step, stays"),
        Flag("--fsdp", "run.fsdp", bool, "share the frozen layers out over the processes; adapters stay whole"),
    ),
    "control": (
        Flag("--controller", "control.controller", str, f"the law that sets lambda: {', '.join(CONTROLLERS)}"),
        Flag("--target-s", "control.target_s", ratio_or_auto, "setpoint S*, a ratio between 0 and 1, or auto: a "
             f"probe without lambda comes first, a tenth of the run; S* is {FRACTION} of what S would come to alone"),
        Flag("--kp", "control.kp", float, "proportional gain, in ln lambda per logit of S; of p per ln S, of "
             "original per S and tick, of kl per KL/KL* and tick", default=_of_law("kp")),
        Flag("--ki", "control.ki", float, "integral gain, the same per tick; of i per ln S and tick",
             default=_of_law("ki")),
        Flag("--control-every", "control.every", int, "optimizer steps between ticks"),
        Flag("--ema-alpha", "control.ema_alpha", float, "weight of the newest measurement in the smoothed S; of pi "
             "for the log, the deadband and the stops alone", default=_of_law("ema_alpha")),
        Flag("--deadband", "control.deadband", float, "errors |ln(S/S*)| below this leave the integral "
             "alone; of original, |S - S*| up to this leaves lambda alone", default=_of_law("deadband")),
        Flag("--lambda-init", "control.lambda_init", float, "lambda at the start", default=_of_law("lambda_init")),
        Flag("--lambda-min", "control.lambda_min", float, "lower bound of lambda"),
        Flag("--lambda-max", "control.lambda_max", float, "upper bound of lambda"),
        Flag("--lambda-end", "control.lambda_end", float, "lambda at the end, of linear and cosine",
             default=_of_law("lambda_end")),
        Flag("--target-kl", "control.target_kl", float, "setpoint of kl, in bits per token",
             default=_of_law("target_kl")),
        Flag("--cpr-bound", "control.cpr_bound", float, "of cpr: the most bits per token that one matrix may take",
             default="what it takes after --cpr-warmup ticks"),
        Flag("--cpr-warmup", "control.cpr_warmup", int, "of cpr: ticks before a bound not given is taken",
             default=_of_law("cpr_warmup")),
        Flag("--replay", "control.replay", str, "of replay: run folder or scu_history.json whose lambda is repeated"),
        Flag("--measure", "control.measure", str, "what ParamBPT counts: the update, or its factors",
             ("delta", "factors")),
        Flag("--actuator", "control.actuator", str, "how lambda acts: in the loss, or decoupled after the step",
             ("loss", "decoupled")),
        Flag("--prior-sigma", "prior.sigma", float, "standard deviation of the prior on the entries of delta W"),
        Flag("--n-tokens", "prior.n_tokens", int, "tokens N that the adapter's description is spread over",
             default="supervised tokens of the training set"),
    ),
    "keeping": (
        Flag("--save-steps", "run.save_steps", int, "optimizer steps between checkpoints"),
        Flag("--keep", "run.keep", int, "checkpoints kept"),
        Flag("--resume-from-checkpoint", "run.resume", str, "checkpoint folder; last: the newest whole one in "
             "--output-dir; auto: the same, or from the beginning where there is none. Settings not given are those of "
             "the run that is gone on with, and without --output-dir it goes on in its own folder"),
        Flag("--eval-steps", "run.eval_steps", int, "optimizer steps between validations"),
        Flag("--eval-iters", "trainer.limit_val_batches", int, "batches in a validation"),
        Flag("--logging-steps", "trainer.log_every_n_steps", int, "optimizer steps between log lines"),
        Flag("--early-stopping", "run.early_stopping", int, "stop after so many validations without improvement "
             "(3 when no number is given)"),
        Flag("--stop-at-equilibrium", "run.stop_at_equilibrium", int, "stop when S has been held by a closed loop, and "
             "the data's bits have not fallen, for so many ticks (30 when no number is given)"),
    ),
}  # fmt: skip


def defaults() -> dict[str, Any]:
    """The default of every dotted key that a flag stands for."""
    found: dict[str, Any] = {f"trainer.{name}": value for name, value in config.TRAINER_DEFAULTS.items()}
    for group, kind in GROUPS.items():
        found |= {f"{group}.{field.name}": field.default for field in fields(kind)}
    return found
