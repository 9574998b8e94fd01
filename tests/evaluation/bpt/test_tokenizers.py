"""Through which chat template conversations are scored."""

import pytest

from granite_scu.config.errors import UserError
from granite_scu.config.settings import TINY_MODEL
from granite_scu.data.tokens import templates
from granite_scu.evaluation.bpt.subjects import Subject
from granite_scu.evaluation.bpt.tokenizers import with_template
from granite_scu.model.loading import load_tokenizer


def test_it_is_the_runs_and_runs_with_different_ones_need_one_that_is_asked_for(tmp_path):
    tokenizer = load_tokenizer(TINY_MODEL)
    subjects = []
    for name in ("a", "b", "none"):
        (tmp_path / name).mkdir()
        subjects.append(Subject(name, str(tmp_path / name), "adapter", TINY_MODEL))
    a, b, none = subjects
    for name, text in (("a", "A{{ messages }}"), ("b", "B{{ messages }}"), ("c", "C{{ messages }}{{ x }}")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / templates.FILE).write_text(text)

    def found(*subjects, has_chats=True, template=None, arguments=None) -> str:
        return with_template(tokenizer, subjects, has_chats, template, arguments).chat_template

    assert found(a, none) == "A{{ messages }}"
    assert found(none) == tokenizer.chat_template
    with pytest.raises(UserError, match=r"/b: has another chat template than .*/a, .* --chat-template FILE"):
        found(a, b)
    whole = Subject("whole", TINY_MODEL, "model", TINY_MODEL)  # whose template no folder has
    with pytest.raises(UserError, match=f"{TINY_MODEL}: has another chat template than .*/a,"):
        found(a, whole)
    assert found(a, b, has_chats=False) == "A{{ messages }}"  # which nothing is put into
    asked = found(a, b, template=str(tmp_path / "c" / templates.FILE), arguments=["x=1"])
    assert asked.endswith("\nC{{ messages }}{{ x }}")
