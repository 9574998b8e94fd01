"""Which blocks a rank trains on, batch by batch: a function of the seed and the batch's number alone.

Nothing has to be stored to continue from a batch, and any number of ranks together read the same blocks in
the same global batches.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from granite_scu.data.blocks.packing import Block, Blocks


@dataclass(frozen=True)
class EndlessBatches:
    """Batch sampler without end, and therefore without a length.

    Attributes:
        blocks_of: what the k-th micro-batch has of a data set.
        start: first micro-batch, the number that each rank has trained on already.
    """

    blocks_of: Callable[[int], list[Any]]
    start: int = 0

    def __iter__(self) -> Iterator[list[Any]]:
        return map(self.blocks_of, count(self.start))


class Epochs:
    """Training blocks, a map-style data set by epoch and number of the block in it.

    Args:
        first: the blocks of epoch 0, and of all others where they are the same.
        later: the blocks of another epoch, by its number; None where they are the same.
    """

    def __init__(self, first: Blocks, later: Callable[[int], Blocks] | None = None) -> None:
        self.first, self.later = first, later
        self._kept: dict[int, Blocks] = {}

    def __getitem__(self, place: tuple[int, int]) -> Block:
        epoch, number = place
        return self.of(epoch)[number]

    def of(self, epoch: int) -> Blocks:
        """The blocks of an epoch. Two are kept, for batches across the border."""
        if self.later is None or epoch == 0:
            return self.first
        if epoch not in self._kept:
            last = {number: blocks for number, blocks in self._kept.items() if number == epoch - 1}
            self._kept = last | {epoch: self.later(epoch)}
        return self._kept[epoch]

    def size(self, epoch: int) -> int:
        """Blocks of an epoch."""
        return len(self.of(epoch))

    def mean(self, epochs: float | None) -> float:
        """Blocks of one of so many epochs."""
        if self.later is None or epochs is None:
            return len(self.first)
        whole, rest = int(epochs), epochs % 1
        return (sum(map(self.size, range(whole))) + (rest * self.size(whole) if rest else 0)) / epochs


@dataclass(frozen=True)
class Order:
    """The order of training: the epochs, each a shuffle of all its blocks by (seed, epoch), without a border.

    Attributes:
        size: blocks of an epoch, by its number.
        seed: of the shuffles.
        begins: blocks before each epoch, as far as anybody has asked.
    """

    size: Callable[[int], int]
    seed: int
    begins: list[int] = field(default_factory=lambda: [0])

    def batch(self, k: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[tuple[int, int]]:
        """A rank's k-th micro-batch of ``batch_size`` = B, rank r of ``world_size`` = W: epochs, and numbers in them.

        Global batch k takes the positions [k W B, (k + 1) W B) of the order, rank r the r-th B of them; so a batch may
        hold the end of an epoch and the start of the next, and no block is missed or repeated within an epoch.

        >>> order = Order(lambda epoch: 3, seed=0)
        >>> [order.batch(k, batch_size=2) for k in range(3)]
        [[(0, 2), (0, 0)], [(0, 1), (1, 2)], [(1, 0), (1, 1)]]
        """
        first = (k * world_size + rank) * batch_size
        return [self.place(position) for position in range(first, first + batch_size)]

    def place(self, position: int) -> tuple[int, int]:
        """The epoch, and the block in it, at a position of the order."""
        while self.begins[-1] <= position:
            self.begins.append(self.begins[-1] + self.size(len(self.begins) - 1))
        epoch = bisect_right(self.begins, position) - 1
        return epoch, int(_permutation(self.size(epoch), self.seed, epoch)[position - self.begins[epoch]])


@lru_cache(maxsize=2)  # the epoch and, for a batch across the border, the next
def _permutation(n: int, seed: int, epoch: int) -> NDArray[np.unsignedinteger]:
    numbers = np.arange(n, dtype=np.min_scalar_type(n))  # small ones: there may be millions of blocks
    np.random.default_rng((seed, epoch)).shuffle(numbers)
    return numbers
