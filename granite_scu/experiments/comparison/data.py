"""The text of a task: read once in a process, its validation cut to size, and replaced half-way where the task says."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from granite_scu.config.settings import DataConfig
from granite_scu.data.blocks.packing import Blocks, in_a_row, padding_of
from granite_scu.data.blocks.sampling import EndlessBatches
from granite_scu.data.blocks.splitting import Division, Split, assign
from granite_scu.data.datamodule import TextDataModule, thinned
from granite_scu.data.sources.read import load
from granite_scu.data.tokens.cache import in_memory
from granite_scu.data.tokens.chat import Renderer
from granite_scu.data.tokens.encoding import encoded
from granite_scu.experiments.comparison.protocol import VALIDATION_TOKENS, Task
from granite_scu.model.loading import load_tokenizer


@lru_cache
def read(name: str, model: str, block_size: int) -> tuple[Division, Split[Blocks]]:
    """An embedded corpus, divided and packed as for any run. Tokenising takes longer than many steps: once a process.

    Of the two held-out parts, equal in characters, the one with more documents is the test text: documents are what the
    bootstrap draws.

    Raises:
        UserError: there is no such corpus here.
    """
    tokenizer = load_tokenizer(model)
    corpus = in_memory(encoded([load(name, "text")], Renderer(tokenizer)))
    parts = assign(corpus.places, corpus.characters)
    assert parts is not None, f"{name} cannot be divided by document"
    if len(parts.validation) > len(parts.test):
        parts = replace(parts, validation=parts.test, test=parts.validation)
    streams = parts.map(corpus.stream.part)
    blocks = streams.map(lambda stream: in_a_row(stream, stream.bounds, block_size, padding_of(tokenizer)))
    return Division(corpus, "document", parts), blocks


class ComparedData(TextDataModule):
    """The text of a task, in the product's loaders.

    N counts the training text of both halves: all that the run learns from.

    Args:
        config: of the run.
        seed: of the order of training blocks.
        task: says what follows half-way.
        model: whose tokenizer.
    """

    def __init__(self, config: DataConfig, seed: int, task: Task, model: str) -> None:
        super().__init__(config, seed)
        self.task, self.model = task, model
        self.test_documents: list[str] = []
        self.before_shift: Blocks | None = None

    def divide(self, tokenizer: PreTrainedTokenizerBase) -> Division:
        """As the base class's; the tokenizer is the model's."""
        return read(self.task.scored_on, self.model, self.config.block_size)[0]

    def make_blocks(self, division: Division, tokenizer: PreTrainedTokenizerBase) -> Split[Blocks]:
        """As the base class's."""
        config = self.config
        assert division.parts is not None
        self.test_documents = [division.corpus.name(number) for number in division.parts.test.tolist()]
        if self.task.then:
            _, first = read(self.task.corpus, self.model, config.block_size)
            self.before_shift = thinned(first.train, config.train_tokens)
        _, blocks = read(self.task.scored_on, self.model, config.block_size)
        train, validation = thinned(blocks.train, config.train_tokens), thinned(blocks.validation, VALIDATION_TOKENS)
        return replace(blocks, train=train, validation=validation)

    @property
    def n_tokens(self) -> int:
        return super().n_tokens + (self.before_shift.n_supervised if self.before_shift else 0)

    @property
    def text_digest(self) -> str:
        """Of all that is trained on, validated on and tested on: the corpora come with Python and with numpy."""
        parts = (self.before_shift, self.train, self.validation, self.test)
        return "-".join(part.checksum()[:8] for part in parts if part is not None)

    def _training_order(self, start: int) -> tuple[Blocks, Iterable[list[int]]]:
        if self.before_shift is None:
            return super()._training_order(start)
        assert self.task.steps is not None
        sizes = (len(self.before_shift), len(self.train))
        both = torch.utils.data.ConcatDataset([self.before_shift, self.train])  # type: ignore[list-item]
        batches = shifting_batches(sizes, self.config.batch_size, self.seed, self.task.steps // 2, start)
        return both, batches  # type: ignore[return-value]

    def whole_training_text(self) -> DataLoader:
        """The training blocks once, in order; after a shift, those of the second text."""
        return self._loader(self.train, batch_sampler=self._in_order(self.train))


def shifting_batches(
    sizes: tuple[int, int], batch_size: int, seed: int, shift: int, start: int = 0
) -> Iterator[list[int]]:
    """Batches without end from two sets of blocks, the second numbered after the first.

    Args:
        sizes: blocks of the first and of the second.
        batch_size: blocks in a batch.
        seed: of both orders.
        shift: batches from the first before the second takes over.
        start: first batch.
    """
    first, second = sizes
    yield from islice(EndlessBatches(first, batch_size, seed, start=start), max(shift - start, 0))
    for batch in EndlessBatches(second, batch_size, seed, start=max(start - shift, 0)):
        yield [first + index for index in batch]
