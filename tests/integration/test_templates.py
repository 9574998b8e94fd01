"""A run with a chat template of one's own: what is saved with it is what every later command uses."""

import json
import re
import shutil

import pytest
from outcomes import done, refused_line
from transformers import AutoTokenizer, GenerationConfig

from granite_scu.cli import main as commands

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ m.role + (mark or ':') + m.content + '<|fim_suffix|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' + (mark or ':') }}{% endif %}"
)
FEW = ("--max-steps", 2, "--save-steps", 1, "--control-every", 1, "--block-size", 64, "--target-s", 0.02)


@pytest.fixture(scope="module")
def trained(launch, tmp_path_factory):
    """Folder of a run on chats, the template's file, and the flags."""
    folder = tmp_path_factory.mktemp("chats")
    lines = (json.dumps({"prompt": f"question {i}?", "completion": f"answer {i}."}) + "\n" for i in range(40))
    (folder / "chats.jsonl").write_text("".join(lines))
    (folder / "mine.jinja").write_text(TEMPLATE)
    data = ("--data-dir", folder / "chats.jsonl", "--chat-template", folder / "mine.jinja", "--system", "be kind")
    code, _, stderr = launch(
        "--test-run", *data, "--chat-template-args", "mark=>>", *FEW, "--samples", 3, "--output-dir", folder / "run"
    )
    assert code == 0, stderr
    return folder


def test_the_template_is_saved_with_its_arguments_and_used_by_what_comes_after(trained, call, tmp_path, monkeypatch):
    (trained / "mine.jinja").rename(trained / "elsewhere.jinja")
    saved = (trained / "run" / "chat_template.jinja").read_text()
    assert saved.endswith(f"\n{TEMPLATE}") and "else '>>'" in saved
    from granite_scu.evaluation import generate

    asked = []
    tokenized = generate.tokenized

    def watched(tokenizer, *arguments):
        found = tokenized(tokenizer, *arguments)
        asked.append(tokenizer.decode(found["input_ids"][0]))
        return found

    monkeypatch.setattr(generate, "tokenized", watched)
    question = ("--chat", "--prompt", "hi", "--max-new-tokens", 1)
    for run, more, mark in (("run", (), ">>"), ("run/checkpoint-1", ("--chat-template-args", "mark=::"), "::")):
        assert call(commands.main, "generate", trained / run, *question, *more)[0] == 0
        assert asked.pop() == f"system{mark}be kind<|fim_suffix|>user{mark}hi<|fim_suffix|>assistant{mark}"
    assert call(commands.main, "merge", trained / "run", "--out", tmp_path / "merged", "--no-check")[0] == 0
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == saved
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    ends = GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id
    assert ends == tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|fim_suffix|>"])
    stdout = done(call, commands.main, "eval", trained / "run", "--json")
    metrics = json.loads((trained / "run" / "scu_metrics.json").read_text())
    assert json.loads(stdout)["tokens"] == metrics["test_tokens"]
    (trained / "elsewhere.jinja").rename(trained / "mine.jinja")


def test_the_questions_of_held_out_chats_are_answered_at_the_end_and_by_eval(trained, call):
    folder = trained / "run"
    metrics = json.loads((folder / "scu_metrics.json").read_text())
    written = json.loads((folder / "answers.json").read_text())["answers"]
    pairs = {f"question {i}?": f"answer {i}." for i in range(40)}
    assert len(written) == 3 and all(pairs[each["question"]] == each["expected"] for each in written)
    assert metrics["answers"]["n"] == 3 and metrics["answers"]["right"] == 0
    settings = json.loads((folder / "training_config.json").read_text())
    assert "data.path" in settings["given"]
    assert "control.lambda_init" not in settings["given"] and settings["rate_by_width"] == 3.1e-3, "of a width of 192"
    assert not (folder / "samples.json").exists()
    assert [len(metrics["elsewhere"]["lost"]), metrics["elsewhere"]["n"]] == [0, 3]
    found = json.loads(done(call, commands.main, "eval", folder, "--json"))
    assert {each["question"] for each in written} <= {each["question"] for each in found["answers"]["records"]}
    assert set(found["answers"]["models"]) == set(found["elsewhere"]) == {"base", "run"}
    assert found["elsewhere"]["run"]["bits_before"] == pytest.approx(found["elsewhere"]["base"]["bits_after"])
    stdout = done(call, commands.main, "eval", folder)
    assert "as expected" in stdout and "expected: answer" in stdout


def test_they_are_asked_as_well_where_every_token_is_learned(trained, launch, tmp_path):
    data = ("--data-dir", trained / "chats.jsonl", "--loss-on", "all")
    done(launch, "--test-run", *data, *FEW, "--samples", 2, "--output-dir", tmp_path / "run")
    written = json.loads((tmp_path / "run" / "answers.json").read_text())["answers"]
    pairs = {f"question {i}?": f"answer {i}." for i in range(40)}
    assert len(written) == 2 and all(pairs[each["question"]] == each["expected"] for each in written)


def test_a_run_continues_with_its_own_copy_of_the_template(trained, call, tmp_path):
    """What its settings name is not read, which somebody else may have written: a run can be published."""
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    saved = (folder / "chat_template.jinja").read_text()
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    config = (folder / "config.yaml").read_text()
    changed = re.sub("(?m)^  chat_template: .*$", f"  chat_template: {secret}", config)
    assert changed != config
    (folder / "config.yaml").write_text(changed)
    resume = ("train", "--resume-from-checkpoint", folder / "checkpoint-2", "--max-steps", 3)
    code, _, _ = call(commands.main, *resume, "--chat-template", secret)
    assert code == 2, "asked for, it is read, and is no template of this run"
    done(call, commands.main, *resume)
    assert (folder / "chat_template.jinja").read_text() == saved
    (folder / "chat_template.jinja").unlink()
    assert "chat_template.jinja: is missing" in refused_line(call, commands.main, *resume)
