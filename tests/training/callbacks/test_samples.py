"""The end of a run: the main process writes what the models say, and none of it can end the run."""

import contextlib
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from granite_scu.config.settings import DataConfig
from granite_scu.evaluation import elsewhere
from granite_scu.evaluation.bpt.texts import Texts
from granite_scu.storage.run_folder import METRICS, SAMPLES, RunFolder
from granite_scu.training.callbacks import samples as callback
from granite_scu.training.callbacks.samples import Samples

TEXTS = {"prompt": "once", "document": " upon", "base": " a", "adapter": " time"}


@pytest.fixture
def end(tmp_path, monkeypatch):
    """Ends a run on texts with what is made of them; returns the content of the file, None where there is none."""

    def run(made, main: bool = True, beginnings: int = 2, start: bool = False):
        monkeypatch.setattr(callback, "openings", lambda blocks, count: [None] * min(count, beginnings))
        monkeypatch.setattr(callback, "sample", made)
        monkeypatch.setattr(elsewhere, "ask_general", made)
        plugin = SimpleNamespace(forward_context=contextlib.nullcontext)
        data = SimpleNamespace(test=None, chats=0)
        trainer = SimpleNamespace(is_global_zero=main, precision_plugin=plugin, datamodule=data)
        model = torch.nn.Linear(1, 1)
        model.disable_adapter = contextlib.nullcontext
        console, final = Console(file=io.StringIO()), SimpleNamespace(summary={"steps": 3})
        module = SimpleNamespace(model=model, language_model=model, start=start, at_start=contextlib.nullcontext)
        Samples(RunFolder(tmp_path), console, None, 2, final).on_train_end(trainer, module)
        file = tmp_path / SAMPLES
        return json.loads(file.read_text()) if file.is_file() else None

    return run


def test_the_texts_and_how_they_were_made_are_in_the_file(end):
    found = end(lambda *_, **__: [TEXTS])
    assert found["samples"] == [{"prompt": "once", "document": " upon", "base": " a", "adapter": " time"}]
    assert found["max_new_tokens"] == 40 and found["temperature"] == 0


def test_a_generation_that_fails_costs_a_warning_and_not_the_run(end, caplog, tmp_path):
    def fails(*_, **__):
        raise RuntimeError("out of memory")

    assert end(fails) is None
    assert "the report has no samples: RuntimeError: out of memory" in caplog.text
    assert "the report has no general answers: RuntimeError: out of memory" in caplog.text
    assert not (tmp_path / METRICS).exists(), "nothing was measured"


def test_chats_that_are_divided_by_block_are_not_asked_for_as_unseen(monkeypatch, tmp_path):
    """All that is learned, so that they are read again: most of them are trained on."""
    found = Texts("x", [], tail_of=DataConfig())
    monkeypatch.setattr(callback.texts, "held_out", lambda *_: found)
    monkeypatch.setattr(callback.answers, "questions_in", lambda documents, *_: documents)
    data = SimpleNamespace(chats=3, config=DataConfig(loss_on="all"), seed=0)
    assert callback.held_out_questions(data, None, 5, RunFolder(tmp_path)) == []
    found = Texts("x", ["a chat"])
    assert callback.held_out_questions(data, None, 5, RunFolder(tmp_path)) == ["a chat"]


def test_other_processes_and_texts_without_a_beginning_write_nothing(end):
    assert end(lambda *_, **__: pytest.fail("asked for"), main=False) is None
    assert end(lambda *_, **__: [TEXTS], beginnings=0) is None


@pytest.mark.parametrize(("start", "before"), [(False, "base model"), (True, "adapter at the start")])
def test_general_answers_are_compared_with_the_model_as_training_began(end, tmp_path, start, before):
    def asked(*arguments, **_):
        if len(arguments) == 2:
            return [TEXTS]
        _model, _tokenizer, switches, count = arguments
        general = elsewhere.general_questions()[:count]
        nats = {name: np.full(count, 7.0) for name in switches}
        return elsewhere.GeneralAnswers(general, {name: ["?"] * count for name in switches}, nats, np.full(count, 10))

    end(asked, start=start, beginnings=0)
    found = json.loads((tmp_path / METRICS).read_text())["elsewhere"]
    assert (found["compared_with"], found["n"]) == (before, 2)
