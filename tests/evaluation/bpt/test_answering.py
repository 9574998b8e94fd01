"""Questions to the models that are scored."""

import io
from contextlib import nullcontext

from rich.console import Console

from granite_scu.evaluation import elsewhere
from granite_scu.evaluation.bpt.answering import AnswerScoring
from granite_scu.evaluation.bpt.texts import Texts


def test_questions_that_fail_cost_a_warning_and_not_the_scores(monkeypatch, caplog):
    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(elsewhere, "ask_general", fails)
    asked = AnswerScoring(Texts("mine", []), tokenizer=None, count=2)
    monkeypatch.setattr("granite_scu.evaluation.answers.ask", lambda *_, **__: {"base": []})
    asked.ask(None, {"base": nullcontext}, nullcontext, Console(file=io.StringIO()))
    assert "base: not asked: RuntimeError: out of memory" in caplog.text
    assert asked.found(["base"]) == {}
