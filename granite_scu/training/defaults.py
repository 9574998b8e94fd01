"""Settings that nobody gave, fitted to the data: length, batches, learning rate, validation and ticks, each with why.

The guides' defaults (8 blocks of 1,024 tokens, 4 accumulated, 1,000 steps at 1e-4) or a preset's are for data that fill
them. Fewer data get fewer and shorter blocks in a step, and more epochs, so that a run has steps enough to learn in.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from granite_scu.config.settings import (
    DEFAULT_EVERY,
    DEFAULT_RATE,
    DEFAULT_STEPS,
    DEFAULT_WARMUP,
    MIN_BLOCK,
    usual_every,
)
from granite_scu.control.units import counted, duration

MIN_STEPS = 100
"""Optimizer steps that a run has where its data make so many, for an adapter to learn in."""

IN_A_STEP = 8
"""Conversations, or blocks of text, that a step has; fewer where there are few, more where a run would grow long."""

MAX_EPOCHS, OF_RECORDS = 10, 100
"""Epochs of so many records."""

POWER_OF_CHATS, POWER_OF_TEXT = 0.06, 0.5
"""By which power of the number of records epochs fall: 9 of 1,000 conversations and 8 of 5,000, for facts have to be
read often however many there are (docs/guides/learning-rate.md); of text 3 of 1,000 records, 1 of 10,000."""

MAX_STEPS_OF_CHATS = 5000
"""Beyond, a step has more conversations than ``IN_A_STEP``. Steps of 33 instead of 8, as many epochs long, taught the
embedded model 5 of 30 facts instead of 26 (docs/guides/learning-rate.md)."""

TOKENS_OF_A_RECORD = 250
"""Of text, counted as one conversation in the above."""

RATE, RATE_WIDTH, RATE_POWER = 5e-4, 2000, 0.78
"""Learning rate of a model of that width, and by which power of the width it falls: Thinking Machines' rule for LoRA
(https://tinker-docs.thinkingmachines.ai), ten times that of training all weights."""

WARMUP = 0.05
"""Share of the steps."""

SHORTEST_BLOCK = 64
"""Tokens below which a block is not made, unless the text is too little for such ones: shorter ones are no faster."""

MIN_BLOCKS_OF_TEXT = 50
"""Blocks that text is cut into, so that there are some to hold out."""

MIN_VALIDATIONS, MAX_VALIDATIONS, MAX_EVAL_STEPS = 5, 10, 500
"""Validations of a run, one an epoch between these; and the most optimizer steps between two."""

TOKENS_OF_A_TICK, USUAL_DRIFT_TICKS = 2048, 15
"""Tokens to train on between two readings of general text, which then cost a twenty-fourth of the run's time, unless
that left fewer ticks."""

VALIDATED = 50
"""Micro-batches of the guides' size that a validation reads at most."""

COMPILING, SAVED = 110.0, 1.7
"""Seconds that a GPU's layers take to compile, as Granite-4.0-H-1B's on an H200; and those that each second of compiled
steps then saves: 55,300 tokens are counted in it, and 20,200 of layers that are not (docs/research/benchmarks.md)."""

SAVED_BY_LAUNCHES = 0.002
"""Seconds that a compiled layer saves in each micro-batch, however few its tokens: it launches 73 kernels and not 508,
as counted there, each in about 5 microseconds."""


FITTED = (
    *("data.block_size", "data.batch_size", "trainer.accumulate_grad_batches", "trainer.limit_val_batches"),
    *("optimizer.learning_rate", "optimizer.warmup_steps", "control.every", "run.eval_steps"),
)
"""Settings that are fitted to the data, beside the length."""


class Usual(NamedTuple):
    """The step of the guides, or of a preset, on each device: blocks in a micro-batch, micro-batches, and its block."""

    batch: int
    accumulation: int
    block: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.accumulation * self.block


class Text(NamedTuple):
    """What is trained on.

    Attributes:
        chats: whether it is conversations, which stay in one piece.
        documents: how many.
        tokens: of all.
        longest: tokens of the longest conversation; 0 without any.
        asked: epochs that the user gave.
        filled: blocks that it has to fill, and more, to be learned from and held out in parts.
    """

    chats: bool
    documents: int
    tokens: int
    longest: int
    asked: float | None = None
    filled: int = 1

    @property
    def epochs(self) -> float:
        """So often it is read."""
        if self.asked is not None:
            return self.asked
        records = self.documents if self.chats else self.tokens / TOKENS_OF_A_RECORD
        power = POWER_OF_CHATS if self.chats else POWER_OF_TEXT
        return max(1, min(MAX_EPOCHS, round(MAX_EPOCHS * (OF_RECORDS / max(records, 1)) ** power)))


class Cut(NamedTuple):
    """What packing made of a text: tokens of a block, training and validation blocks, documents to validate on, and
    what these are called."""

    block: int
    train: int
    validation: int
    held_out: int
    kind: str = "document"


class Choice(NamedTuple):
    """A setting by its dotted key, its value, and why in one line; empty where another line says it."""

    key: str
    value: Any
    why: str = ""


def block_size(text: Text, usual: Usual, processes: int = 1) -> Choice | None:
    """The tokens of a block, where the usual ones would leave too few blocks; None where they do not.

    A power of two that holds the longest conversation, also one among texts, and of which a step has about eight.
    """
    shortest = min(SHORTEST_BLOCK, max(MIN_BLOCK, _power_of_two((text.tokens - 1) // text.filled)))
    least, why = max(text.longest - 1, shortest), f"the longest conversation has {text.longest:,}"
    if text.chats:
        most_steps = _most_steps(text, usual, processes)
        wanted = _records_in_a_step(text, text.documents, most_steps) * text.tokens / text.documents / processes
        least = max(least, wanted / IN_A_STEP)
    else:
        of_text = _power_of_two(text.tokens // MIN_BLOCKS_OF_TEXT)
        if of_text >= least or not text.longest:
            least, why = max(least, of_text), f"the text has {text.tokens:,}"
    block = 1 << math.ceil(math.log2(least))
    return Choice("data.block_size", block, f"blocks of {block} tokens: {why}") if block < usual.block else None


def compiles(seconds: float, micro_batches: int, layers: int) -> Choice:
    """Whether layers that can be compiled are, where nobody says so: where that takes less time than it saves.

    Args:
        seconds: that the run's steps take compiled, by their operations; 0 where nobody knows.
        micro_batches: of a process in the run.
        layers: of the model.
    """
    saved = max(SAVED * seconds, SAVED_BY_LAUNCHES * micro_batches * layers)
    pays = saved > COMPILING
    saves = f"{'saves' if pays else 'would save'} about {duration(saved)}"
    why = f"compiling takes about {duration(COMPILING)}, and {saves} of this run"
    return Choice("base.compile", pays, f"--torch-compile {'on' if pays else 'off'}: {why}")


def _power_of_two(most: int) -> int:
    """The largest that is no more; 0 where none is."""
    return 1 << most.bit_length() >> 1


def settle(
    text: Text | None,
    cut: Cut,
    usual: Usual,
    given: Mapping[str, Any],
    width: int,
    processes: int = 1,
    controlled: bool = False,
    holds_drift: bool = False,
) -> list[Choice]:
    """What is not given of a run's length, steps, learning rate, validation and ticks.

    Args:
        text: that is trained on; None for a stream, which nobody has counted: it gets the guides' values.
        cut: the blocks that it made.
        usual: the guides' step, or a preset's.
        given: what the user gave, by dotted key.
        width: of the model's hidden states.
        processes: that train.
        controlled: whether a controller acts; without one S is only measured.
        holds_drift: whether its ticks read general text.
    """
    chosen: list[Choice] = []
    batch, accumulation = _step(text, cut, usual, given, processes) if text else (usual.batch, usual.accumulation)
    batch = given.get("data.batch_size", batch)
    accumulation = given.get("trainer.accumulate_grad_batches", accumulation)
    steps, fills = DEFAULT_STEPS, True
    if text:
        steps = math.ceil(text.epochs * cut.train / (batch * accumulation * processes))
        fills = _fills(text, usual, processes)
    if "trainer.max_steps" in given:
        steps = min(given["trainer.max_steps"], steps) if "data.num_epochs" in given else given["trainer.max_steps"]
    elif "data.num_epochs" not in given:
        steps = min(steps, _most_steps(text, usual, processes)) if text else steps
        chosen.append(Choice("trainer.max_steps", steps, _length(text, cut, steps, batch * accumulation * processes)))
    why = _fewer(text, cut, batch * accumulation * processes, given) if text else ""
    chosen += [Choice("data.batch_size", batch, why), Choice("trainer.accumulate_grad_batches", accumulation)]
    chosen += [_rate(width, fills), _warmup(steps)]
    if cut.validation:
        chosen += _validation(text, cut, usual, given, batch, steps, processes)
    every, tokens = usual_every(steps) if controlled else DEFAULT_EVERY, batch * accumulation * processes * cut.block
    if holds_drift:
        apart = min(DEFAULT_EVERY, math.ceil(TOKENS_OF_A_TICK / tokens))
        every = max(every, min(apart, steps // USUAL_DRIFT_TICKS))
    chosen.append(Choice("control.every", every))
    return [choice for choice in chosen if choice.key not in given]


def _fills(text: Text, usual: Usual, processes: int) -> bool:
    """Whether a text, read as often as it is, fills the usual run."""
    return text.tokens * text.epochs >= DEFAULT_STEPS * usual.tokens * processes


def _most_steps(text: Text, usual: Usual, processes: int) -> int:
    """Optimizer steps that a run has at most where nobody gives them."""
    return MAX_STEPS_OF_CHATS if text.chats and not _fills(text, usual, processes) else DEFAULT_STEPS


def _records_in_a_step(text: Text, records: float, most_steps: int, steps: int | None = None) -> float:
    """How many of a text's conversations, or blocks, a step should have.

    Args:
        text: that is trained on.
        records: its conversations or blocks.
        most_steps: that the run has where they are not given.
        steps: of the run, where they are given.
    """
    seen = records * text.epochs
    wanted = max(IN_A_STEP, seen / max(steps or 0, most_steps))
    return max(1.0, wanted if steps else min(wanted, seen / MIN_STEPS))


def _step(text: Text, cut: Cut, usual: Usual, given: Mapping[str, Any], processes: int) -> tuple[int, int]:
    """Blocks in a micro-batch, and micro-batches in a step, of each process."""
    in_a_block = text.documents / cut.train if text.chats else 1.0
    records, most_steps = cut.train * in_a_block, _most_steps(text, usual, processes)
    wanted = _records_in_a_step(text, records, most_steps, given.get("trainer.max_steps")) / in_a_block / processes
    blocks = max(1, math.floor(min(wanted, usual.tokens / cut.block)))
    most = max(1, usual.batch * usual.block // cut.block)
    if "data.batch_size" in given:
        batch = given["data.batch_size"]
        return batch, max(1, min(usual.accumulation, round(blocks / batch)))
    if accumulation := given.get("trainer.accumulate_grad_batches"):
        return max(1, min(most, blocks // accumulation)), accumulation
    sizes = range(most // 2 + 1, most + 1) if blocks > most else [blocks]
    batch = max(sizes, key=lambda size: (blocks - blocks % size, size))  # that loses the fewest blocks
    return batch, blocks // batch


def _length(text: Text | None, cut: Cut, steps: int, blocks: int) -> str:
    if text is None:
        return f"{steps:,} steps: of a stream nobody knows the length"
    passes = steps * blocks / cut.train
    epochs = f"{passes:.2g} epoch{'s' * (passes != 1)}" if passes < 10 else f"{passes:.0f} epochs"
    each = blocks * text.documents / cut.train
    what = (
        f"{counted(text.documents, cut.kind)}, about {max(1, round(each))} in a step" + _one_is_long(text, cut, steps)
        if text.chats
        else f"{counted(cut.train, 'block')} of {cut.block:,} tokens, {blocks} in a step"
    )
    return f"{counted(steps, 'step')}: {epochs} of {what}"


def _one_is_long(text: Text, cut: Cut, steps: int) -> str:
    """That the longest conversation, which blocks must hold, fills a step with many others; empty where it does not."""
    block = 1 << math.ceil(math.log2(IN_A_STEP * text.tokens / text.documents))
    if steps >= MIN_STEPS or text.documents / cut.train <= 2 * IN_A_STEP or block >= min(cut.block, text.longest):
        return ""
    return (
        f", for blocks hold the longest one, of {text.longest:,} tokens; --on-long drop --block-size {block} leaves it "
        "out, and makes more steps, which teach more"
    )


def _rate(width: int, fills: bool) -> Choice:
    if fills:
        return Choice(
            "optimizer.learning_rate", DEFAULT_RATE, f"learning rate {DEFAULT_RATE:g}: the guides', for much text"
        )
    rate = rate_by_width(width)
    return Choice("optimizer.learning_rate", rate, f"learning rate {rate:g}: for the model's width of {width:,}")


def _fewer(text: Text, cut: Cut, blocks: int, given: Mapping[str, Any]) -> str:
    """Why a step has fewer records than is usual, where epochs are given; empty where it has not, or ``_length`` says.

    Args:
        text: that is trained on.
        cut: the blocks that it made.
        blocks: of a step.
        given: what the user gave.
    """
    each, records = blocks * text.documents / cut.train, cut.kind if text.chats else "block"
    many = text.documents if text.chats else cut.train
    if "data.num_epochs" not in given or "trainer.max_steps" in given or many * text.epochs >= IN_A_STEP * MIN_STEPS:
        return ""
    size = counted(max(1, round(each if text.chats else blocks)), records)
    steps = counted(math.ceil(many * text.epochs / IN_A_STEP), "step")
    return f"{size} in a step: {IN_A_STEP} would make {steps} of so few epochs, and fewer than {MIN_STEPS} teach little"


def rate_by_width(width: int) -> float:
    """The learning rate of a model with hidden states of that width, in two digits."""
    return float(f"{RATE * (RATE_WIDTH / width) ** RATE_POWER:.2g}")


def _warmup(steps: int) -> Choice:
    warmup = min(DEFAULT_WARMUP, round(WARMUP * steps))
    return Choice(
        "optimizer.warmup_steps", warmup, f"warm-up of {counted(warmup, 'step')}: {warmup / steps:.0%} of the run"
    )


def _validation(
    text: Text | None, cut: Cut, usual: Usual, given: Mapping[str, Any], batch: int, steps: int, processes: int
) -> list[Choice]:
    count = max(MIN_VALIDATIONS, min(MAX_VALIDATIONS, round(text.epochs if text else 1)))
    every = max(1, min(MAX_EVAL_STEPS, math.ceil(steps / count)))
    batch = given.get("data.eval_batch_size", batch)
    each = batch * processes
    most = max(1, VALIDATED * usual.batch * usual.block // (batch * cut.block))
    batches = given.get("trainer.limit_val_batches", max(1, min(most, math.ceil(cut.validation / each))))
    part = "" if batches * each >= cut.validation else f"{batches * each:,} of "
    of = f"{part}{counted(cut.validation, 'block')}, {counted(cut.held_out, cut.kind)}"
    why = f"validation every {counted(every, 'step')}: on {of}"
    return [Choice("run.eval_steps", every, why), Choice("trainer.limit_val_batches", batches)]
