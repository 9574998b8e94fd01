"""Which blocks a rank trains on, batch by batch: a function of the seed and the batch's number alone.

Nothing has to be stored to go on from a batch, and any number of ranks together read the same blocks in
the same global batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class EndlessBatches:
    """Batch sampler without end, and therefore without a length: ``indices`` for k = start, start + 1, ...

    Attributes:
        n_blocks: blocks in an epoch, at least 1.
        batch_size: B, blocks that a rank gets at a time.
        seed: of the order, not negative.
        rank: this process's number.
        world_size: W, processes that share the blocks.
        start: first micro-batch, the number that each rank has trained on already.
    """

    n_blocks: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    start: int = 0

    def __iter__(self) -> Iterator[list[int]]:
        for k in count(self.start):
            yield indices(k, self.n_blocks, self.batch_size, self.seed, self.rank, self.world_size)


def indices(k: int, n_blocks: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> list[int]:
    """The blocks of a rank's k-th micro-batch.

    The epochs, each a shuffle of all blocks by (seed, epoch), follow each other without a border. Global batch
    k takes the positions [k W B, (k + 1) W B) of that sequence, rank r the r-th B of them; so a batch may hold
    the end of an epoch and the start of the next, and no block is missed or repeated within an epoch.

    >>> [indices(k, n_blocks=3, batch_size=2, seed=0) for k in range(3)]
    [[2, 0], [1, 2], [0, 1]]
    """
    positions = np.arange(batch_size) + (k * world_size + rank) * batch_size
    epochs, places = np.divmod(positions, n_blocks)
    parts = [_permutation(n_blocks, seed, int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
    return [int(index) for index in np.concatenate(parts)]


@lru_cache(maxsize=2)  # the epoch and, for a batch across the border, the next
def _permutation(n: int, seed: int, epoch: int) -> NDArray[np.unsignedinteger]:
    numbers = np.arange(n, dtype=np.min_scalar_type(n))  # small ones: there may be millions of blocks
    np.random.default_rng((seed, epoch)).shuffle(numbers)
    return numbers
