"""The way in from Python: the command's flags as arguments, and a result."""

import re
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from granite_scu.cli import from_python
from granite_scu.config import progress
from granite_scu.config.errors import UserError

ROOT = Path(__file__).parents[2]


def test_arguments_are_the_flags_of_the_command(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A line.\n" * 100)
    request = from_python._request(
        {
            "model": "tiny-granite-h",
            "accelerator": "cpu",
            "data_dir": [text],
            "output_dir": tmp_path / "run",
            "overwrite": True,
            "isolate_documents": False,
            "max_steps": 7,
            "adapter": None,
            "optimizer.weight_decay": 0.5,
            "system": "--- rules ---",
        }
    )
    assert (request.base.name, request.data.sources) == ("tiny-granite-h", [str(text)])
    assert request.run.overwrite and not request.data.isolate_documents
    assert request.data.system == "--- rules ---"
    assert (request.trainer.max_steps, request.optimizer.weight_decay) == (7, 0.5)
    assert {"trainer.max_steps", "optimizer.weight_decay"} <= request.given


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"learning_rat": 1e-3}, "did you mean learning_rate"),
        ({"lr": 1}, "here it is learning_rate"),
        ({"request": "chats.jsonl"}, r"data_dir="),
        ({"dry_run": True}, "dry_run"),
        ({"max_steps": "many"}, "max-steps"),
        ({"trainer.callbacks": [Console()]}, "trainer.callbacks: an object of rich.console.Console cannot be kept"),
    ],
)
def test_what_is_wrong_is_one_line_without_a_traceback_in_a_notebook(wrong, named):
    with pytest.raises(UserError, match=named) as refused:
        from_python.prepare(**wrong)
    (line,) = refused.value._render_traceback_()  # what IPython shows in place of a traceback
    assert named in line and "\n" not in line


def test_only_what_is_prepared_is_trained():
    with pytest.raises(UserError, match=r"takes what prepare returns"):
        from_python.train({"data_dir": "chats.jsonl"})


def test_a_request_and_flags_are_not_mixed():
    with pytest.raises(UserError, match="max_steps"):
        from_python.prepare(object(), max_steps=3)


def test_a_notebook_has_one_line_that_is_written_over(monkeypatch):
    outputs, updates = [], []

    def display(bundle, raw, display_id):
        outputs.append(bundle["text/plain"])
        return types.SimpleNamespace(update=lambda bundle, raw: updates.append(bundle["text/plain"]))

    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress, "UPDATE", 0.0)
    assert list(progress.tracked(range(300), "counting", progress.Console(file=sys.stderr))) == list(range(300))
    assert len(outputs) == 1 and len(updates) == 299
    assert updates[-1].split()[:2] == ["counting:", "100%"]


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    """In a chain, as in a notebook's cells; on the embedded model, few steps and forty chats."""
    monkeypatch.chdir(tmp_path)
    chats = (ROOT / "docs" / "examples" / "faq" / "train.jsonl").read_text().splitlines()[:40]
    Path("chats.jsonl").write_text("\n".join(chats))
    small = 'model="tiny-granite-h", accelerator="cpu", max_steps=2, samples=2'
    page = (ROOT / "docs" / "guides" / "notebooks.md").read_text(encoding="utf-8")
    cells = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict = {}
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(IFrame=lambda path, **size: Path(path)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from granite_scu.model.loading import resolve  # late: torch

    for cell in cells:
        ran = cell.replace('model="ibm-granite/granite-4.0-h-1b"', small).replace('    hardware="auto",\n', "")
        ran = ran.replace("ibm-granite/granite-4.0-h-1b", str(resolve("tiny-granite-h")))
        ran = ran.replace('resume_from_checkpoint="last"', 'resume_from_checkpoint="last", max_steps=3')
        exec(compile(ran, "notebooks.md", "exec"), names)
    assert len(cells) == 6
    assert names["result"].steps == 3 and names["result"].report.is_file()
    assert len(names["result"].answers) == 2 and names["result"].right is not None and names["result"].verdict
    assert names["model"].peft_config
