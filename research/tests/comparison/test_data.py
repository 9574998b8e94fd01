"""The order of training blocks where one text follows another, and a task with little held-out text."""

from dataclasses import replace

from granite_scu.config.settings import DataConfig
from granite_scu.model.loading import load_tokenizer
from research.comparison.data import ComparedData, shifted
from research.comparison.evidence import Spec
from research.comparison.protocol import NONE, SCARCE, SCARCE_BLOCKS


def test_the_second_text_takes_over_at_the_shift():
    whole = [shifted(k, (6, 4), batch_size=2, seed=1, shift=5) for k in range(14)]
    assert all(index < 6 for batch in whole[:5] for index in batch)
    assert all(6 <= index < 10 for batch in whole[5:] for index in batch)


def test_little_held_out_text_is_of_a_document_or_two_and_makes_another_run():
    few, model = SCARCE.task("docs-small-8-blocks"), "tiny-granite-h"
    held_out = []
    for task in (few, replace(few, held_out=None)):
        data = ComparedData(DataConfig(path="stdlib-docs", block_size=128, train_tokens=1024), 0, task, model)
        data.prepare(load_tokenizer(model))
        held_out.append((len(data.validation), data.validation.n_documents))
    assert held_out[0][0] == SCARCE_BLOCKS and held_out[0][1] <= 2 < held_out[1][1]
    keys = {Spec(task, "none", "", 0, NONE.settings).key for task in (few, replace(few, held_out=None))}
    assert len(keys) == 2
