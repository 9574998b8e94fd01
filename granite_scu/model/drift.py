"""Drift on general text, KL(model as training began || now): how large it is, and the gradient that holds it."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from granite_scu.config.errors import UserError
from granite_scu.config.settings import IGNORED
from granite_scu.control import Measurement
from granite_scu.control.units import per_cent
from granite_scu.model import kl_divergence
from granite_scu.model.compilation import evaluation_mode, not_compiled, without_dropout
from granite_scu.model.description_length import bits, information_ratio
from granite_scu.model.loss import has_plain_head

ANCHOR_SHARE, MIN_ANCHOR = 10, 64
"""An anchor batch has a tenth of a step's tokens, and at least so many: a short answer of a chat."""

READ_AT_ONCE = 2048
"""Positions of a batch that is only read, and needs no activations kept."""

READ_SHARE, MIN_READ = 8, 256
"""A tick reads an eighth of the positions trained on since the last, a third of whose cost it has, and at least so
many."""

STALE = 1.5
"""Times what was read before that a batch may count as, before it is read again in the same tick."""

MARGIN = 1.1
"""Times the budget of drift: what a loop that holds it well stays within."""

BEYOND = 1000.0
"""In place of a loss where drift is beyond the budget, and more the further it is: no loss of a language model is so
large."""


def loss_in_budget(loss: float, share: float, budget: float) -> float:
    """What adapters are compared by where drift has a budget: the loss, or more than ``BEYOND`` where it is beyond.

    >>> loss_in_budget(2.5, 0.021, 0.02), loss_in_budget(2.5, 0.5, 0.02)
    (2.5, 1478.0)
    """
    above = share - MARGIN * budget
    if above <= 0:
        return loss
    return BEYOND * (1 + min(above, BEYOND)) if above > 0 else BEYOND**2  # drift that is not a number is the furthest


NEAR, MAX_READINGS = 0.9, 4
"""Share of the budget from which on a scaled adapter is near enough to it, and readings that finding it may take."""

NOISY = 0.1
"""Share of the budget that two readings of one model may differ by before it is said."""

_log = logging.getLogger(__name__)


class Drift(NamedTuple):
    """How far the model has moved on a part of the general text.

    Attributes:
        bpt: F, KL(model as training began || now), bits per counted token.
        base_bpt: H, what the model as training began needs for the same text, bits per counted token.
        tokens: that were counted.
    """

    bpt: float
    base_bpt: float
    tokens: int

    @property
    def share(self) -> float:
        """F / H, which a budget is given for."""
        return self.bpt / self.base_bpt if self.base_bpt > 0 else math.nan

    def measurement(self, of_s: Measurement) -> Measurement:
        """What a law that holds S at p / (1 + p) holds the share at p by: F is to H as ParamBPT is to DataBPT.

        Both begin as the square of how far the adapter has moved, which is what its gains go by.

        Args:
            of_s: the tick's measurement of S, whose step and lr_sum it has.
        """
        s = information_ratio(self.base_bpt, self.bpt)
        return replace(of_s, s=s, data_bpt=self.base_bpt, param_bpt=self.bpt)


class Turns:
    """Follows the sum of what is read of several batches, one of them at a time, without reading them all.

    Batches differ from each other by more than drift changes in a tick, so each is compared with itself: what was read
    some ticks ago counts as having grown since at the rate at which the newest has, since it was read before. Where
    that is by much, as when drift first rises, it is ``stale``, and more than one is to be read.
    """

    def __init__(self) -> None:
        self.latest: list[float] = []
        self.ages: list[int] = []
        self._growth = 0.0

    @property
    def stale(self) -> bool:
        """Whether the batch that is due counts as ``STALE`` times what was read of it, or as less than its inverse."""
        return abs(self._growth) * max(self.ages) > math.log(STALE)

    @property
    def due(self) -> int:
        """The batch that was read longest ago."""
        return self.ages.index(max(self.ages))

    def begin(self, sums: Sequence[float]) -> float:
        """Take what was read of every batch; returns the sum."""
        self.latest, self.ages = list(sums), [0] * len(sums)
        return math.fsum(sums)

    def next_tick(self) -> None:
        """A tick has passed since what was read was new."""
        self.ages = [age + 1 for age in self.ages]

    def follow(self, read: float) -> float:
        """Take what was read of the batch that is due; returns the sum. What is not a number is read again."""
        due = self.due
        before, span = self.latest[due], self.ages[due]
        if not math.isfinite(read):
            return read
        self.latest[due], self.ages[due] = read, 0
        self._growth = math.log(read / before) / span if read > 0 and before > 0 else 0.0
        return math.fsum(x * math.exp(self._growth * age) for x, age in zip(self.latest, self.ages, strict=True))

    def state_dict(self) -> dict[str, list]:
        return {"latest": self.latest, "ages": self.ages}

    def load_state_dict(self, state: dict[str, list]) -> None:
        self.latest, self.ages = list(state["latest"]), list(state["ages"])


@dataclass(frozen=True)
class Trained:
    """A model whose adapter is trained, whoever trains it.

    Attributes:
        language_model: of transformers, its adapted layers in place.
        factors: A and B of its layers, those that are trained.
        as_it_began: a context in which it is what it was as training began.
        precision: a context in which it computes as in training.
        reduce: the sum over all processes, the same bits in each.
        process: number of this process, and how many there are.
        unit: what the gradient of a sum of nats is multiplied by on the way, so that fp16 can hold it; a scalar.
    """

    language_model: nn.Module
    factors: Sequence[Tensor]
    as_it_began: Callable[[], AbstractContextManager[None]]
    precision: Callable[[], AbstractContextManager[None]]
    reduce: Callable[[Tensor], Tensor]
    process: tuple[int, int]
    unit: Callable[[], Tensor]


class _Rows(NamedTuple):
    """This rank's rows of a batch.

    Attributes:
        input_ids: (rows, time) tokens.
        positions: (counted,) indices of the flattened rows from which a counted token is predicted.
        targets: (counted,) the tokens that are predicted there.
        tokens: counted over all ranks.
    """

    input_ids: Tensor
    positions: Tensor
    targets: Tensor
    tokens: int


class GeneralPart:
    """A part of the general text, as the model that trains sees it.

    Of each batch a rank has its share of the rows, so that batches do not depend on how many processes there are. The
    hidden states of the model as training began are made when a batch is first read, and kept: a forward pass less each
    time. Where logits are more than a product of these, as in Gemma, they are made again: logits of all the text would
    not fit.

    It leaves the run as it is: it touches no ``.grad``, draws no random number and takes no training batch.

    Args:
        trained: the model, at any step of the run.
        batches: of ``input_ids`` and shifted ``labels``, the same on each rank.
    """

    def __init__(self, trained: Trained, batches: Sequence[dict[str, Tensor]]) -> None:
        self._trained, device = trained, trained.factors[0].device
        shares = [_share(batch, *trained.process) for batch in batches]
        own = [{name: part.to(device) for name, part in share.items()} for share in shares]
        self._plain = has_plain_head(trained.language_model)
        self._batches = [_rows(mine, whole) for mine, whole in zip(own, batches, strict=True)]
        self._kept: dict[int, Tensor] = {}
        self._places: tuple[Tensor, ...] = ()
        self.tokens = sum(rows.tokens for rows in self._batches)

    @cached_property
    def base_bpt(self) -> float:
        """H, bits per counted token that the model as training began needs. Every rank reads this at the same time."""
        model, plain = self._trained.language_model, self._plain
        with self._reading():
            if plain:
                bases = ((self._base(number), rows.targets) for number, rows in enumerate(self._batches))
            else:
                bases = ((self._before(row), row.targets) for rows in self._batches for row in self._apart(rows))
            nats = torch.stack([kl_divergence.nats_of(model, base, targets, plain) for base, targets in bases])
        return bits(float(self._trained.reduce(nats.sum())) / self.tokens)

    def _states(self, rows: _Rows) -> Tensor:
        return kl_divergence.states(self._trained.language_model, rows.input_ids, rows.positions, self._plain)

    def _base(self, number: int) -> Tensor:
        """What the model as training began makes of a batch."""
        if number in self._kept:
            return self._kept[number]
        states = self._before(self._batches[number])
        if not self._plain:
            return states
        if not self._places:  # all in one: what is kept between a step's tensors keeps their memory in pieces
            sizes = [len(rows.positions) for rows in self._batches]
            self._places = states.new_empty(sum(sizes), states.shape[1]).split(sizes)
        self._kept[number] = self._places[number].copy_(states)
        return self._kept[number]

    def _before(self, rows: _Rows) -> Tensor:
        with torch.no_grad(), self._trained.as_it_began():
            return self._states(rows)

    def _apart(self, rows: _Rows) -> list[_Rows]:
        """The rows of a batch, each by itself: logits of all of them would be gigabytes. Of several processes, whose
        passes have to be as many, all at once."""
        if self._trained.process[1] > 1:
            return [rows]
        time = rows.input_ids.shape[1]
        own = [rows.positions // time == row for row in range(len(rows.input_ids))]
        return [
            _Rows(rows.input_ids[row : row + 1], rows.positions[here] - row * time, rows.targets[here], rows.tokens)
            for row, here in enumerate(own)
            if here.any()
        ]

    def _nats(self, number: int) -> Tensor:
        """Sum of the KL over this rank's counted positions of a batch, in nats."""
        if not (self._plain or torch.is_grad_enabled()):
            model = self._trained.language_model
            pairs = ((self._before(row), self._states(row)) for row in self._apart(self._batches[number]))
            return torch.stack([kl_divergence.drift_of(model, *pair, plain=False) for pair in pairs]).sum()
        base, now = self._base(number), self._states(self._batches[number])
        return kl_divergence.drift_of(self._trained.language_model, base, now, self._plain)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with torch.no_grad(), self._trained.precision(), evaluation_mode(self._trained.language_model):
            yield

    def read(self) -> Drift:
        """Drift on all of the part, over all ranks; the same bits on each. Synchronises with the device."""
        return self._drift(math.fsum(self._read(range(len(self._batches)))))

    def follow(self, turns: Turns) -> Drift:
        """The same from one batch of it, and from what was read before; the first time from all of them."""
        if len(turns.latest) != len(self._batches):  # none yet, or of a run whose ticks read other parts
            return self._drift(turns.begin(self._read(range(len(self._batches)))))
        turns.next_tick()
        nats = turns.follow(*self._read([turns.due]))
        while turns.stale and math.isfinite(nats):
            nats = turns.follow(*self._read([turns.due]))
        return self._drift(nats)

    def noise(self) -> float:
        """The share of drift that a model reads that has not moved, of the first batch."""
        [nats] = self._read([0])
        return abs(bits(nats / self._batches[0].tokens)) / self.base_bpt

    def _read(self, numbers: Sequence[int]) -> list[float]:
        with self._reading():
            nats = torch.stack([self._nats(number) for number in numbers])
        return self._trained.reduce(nats).tolist()

    def _drift(self, nats: float) -> Drift:
        return Drift(bits(nats / self.tokens), self.base_bpt, self.tokens)

    def gradient(self, step: int) -> list[Tensor]:
        """The gradient of drift, in nats per counted token, by the factors: of the batch whose turn it is.

        In training mode, as gradient checkpointing and the training kernels work in no other, but without dropout.
        Synchronises with no device. The same bits on each rank.

        Args:
            step: optimizer steps done.
        """
        trained, number = self._trained, step % len(self._batches)
        unit, factors, tokens = trained.unit(), trained.factors, self._batches[number].tokens
        with without_dropout(trained.language_model), not_compiled(), torch.enable_grad(), trained.precision():
            # Zero for an adapter that text does not reach, such as that of images.
            gradients = torch.autograd.grad(self._nats(number) * unit, factors, materialize_grads=True)
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / (unit * tokens)
        parts = trained.reduce(flat).split([factor.numel() for factor in factors])
        return [part.view_as(factor) for part, factor in zip(parts, factors, strict=True)]


class DriftBatches(NamedTuple):
    """General text in batches, by its use; of ``input_ids`` and shifted ``labels``, the same on each rank.

    Attributes:
        anchor: whose gradient keeps the model where it is.
        steering: on which the loop measures.
        held_out: that neither of them sees, for the figures that are told.
    """

    anchor: list[dict[str, Tensor]]
    steering: list[dict[str, Tensor]]
    held_out: list[dict[str, Tensor]]


class HeldDrift:
    """Drift of a model that trains: what anchors it, what the loop reads, and what it never sees.

    What the model as training began makes of the text is in no checkpoint: it is computed again.

    Args:
        trained: the model.
        texts: general text.
        budget: the largest share of drift.
        turns: of ``turns`` before a checkpoint; None where training begins.

    Raises:
        UserError: training begins, and two readings of the model differ by more than the budget.
    """

    def __init__(self, trained: Trained, texts: DriftBatches, budget: float, turns: dict[str, list] | None) -> None:
        self.held_out = GeneralPart(trained, texts.held_out)
        self.steering = GeneralPart(trained, texts.steering)
        self.turns = Turns()
        if turns is None:
            check_noise(self.steering, budget)
        else:
            self.turns.load_state_dict(turns)
        self.gradient = GeneralPart(trained, texts.anchor).gradient

    def measurement(self, of_s: Measurement) -> Measurement:
        """What the law sees in the place of a tick's measurement of S."""
        return self.steering.follow(self.turns).measurement(of_s)


def part_within(budget: float, share: float, read: Callable[[float], float]) -> float:
    """The part of what a model has learned whose drift is the budget, or near it; the last one that was read.

    Drift begins as the square of the part; from the second reading on its power is that between the last two.

    Args:
        budget: the share of drift that is asked for.
        share: that of the whole, above the budget.
        read: the share of drift of a part, 0 to 1.
    """
    part, power = 1.0, 2.0
    for _ in range(MAX_READINGS):
        before, part = part, min(1.0, part * (budget / share) ** (1 / power))
        found = read(part)
        if not found > 0 or part == before or NEAR <= found / budget <= MARGIN:
            break
        power, share = max(1.0, math.log(found / share) / math.log(part / before)), found
    return part


def check_noise(part: GeneralPart, budget: float) -> None:
    """Refuse a budget that is below what two readings of the same model differ by. For a model that has not moved yet.

    Exact kernels read the same bits twice; some add in any order, as those of experts do.

    Args:
        part: of the general text.
        budget: the largest share of drift that is asked for.

    Raises:
        UserError: drift of the model from itself is more than that.
    """
    noise = part.noise()
    words = f"--max-drift {per_cent(budget)}: two readings of the same model differ by {per_cent(noise)}"
    if not noise <= budget:
        raise UserError(f"{words}, so that nothing can hold it; give ten times that, or train in fp32, without "
                        "4-bit weights")  # fmt: skip
    if noise > NOISY * budget:
        _log.warning("%s, which is noise in what is held; fp32 without 4-bit weights has less", words)


def steering_tokens(tokens_per_tick: int) -> int:
    """Positions that a tick reads."""
    return min(READ_AT_ONCE, max(MIN_READ, tokens_per_tick // READ_SHARE))


def anchor_tokens(tokens_per_step: int, accumulated: int = 1) -> int:
    """Positions of an anchor batch: as many as a micro-batch has at most, whose memory is known to be there."""
    return max(MIN_ANCHOR, min(tokens_per_step // ANCHOR_SHARE, tokens_per_step // accumulated))


def _rows(own: dict[str, Tensor], whole: dict[str, Tensor]) -> _Rows:
    counted = own["labels"] != IGNORED
    positions = counted.flatten().nonzero().squeeze(1)
    return _Rows(own["input_ids"], positions, own["labels"][counted], int((whole["labels"] != IGNORED).sum()))


def _share(batch: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """A rank's rows of a batch. Where there are none, one of which nothing counts: with the weights in shares each rank
    has a part in another's forward pass."""
    own = {name: part[rank::ranks] for name, part in batch.items()}
    if len(own["labels"]):
        return own
    return {"input_ids": batch["input_ids"][:1], "labels": torch.full_like(batch["labels"][:1], IGNORED)}
