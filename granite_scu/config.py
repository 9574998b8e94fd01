"""The configuration of a run: plain dataclasses, the one source of every default.

They are filled from YAML and flags (see ``cli`` and ``flags``) and import nothing heavy, so that a wrong
request is refused at once. A field's docstring line gives its meaning and unit; values that follow
from others (steps an epoch, N, the precision ``auto`` stands for) are computed where they are used.
Settings that Lightning's Trainer has itself stay there; ``TRAINER_DEFAULTS`` lists ours.
"""

import math
from dataclasses import dataclass
from typing import Literal

from granite_scu.errors import UserError

TINY_MODEL = "tiny-granite-h"
"""The name of the embedded model."""

DEFAULT_STEPS = 1000
"""Optimizer steps of a run that names neither steps nor epochs."""

SEED = 42

TRAINER_DEFAULTS = {
    "accumulate_grad_batches": 4,
    "limit_val_batches": 50,
    "log_every_n_steps": 10,
    "accelerator": "auto",
    "devices": 1,
}


@dataclass(frozen=True)
class BaseConfig:
    """The frozen model.

    Attributes:
        name: hub id, local folder, or ``tiny-granite-h`` for the embedded model.
        quantize_4bit: hold the linear layers in 4 bits (nf4, double quantisation), as QLoRA does.
        attention: attention kernel; ``auto`` takes flash_attention_2 where it is installed.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about 30 % slower.
        compile: run torch.compile on the model.
        compile_mode: mode of torch.compile.
    """

    name: str = "ibm-granite/granite-4.0-h-1b"
    quantize_4bit: bool = False
    attention: Literal["sdpa", "eager", "flash_attention_2", "auto"] = "sdpa"
    gradient_checkpointing: bool = False
    compile: bool = False
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"


@dataclass(frozen=True)
class LoraConfig:
    """The adapter: delta W = (alpha / rank) B A on every targeted linear layer.

    Attributes:
        rank: rank r of each update.
        alpha: numerator of the update's scale alpha / r.
        dropout: probability of dropping an input of the adapter.
        targets: layer names to adapt; null adapts every linear layer of attention, Mamba and MLP.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: list[str] | None = None

    def __post_init__(self) -> None:
        _check(self.rank >= 1, "--lora-r", self.rank, "must be at least 1")
        _check(self.alpha > 0, "--lora-alpha", self.alpha, "must be positive")
        _check(0 <= self.dropout < 1, "--lora-dropout", self.dropout, "must be in [0, 1)")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW without weight decay: the penalty that lambda steers is the only regularisation.

    Attributes:
        learning_rate: peak rate.
        schedule: course of the rate after warm-up, down to zero at the last step.
        warmup_steps: optimizer steps of linear warm-up.
        beta2: decay of Adam's second moment, which remembers about 1 / (1 - beta2) steps.
        gradient_clip: largest gradient norm, data and penalty together; 0 does not clip.
    """

    learning_rate: float = 1e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 50
    beta2: float = 0.999
    gradient_clip: float = 1.0

    def __post_init__(self) -> None:
        _check(0 < self.learning_rate < math.inf, "--learning-rate", self.learning_rate, "must be positive")
        _check(self.warmup_steps >= 0, "--warmup-steps", self.warmup_steps, "must not be negative")
        _check(0 < self.beta2 < 1, "--adam-beta2", self.beta2, "must be in (0, 1)")
        _check(self.gradient_clip >= 0, "--gradient-clip", self.gradient_clip, "must not be negative")


@dataclass(frozen=True)
class PriorConfig:
    """What ParamBPT is measured against.

    Attributes:
        sigma: standard deviation of the Gaussian prior on each entry of delta W.
        n_tokens: N, the tokens that the description of the adapter is spread over;
            null takes the supervised tokens of the training set.
    """

    sigma: float = 0.02
    n_tokens: int | None = None

    def __post_init__(self) -> None:
        _check(0 < self.sigma < math.inf, "--prior-sigma", self.sigma, "must be positive")
        _check(self.n_tokens is None or self.n_tokens > 0, "--n-tokens", self.n_tokens, "must be positive")


@dataclass(frozen=True)
class DataConfig:
    """The text and how it is cut.

    Attributes:
        path: file or folder, or an embedded corpus (stdlib-docs, stdlib-source); null takes wikitext-2 from the hub.
        text_column: field of a jsonl line that holds the text.
        block_size: tokens in a block.
        batch_size: blocks in a micro-batch on each device.
        eval_batch_size: the same for evaluation; null takes batch_size.
        num_epochs: passes over the training blocks after which the run ends; null leaves it to max_steps.
        num_workers: loader processes.
        prefetch_factor: batches that each loader process holds ready.
    """

    path: str | None = None
    text_column: str = "text"
    block_size: int = 1024
    batch_size: int = 8
    eval_batch_size: int | None = None
    num_epochs: float | None = None
    num_workers: int = 0
    prefetch_factor: int = 2

    def __post_init__(self) -> None:
        _check(self.block_size >= 8, "--block-size", self.block_size, "must be at least 8 tokens")
        _check(self.batch_size >= 1, "--batch-size", self.batch_size, "must be at least 1")
        size = self.eval_batch_size
        _check(size is None or size >= 1, "--eval-batch-size", size, "must be at least 1")
        _check(self.num_epochs is None or self.num_epochs > 0, "--num-epochs", self.num_epochs, "must be positive")
        _check(self.num_workers >= 0, "--num-workers", self.num_workers, "must not be negative")
        _check(self.prefetch_factor >= 1, "--prefetch-factor", self.prefetch_factor, "must be at least 1")


@dataclass(frozen=True)
class ControlConfig:
    """How lambda is steered, once every ``every`` optimizer steps (a tick).

    Attributes:
        controller: pi, fixed (lambda stays lambda_init) or none (lambda = 0).
        target_s: the setpoint S*, a ratio in (0, 1).
        kp: proportional gain: change of ln lambda per unit of ln(S / S*).
        ki: integral gain, per tick.
        every: optimizer steps between ticks.
        ema_alpha: weight of the newest measurement in the smoothed ln S; 1 does not smooth.
        deadband: errors |ln(S / S*)| below this leave the integral alone.
        error_limit: the largest |ln(S / S*)| that is acted upon.
        slew: largest change of the integral in a tick while the error exceeds error_limit, in ln lambda.
        lambda_init: lambda at the start.
        lambda_min: lower bound of lambda.
        lambda_max: upper bound of lambda.
    """

    controller: str = "pi"
    target_s: float = 0.02
    kp: float = 2.0
    ki: float = 0.3
    every: int = 10
    ema_alpha: float = 0.5
    deadband: float = 0.0
    error_limit: float = 0.75
    slew: float = 0.1
    lambda_init: float = 0.5
    lambda_min: float = 1e-6
    lambda_max: float = 1e6

    def __post_init__(self) -> None:
        _check(0 < self.target_s < 1, "--target-s", self.target_s, "must lie between 0 and 1, for example 0.02")
        _check(0 < self.kp < math.inf, "--kp", self.kp, "must be positive and finite")
        _check(0 < self.ki < math.inf, "--ki", self.ki, "must be positive and finite")
        _check(self.every >= 1, "--control-every", self.every, "must be at least 1")
        _check(0 < self.ema_alpha <= 1, "--ema-alpha", self.ema_alpha, "must be in (0, 1]")
        _check(self.deadband >= 0, "--deadband", self.deadband, "must not be negative")
        _check(0 < self.lambda_min < math.inf, "--lambda-min", self.lambda_min, "must be positive")
        _check(
            self.lambda_min <= self.lambda_max < math.inf,
            "--lambda-min",
            self.lambda_min,
            f"must not exceed --lambda-max {self.lambda_max:g}",
        )
        _check(self.lambda_max <= 1e30, "--lambda-max", self.lambda_max, "must not exceed 1e30, which fp32 still holds")
        in_bounds = self.lambda_min <= self.lambda_init <= self.lambda_max
        bounds = f"[{self.lambda_min:g}, {self.lambda_max:g}] (--lambda-min, --lambda-max)"
        _check(in_bounds, "--lambda-init", self.lambda_init, f"must lie in {bounds}")


@dataclass(frozen=True)
class RunConfig:
    """The run folder, and what happens when.

    Attributes:
        output_dir: the run folder.
        overwrite: replace a run folder that is not empty.
        resume: checkpoint folder to go on from, or ``last`` for the newest one of output_dir.
        save_steps: optimizer steps between checkpoints.
        keep: checkpoints kept.
        eval_steps: optimizer steps between validations.
        early_stopping: validations without improvement after which the run stops; null never stops early.
        memory_fraction: largest share of the GPU's memory this process may take; null takes what it needs.
        multi_gpu: train on every visible GPU, one process each.
    """

    output_dir: str = "./granite_cuda_output"
    overwrite: bool = False
    resume: str | None = None
    save_steps: int = 500
    keep: int = 2
    eval_steps: int = 200
    early_stopping: int | None = None
    memory_fraction: float | None = None
    multi_gpu: bool = False

    def __post_init__(self) -> None:
        _check(self.save_steps >= 1, "--save-steps", self.save_steps, "must be at least 1")
        _check(self.keep >= 1, "--keep", self.keep, "must be at least 1")
        _check(self.eval_steps >= 1, "--eval-steps", self.eval_steps, "must be at least 1")
        patience = self.early_stopping
        _check(patience is None or patience >= 1, "--early-stopping", patience, "must be at least 1 validation")
        fraction = self.memory_fraction
        _check(fraction is None or 0 < fraction <= 1, "--memory-fraction", fraction, "must be in (0, 1]")


def _check(valid: bool, flag: str, value: object, remedy: str) -> None:
    if not valid:
        raise UserError(f"{flag} {value}: {remedy}")
