"""Which blocks a rank trains on, batch by batch: a function of the seed and the batch's number alone.

Nothing has to be stored to continue from a batch, and any number of ranks together read the same blocks in
the same global batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class EndlessBatches:
    """Batch sampler without end, and therefore without a length.

    Attributes:
        blocks_of: the numbers of the blocks in the k-th micro-batch.
        start: first micro-batch, the number that each rank has trained on already.
    """

    blocks_of: Callable[[int], list[int]]
    start: int = 0

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.blocks_of, count(self.start))


def indices(k: int, n_blocks: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> list[int]:
    """The blocks of a rank's k-th micro-batch of ``batch_size`` = B, rank r of ``world_size`` = W.

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
