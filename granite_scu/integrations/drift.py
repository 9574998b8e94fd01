"""The general text that ``max_drift`` needs in a trainer of others, made ready as training begins."""

import numpy as np
from rich.console import Console
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, TrainingArguments

from granite_scu.config.settings import IGNORED, DataConfig, DriftConfig
from granite_scu.data.tokens.stream import Stream
from granite_scu.evaluation import answers, general_text, general_writing
from granite_scu.evaluation.general_text import GeneralText
from granite_scu.integrations.plant import TrainerPlant
from granite_scu.model import base_digest
from granite_scu.model.compilation import evaluation_mode

LOOKED_AT = 64
"""Examples by which the length of all is judged."""

TIMES_AS_MANY = 10
"""Examples that are looked into for each question: not all need have one."""


def obtain(
    asked: DriftConfig,
    plant: TrainerPlant,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    base: str,
    first: bool,
    loader: DataLoader,
) -> GeneralText:
    """General text, the same in each process: the user's files, or what the base model writes.

    Args:
        asked: which.
        plant: has the model, as training begins.
        tokenizer: of the model.
        seed: of the draws.
        base: where the weights are from, under which what they write is kept; empty where nobody knows.
        first: whether this process is the one that reads and writes.
        loader: has the examples that are trained on.

    Raises:
        UserError: there is none to be had.
    """

    def find() -> GeneralText:
        model = plant.language_model
        if files := asked.general_files:
            rows = len(model.get_input_embeddings().weight)
            return general_text.of_files(files, DataConfig(), tokenizer, asked.general_tokens, seed, rows=rows)
        weights = base_digest.record(base) if base else None
        console = Console(stderr=True)
        with plant.as_it_began(), plant.precision(), evaluation_mode(model):
            near = questions(loader, tokenizer, seed)
            return general_writing.general_text(model, tokenizer, asked.general_tokens, seed, console, weights, near)

    return general_text.of_first_process(first, find)


def looked_into(loader: DataLoader) -> Dataset | None:
    """The data set, whose examples are had by number; None of a stream, which may tell its length all the same."""
    data = loader.dataset
    return data if hasattr(data, "__len__") and not isinstance(data, IterableDataset) else None


def questions(loader: DataLoader, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[str]:
    """A sample of those that are trained on, as ``train`` draws it from the same chats; of a stream, and where labels
    mask no question, none."""
    if not (data := looked_into(loader)):
        return []
    order = np.random.default_rng(seed).permutation(len(data))[: TIMES_AS_MANY * general_writing.BATCH]
    batches = [loader.collate_fn([data[int(number)]]) for number in order]
    rows = [(batch["input_ids"][0].numpy(), batch["labels"][0].numpy() != IGNORED) for batch in batches]
    tokens, targets = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    ends = np.cumsum([len(row) for row, _ in rows]) - 1
    stream = Stream(tokens.astype(np.int32), ends, np.zeros(len(tokens), np.uint16), targets)
    return [question.text for question in answers.questions_of(stream, tokenizer)[: general_writing.BATCH]]


def tokens_per_step(loader: DataLoader, args: TrainingArguments) -> int:
    """Positions of an optimizer step on all processes, by some examples; 0 of a stream, which cannot be looked into."""
    if (data := looked_into(loader)) is None:
        return 0
    some = range(0, len(data), -(-len(data) // LOOKED_AT))
    widths = [loader.collate_fn([data[index]])["input_ids"].numel() - 1 for index in some]
    examples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return examples * sum(widths) // len(widths)
