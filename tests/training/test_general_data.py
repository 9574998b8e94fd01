"""General text that is wrong for a run, which is told before a model is loaded."""

import json
from contextlib import nullcontext

import pytest

from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import TINY_MODEL
from granite_scu.data.tokens.templates import with_template
from granite_scu.evaluation.general_text import Document, GeneralText
from granite_scu.model.loading import load_tokenizer
from granite_scu.storage.run_folder import TRAINING_CONFIG
from granite_scu.training import general_data
from granite_scu.training.recipe import prepare
from granite_scu.training.resume import Resume

pytestmark = pytest.mark.usefixtures("no_step_is_tried")

ENDLESS = "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + '\\n' }}{% endfor %}"
"""A chat template by which no turn ends."""


@pytest.fixture
def asked(tmp_path):
    """Prepares a run of some chats under a budget of drift, of which it loads no model."""
    chats, lines = tmp_path / "chats.jsonl", [f"line {number}" for number in range(40)]
    turns = [
        [{"role": "user", "content": line}, {"role": "assistant", "content": f"This is {line}."}] for line in lines
    ]
    chats.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    (tmp_path / "none.jinja").write_text(ENDLESS)
    other = GeneralText(tuple(Document((1, number + 2), (False, True)) for number in range(2000)), "auto")
    other.write(tmp_path / "other.jsonl", with_template(load_tokenizer(TINY_MODEL), ENDLESS))
    settings = {"base.name": TINY_MODEL, "data.path": str(chats), "data.block_size": 64, "drift.max_drift": "2%"}
    settings |= {"run.output_dir": str(tmp_path / "run"), "trainer.accelerator": "cpu", "trainer.max_steps": 40}
    files = {"drift.general_data", "data.chat_template"}

    def run(more):
        more = {key: str(tmp_path / value) if key in files else value for key, value in more.items()}
        return prepare(Request.from_dotted(settings | more))

    return run


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"drift.general_data": "chats.jsonl"}, r"--general-data .*chats.jsonl: 40 texts .* too few"),
        ({"drift.general_data": "other.jsonl"}, r"other.jsonl: .* made with another chat template"),
        ({"data.chat_template": "none.jinja"}, "--general-data auto: .* ends what the user says"),
        ({"trainer.max_steps": 8, "control.every": 4}, "--max-drift: the run measures drift 2 times .* needs 3"),
    ],
)
def test_it_is_told_before_a_model_is_loaded(asked, given, words, caplog):
    with pytest.raises(UserError, match=words):
        asked(given)
    assert ("of its 40 texts are trained on too" in caplog.text) == ("drift.general_data" in given and "chats" in words)


@pytest.mark.parametrize(
    ("edited", "named", "words"),
    [
        (False, None, None),
        (False, "copy.jsonl", None),
        (False, "gone.jsonl", None),
        (True, None, "general.jsonl: is not the general text"),
        (False, "other.jsonl", "--general-data .*other.jsonl: is not the general text .*; give --general-data auto"),
    ],
)
def test_a_run_that_is_continued_takes_no_other_general_text(tmp_path, caplog, edited, named, words):
    tokenizer, file = load_tokenizer(TINY_MODEL), tmp_path / "general.jsonl"
    documents = tuple(Document((1, number + 2), (False, True)) for number in range(2000))
    text = GeneralText(documents, "auto")
    for name, of in (("general", documents), ("copy", documents), ("other", documents[::-1])):
        GeneralText(of, "auto").write(tmp_path / f"{name}.jsonl", tokenizer)
    if edited:
        file.write_text(file.read_text().splitlines()[0] + "\n")
    resume = Resume(tmp_path / "checkpoint-12", {"callbacks": {"DriftMeter": {"general": text.digest}}}, in_place=True)
    (tmp_path / TRAINING_CONFIG).write_text('{"drift": {"general_tokens": 8192}}')
    general = {"drift.general_data": str(tmp_path / named)} if named else {"drift.general_tokens": 4096}
    request = Request.from_dotted({"data.path": str(tmp_path), "drift.max_drift": "2%"} | general)
    with pytest.raises(UserError, match=words) if words else nullcontext():
        assert general_data.read(request, resume, None, tokenizer, None, sharded=False) == text
    assert ("--general-tokens 4096: has no effect" in caplog.text) == (not named)
