"""The tool as users call it: another process, another terminal, the real client."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api
from loopback import TOKEN

from granite_scu.cli.main import main

REPO = "ada/adapter"
TOOL = Path(__file__).parents[3] / "tools" / "push_to_hf.py"


@pytest.mark.slow
def test_the_cached_login_serves_too(tool, hub, run, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(TOKEN, encoding="utf-8")
    done = tool(run, "--repo-id", REPO, "--private")
    assert done.returncode == 0 and hub.repos[REPO].private, done.stderr


@pytest.mark.slow
def test_a_dry_run_asks_nobody(tool, hub, run):
    done = tool(run, "--repo-id", REPO, "--dry-run")
    assert (done.returncode, done.stderr, hub.requests) == (0, "", []), done.stderr
    size = f"{(run / 'adapter_model.safetensors').stat().st_size:,}"
    assert re.search(rf"adapter_model.safetensors\W+{size}\W", done.stdout)
    kept = re.search(r"^stays here: (.*)$", done.stdout, re.MULTILINE)[1].split(", ")
    assert {"checkpoint-4", "config.yaml", "logs", "report.html", "training_config.json"} <= set(kept)
    assert "library_name: peft" in done.stdout and "| base model, held-out test documents |" in done.stdout


@pytest.mark.parametrize("path", ["none", "."], ids=["no login", "a login that cannot be read"])
def test_without_a_token_it_says_where_one_comes_from(push, hub, monkeypatch, tmp_path, path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / path))
    code, _, err = push()
    assert code == 2 and err.count("\n") == 1
    assert "hf auth login" in err and "HF_TOKEN" in err
    assert not hub.requests


def test_where_nobody_can_be_asked_nothing_becomes_public(push, hub):
    code, _, err = push(yes=False)
    assert code == 2 and err.startswith("error: --yes: needed")
    assert not hub.requests


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1)])
def test_on_a_terminal_it_asks_before_anything_becomes_public(push, hub, monkeypatch, answer, code):
    terminal, stdin = pty.openpty()
    with os.fdopen(terminal, "wb", 0) as keyboard, os.fdopen(stdin) as reader:
        monkeypatch.setattr(sys, "stdin", reader)
        keyboard.write(answer.encode())
        ended, out, err = push(yes=False)
    assert ended == code, err
    assert f"{REPO} on {hub.url} is public" in out and "[y/N]" in out
    assert (REPO in hub.repos) == (code == 0)
    if code:
        assert "nothing was uploaded" in err


@pytest.mark.slow
def test_ctrl_c_is_one_line(hub, run, tmp_path):
    arrived = threading.Event()

    def interrupt():
        arrived.set()
        process.send_signal(2)
        threading.Event().wait(2)

    hub.before_commit = interrupt
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
    }
    line = [sys.executable, str(TOOL), str(run), "--repo-id", REPO, "--yes"]
    process = subprocess.Popen(
        line,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores Ctrl-C
    )
    _, err = process.communicate(timeout=120)
    assert arrived.is_set() and process.returncode == 130
    assert err.startswith("stopped by Ctrl-C; run the same command again") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repo-id", "adapter"], "--repo-id adapter: not owner/name"),
        (["--repo-id", "a/b/c"], "--repo-id a/b/c: not a name on the hub"),
        (["--repo-id", "ada/ad apter"], "not a name on the hub"),
        (["--repo-id", REPO, "--license", "MIT"], "--license MIT"),
        (["--repo-id", REPO, "--revision", "../x"], "--revision ../x"),
        (["--repo-id", REPO, "--base-model-id", "/models/x"], "--base-model-id /models/x"),
        ([], "the following arguments are required: --repo-id"),
        (["--repo-id", REPO, "--publik"], "unrecognized arguments: --publik"),
    ],
)
def test_a_wrong_request_is_one_line(run, capsys, arguments, words):
    assert main(["publish", str(run), *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and words in err


@pytest.mark.parametrize("arguments", [["--token", TOKEN], [f"--token={TOKEN}"], ["--tokken", TOKEN], [TOKEN]])
def test_a_token_on_the_command_line_is_refused_and_not_repeated(run, capsys, arguments):
    assert main(["publish", str(run), "--repo-id", REPO, *arguments]) == 2
    out, err = capsys.readouterr()
    assert TOKEN not in out + err
    assert "hf auth login" in err or "hf_***" in err


def test_the_snippet_of_the_published_card_runs(push, hub, tmp_path, monkeypatch, capfd):
    """Everything by the card alone: the adapter and the tokenizer come over HTTP."""
    assert push()[0] == 0
    card = hub.repos[REPO].branches["main"]["README.md"].decode()
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("max_new_tokens=40", "max_new_tokens=4")
    assert "max_new_tokens=4)" in code
    hub.requests.clear()
    for name, value in (("ENDPOINT", hub.url), ("HF_HUB_CACHE", str(tmp_path / "hub"))):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capfd.readouterr().out.startswith("A function is")
    assert "GET file" in hub.requests
