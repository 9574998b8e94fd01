"""What a cell asks of the product."""

import numpy as np
import pytest
from rich.console import Console

from benchmarks.learning_rates_data import Lesson
from granite_scu import Request
from granite_scu.evaluation import general_text
from granite_scu.model import loading
from granite_scu.training.recipe import prepare
from research.real.command import RESULTS
from research.real.grid import Cell
from research.real.product import of_arm, settings
from research.real.tasks import TASKS, split


def test_replay_reads_other_texts_in_each_pass_over_the_records(tmp_path):
    cell = Cell("tiny-granite-h", "telegram", "replay", 0.05, 1e-3)
    tokenizer, parts = loading.load_tokenizer(cell.base), split(cell.task)
    file = RESULTS.parent / f"general-{cell.base}.jsonl"
    text, made = general_text.read(file, tokenizer), Lesson(parts.train, parts.validation, None)
    asked = settings(cell, cell.base, tmp_path, made, tokenizer, text, "cpu") | of_arm(cell, file)
    data = prepare(Request.from_dotted(asked), Console(quiet=True)).data
    stream, spans = data.train.stream, np.concatenate([data.train.spans_of(n) for n in range(len(data.train))])
    owners = np.searchsorted(stream.ends, spans[:, 0])
    times, length = np.bincount(owners), np.bincount(owners, spans[:, 1] - spans[:, 0])
    general = np.flatnonzero(data.division.corpus.sources[: len(times)] == 1)
    assert set(times[general]) == {0, 1} and (times[general] == 1).sum() > 2 * TASKS[cell.task].epochs
    assert length[general].sum() / (length.sum() - length[general].sum()) == pytest.approx(0.05, abs=0.02)
