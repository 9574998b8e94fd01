"""Two processes of either trainer on half a batch each steer as one does on all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rounding import OF_SMALL, turned

from granite_scu.config.settings import TINY_MODEL
from granite_scu.evaluation.general_text import Document, GeneralText
from granite_scu.model.loading import load_tokenizer

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("ddp_run.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")


STEERED = {"s": ("s", "s_target"), "drift": ("s", "drift_bpt", "drift", "penalty_grad_norm")}


@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
@pytest.mark.parametrize("held", STEERED)
def test_two_processes_steer_as_one(held, trainer, small_granite, examples, tmp_path):
    """Rows have unequal numbers of supervised tokens, so that a mean of the processes' means would differ."""
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{name: row[name].tolist() for name in row} for row in examples(32)]))
    more = []
    if held == "drift":
        words = torch.randint(2, 60, (24, 26), generator=torch.Generator().manual_seed(7)).tolist()
        documents = tuple(Document(tuple(row), (False, *[True] * 25)) for row in words)
        more = [tmp_path / "text.jsonl"]
        GeneralText(documents, "auto").write(*more, load_tokenizer(TINY_MODEL))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    for name, launcher, batch in (("one", (), 4), ("two", TORCHRUN, 2)):
        line = [sys.executable, *launcher, SCRIPT, trainer, small_granite, rows, tmp_path / name, batch, *more]
        done = subprocess.run([*map(str, line)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    [one] = read(tmp_path / "one")
    first, second = read(tmp_path / "two")
    assert first == second
    assert [tick["step"] for tick in one] == [2, 4, 6, 8]
    close = turned(8, OF_SMALL)  # means and norms over numbers of which so many may differ
    for name in ("tokens", "data_bpt", "lambda", "data_grad_norm", *STEERED[held]):
        expected = [tick[name] for tick in one]
        assert [tick[name] for tick in first] == pytest.approx(expected, rel=close), name


def read(folder: Path) -> list[list[dict]]:
    """The ticks of each process."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
