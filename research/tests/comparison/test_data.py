"""The order of training blocks where one text follows another, and a task with little held-out text."""

from dataclasses import replace
from itertools import islice

from granite_scu.config.settings import DataConfig
from granite_scu.model.loading import load_tokenizer
from research.comparison.data import ComparedData
from research.comparison.evidence import Spec
from research.comparison.protocol import NONE, SCARCE, SCARCE_BLOCKS, TASKS


def test_the_second_text_takes_over_after_half_of_the_steps():
    task, model = next(task for task in TASKS if task.then), "tiny-granite-h"
    config = DataConfig(path=task.corpus, block_size=128, batch_size=1, train_tokens=1024)
    data = ComparedData(config, 0, replace(task, steps=10), model)
    data.prepare(load_tokenizer(model))
    texts = [{blocks[i].inputs.tobytes() for i in range(len(blocks))} for blocks in (data.before_shift, data.train)]
    read = [batch["input_ids"].int().numpy().tobytes() for batch in islice(data.train_dataloader(), 10)]
    assert texts[0].isdisjoint(texts[1]) and set(read[:5]) <= texts[0] and set(read[5:]) <= texts[1]


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
