"""What docs/guides/coming-from-other-tools.md says of our settings is true, and its commands run."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from granite_scu.cli import main
from granite_scu.cli.command_table import BY_NAME
from granite_scu.config import flags

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "coming-from-other-tools.md").read_text(encoding="utf-8")
PROGRAM = "    granite-scu "
COMMANDS = [line.removeprefix(PROGRAM) for line in PAGE.splitlines() if line.startswith(PROGRAM)]

TINY = {
    "data": "--model tiny-granite-h --block-size 64",
    "train": "--test-run --samples 0 --max-steps 2 --learning-rate 1e-5 --block-size 64 --batch-size 2",
}
"""What makes a command of the page run here in seconds."""


def test_every_setting_of_ours_on_the_page_is_one():
    said = "\n".join(line for line in PAGE.splitlines() if not line.startswith(PROGRAM))
    known = {*flags.FLAGS, "--config"}
    named = set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*(?![\w.-])", said))
    assert len(named) > 25 and named <= known
    last_cells = [row.split("|")[-2] for row in PAGE[PAGE.index("## Settings") :].splitlines() if row.startswith("| ")]
    keys = {key for cell in last_cells for key in re.findall(r"`([a-z_]+\.[a-z0-9_]+)`", cell)}
    assert {"optimizer.weight_decay"} <= keys <= set(flags.HINTS)
    assert set(re.findall(r"`granite-scu (\w+)`", PAGE)) == {"merge", "publish"} <= set(BY_NAME)


def as_alpaca(number: int) -> dict[str, str]:
    return {"instruction": f"Count to {number}.", "input": "in words", "output": f"one, and so on to {number}"}


@pytest.mark.slow
def test_the_commands_of_the_page_run(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("alpaca.json").write_text(json.dumps([as_alpaca(i) for i in range(60)], indent=1))
    assert len(COMMANDS) == 6
    for line in COMMANDS:
        command, *words = shlex.split(line)
        if "outputs/model-out" in words:  # an adapter as PEFT saves it
            Path("outputs/model-out").mkdir(parents=True)
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copy(Path("runs/alpaca") / name, "outputs/model-out")
        code, _, err = call(main.main, command, *words, *shlex.split(TINY.get(command, "")))
        assert code == 0, (line, err)
        if command == "data":
            assert "read as Alpaca: 60 conversations" in err
    assert Path("merged/model.safetensors").is_file()
