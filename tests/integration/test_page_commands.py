"""Every call of granite-scu on a page runs, on the embedded model and small data, or says here why not."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import test_pages
from outcomes import done

from granite_scu.cli import main

ELSEWHERE = {
    "hf:owner/name": "needs the network",
    "--private": "needs the network and a token",
    "granite-4.0-h-tiny": "needs the network; test_experts trains a small one",
    "eval merged/ --model ibm-granite": "needs the network; test_eval_bpt scores a merged model",
    "--multi-gpu": "needs a GPU; tests/distributed has two processes",
    "--max-drift": "takes three ticks; test_killed holds a budget",
    "--logger": "test_loggers runs them",
    "eval runs/mine runs/mine/final": "final/ is there where another adapter validated best; test_eval_bpt has it",
    "runs/mine --chat": "reads a terminal; tests/cli has conversations",
    "docs/examples/faq": "needs the tutorial's model; tests/tools/test_run_tutorial.py runs it",
    "runs/faq": "the same",
}
"""What stands in a call that is not run here, and why, or which test runs it."""

TINY = {
    "data": "--model tiny-granite-h",
    "plan": "--test-run --output-dir runs/planned",
    "check": "--test-run --output-dir runs/planned",
    "train": "--test-run --samples 0 --max-steps 2 --learning-rate 1e-5 --block-size 64 --batch-size 2 --overwrite",
    "generate": "--max-new-tokens 2",
}
"""What makes a call run here in seconds; what it says itself goes before."""


def calls() -> list[tuple[str, ...]]:
    """Those of all pages but one that has a test of its own, each once, in order."""
    pages = [page for page in test_pages.PAGES if page.stem != "coming-from-other-tools"]
    return list(dict.fromkeys(tuple(words) for page in pages for words in test_pages.commands(page)))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder that a call is given in, with the data that pages speak of."""
    monkeypatch.chdir(tmp_path)
    texts = {f"{i}.txt": f"Number {i} follows {i - 1}. " * 200 for i in range(40)}
    for folder in ("my_data", "my_texts", "more_data", "texts", "books", "exports/deep"):
        Path(folder).mkdir(parents=True)
        for name, text in texts.items():
            Path(folder, name).write_text(f"{folder}: {text}")
    said = [
        [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is {i}."}]
        for i in range(60)
    ]
    lines = [json.dumps({"messages": each}) + "\n" for each in said]
    files = {"chats": lines, "mine": lines[:30], "general": lines[30:45], "test": lines[45:]}
    for name, some in files.items():
        Path(f"{name}.jsonl").write_text("".join(some))
    pyarrow.parquet.write_table(pyarrow.table({"body": list(texts.values())}), "exports/deep/texts.parquet")


def shortened(words: tuple[str, ...]) -> list[str]:
    """The call with what makes it short, and the embedded model."""
    given = [word for word in words if word != "ibm-granite/granite-4.0-h-1b"]
    if len(given) < len(words):
        given.remove("--model")
    more = shlex.split(TINY.get(given[0], ""))
    if "--resume-from-checkpoint" in given:
        more = ["--max-steps", "4"]
    return [*given, *more]


def test_reasons_are_of_calls_that_are_there():
    lines = [" ".join(words) for words in calls()]
    assert all(any(sign in line for line in lines) for sign in ELSEWHERE)


@pytest.mark.slow
def test_they_run(place, call):
    done(call, main.main, *shortened(("train", "--data-dir", "my_data/", "--output-dir", "runs/mine")))
    shutil.copytree("runs/mine", "runs/demo")
    template = Path("runs/mine/chat_template.jinja").read_text()
    Path("mine.jinja").write_text(template + "{% if enable_thinking is defined and enable_thinking %}{% endif %}")
    failed = {}
    for words in calls():
        line = " ".join(words)
        if any(sign in line for sign in ELSEWHERE) or words[0].startswith("--"):
            continue
        if words[0] == "merge":
            shutil.rmtree("merged", ignore_errors=True)
        code, _, err = call(main.main, *shortened(words))
        if code:
            failed[line] = re.sub(r"\s+", " ", err)[-300:]
    assert not failed
