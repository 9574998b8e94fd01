"""The text of a task: read once in a process, its validation cut to size, and replaced half-way where the task says."""

from functools import lru_cache, partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig
from granite_scu.data.blocks.packing import Blocks, in_a_row, padding_of
from granite_scu.data.blocks.sampling import EndlessBatches, Epochs, Order
from granite_scu.data.blocks.splitting import Division, assign
from granite_scu.data.datamodule import TextDataModule, thinned
from granite_scu.data.sources.corpora import EMBEDDED
from granite_scu.data.sources.read import load
from granite_scu.data.tokens.chat import Renderer
from granite_scu.data.tokens.encoding import encoded
from granite_scu.data.tokens.stream import joined
from granite_scu.model.loading import load_tokenizer
from research.comparison import package_docs
from research.comparison.protocol import TEST_TOKENS, VALIDATION_TOKENS, Task

EMBEDDED[package_docs.NAME] = package_docs.package_docs  # as if it was one of the product's

TEXTS = Path("~/.cache/granite-scu/texts")
"""Where ``research/fetch_texts.py`` leaves the corpora that are not embedded."""


def place_of(corpus: str) -> str:
    """Where a corpus is read from: its own name where it is embedded, else the file that was fetched.

    Raises:
        UserError: it has not been fetched.
    """
    if corpus in EMBEDDED:
        return corpus
    path = TEXTS.expanduser() / f"{corpus}.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: is not there; fetch it with python research/fetch_texts.py --only {corpus}")
    return str(path)


@lru_cache
def read(name: str, model: str, block_size: int) -> tuple[Division, dict[str, Blocks]]:
    """A corpus, divided and packed as for any run. Tokenising takes longer than many steps: once a process.

    Of the two held-out parts, equal in characters, the one with more documents is the test text: documents are what the
    bootstrap draws.

    Raises:
        UserError: it is not here.
    """
    tokenizer = load_tokenizer(model)
    corpus = joined(list(encoded([load(place_of(name), "text")], Renderer(tokenizer))))
    parts, _ = assign(corpus.places, corpus.characters, corpus.bare)
    assert parts is not None, f"{name} cannot be divided by document"
    if len(parts["validation"]) > len(parts["test"]):
        parts |= {"validation": parts["test"], "test": parts["validation"]}
    streams = {name: corpus.select(part) for name, part in parts.items()}
    padding = padding_of(tokenizer)
    blocks = {name: in_a_row(stream, stream.bounds, block_size, padding) for name, stream in streams.items()}
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

    def make_blocks(self, division: Division, tokenizer: PreTrainedTokenizerBase) -> dict[str, Blocks]:
        """As the base class's."""
        config = self.config
        assert division.parts is not None
        names = map(division.corpus.names.__getitem__, division.parts["test"].tolist())
        self.test_documents = [name.rpartition("/")[2] if Path(name).is_absolute() else name for name in names]
        if self.task.then:
            _, first = read(self.task.corpus, self.model, config.block_size)
            self.before_shift = thinned(first["train"], config.train_tokens)
        _, blocks = read(self.task.scored_on, self.model, config.block_size)
        sizes = {"train": config.train_tokens, "validation": VALIDATION_TOKENS, "test": TEST_TOKENS}
        found = blocks | {name: thinned(blocks[name], tokens) for name, tokens in sizes.items()}
        few = self.task.held_out
        return found if few is None else found | {"validation": blocks["validation"].select(range(few))}

    @property
    def n_tokens(self) -> int:
        return super().n_tokens + (self.before_shift.n_supervised if self.before_shift else 0)

    @property
    def text_digest(self) -> str:
        """Of all that is trained on, validated on and tested on: the corpora come with Python and with numpy."""
        parts = (self.before_shift, self.train, self.validation, self.test)
        return "-".join(part.checksum()[:8] for part in parts if part is not None)

    def train_dataloader(self) -> DataLoader:
        """As the base class's; after half of the steps, of the second text."""
        if self.before_shift is None:
            return super().train_dataloader()
        assert self.task.steps is not None
        texts, how = [self.before_shift, self.train], {"shift": self.task.steps // 2, "size": self.config.batch_size}
        batch = partial(shifted, orders=[Order(Epochs(text).size, self.seed) for text in texts], **how)
        both = torch.utils.data.ConcatDataset(texts)  # type: ignore[arg-type]
        return self._loader(both, batch_sampler=EndlessBatches(batch, self.start_batch))

    def whole_training_text(self) -> DataLoader:
        """The training blocks once, in order; after a shift, those of the second text."""
        return self._loader(self.train, batch_sampler=self._in_order(self.train))


def shifted(k: int, orders: list[Order], size: int, shift: int) -> list[int]:
    """The k-th batch of two sets of blocks, the second numbered after the first and read from batch ``shift`` on."""
    first, second = orders
    if k < shift:
        return [number for _, number in first.batch(k, size)]
    return [first.size(0) + number for _, number in second.batch(k - shift, size)]
