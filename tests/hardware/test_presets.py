"""Which preset a machine takes, on simulated machines."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import devices
import pytest
import yaml

from granite_scu.cli import main
from granite_scu.cli.hardware import detect_gpu_info, get_recommended_config, print_hardware_info
from granite_scu.config.errors import UserError
from granite_scu.hardware import machine as machines
from granite_scu.hardware import presets
from granite_scu.model.memory import Footprint
from granite_scu.training import memory_budget

ROOT = Path(__file__).parents[2]

OF = {
    "T4": "gpu_t4",
    "V100": "gpu_v100",
    "V100_32": "gpu_v100",
    "A10": "gpu_a10",
    "A10G": "gpu_a10",
    "RTX_3080": "gpu_3080",
    "RTX_3080_12": "gpu_low_mem",
    "RTX_4080": "gpu_4080",
    "RTX_3090": "gpu_3090",
    "RTX_4090": "gpu_4090",
    "A6000": "gpu_a6000",
    "A30X2": "gpu_a30x2",
    "A40": "gpu_a40",
    "A100_40": "gpu_a100_40",
    "A100": "gpu_a100_80",
    "H100": "gpu_h100",
    "H200X8": "gpu_h200",
    "B200": "gpu_b200",
    "RTX_5090": "gpu_5090",
    "RTX_5080": "gpu_rtx50",
    "RTX_5070": "gpu_5070",
    "RTX_2080_TI": "gpu_2080_ti",
    "RTX_3060": "gpu_low_mem",
    "RTX_4060_LAPTOP": "gpu_8gb",
    "P100": "conservative",
    "QUADRO_5000": "conservative",
    "L4": "gpu_a10",  # no preset names these two: as much memory, and bf16
    "RTX_6000_ADA": "gpu_a40",
    "A100_MIG": "gpu_8gb",
    "A100_HALF": "gpu_a100_40",
    "A10_VGPU": "gpu_low_mem",
    "CPU": "cpu",
    "AMX": "cpu",
}


@pytest.mark.parametrize(("device", "name"), OF.items())
def test_a_machine_takes_the_preset_of_its_card(device, name):
    device = getattr(devices, device)
    assert presets.choose(device) == name and presets.mismatch(name, device) is None


def test_every_preset_is_a_file_that_some_machine_takes():
    files = {path.stem for path in (ROOT / "configs" / "hardware").glob("*.yaml")}
    assert files == set(presets.PRESETS) == set(OF.values())
    assert presets.folder() == ROOT / "configs" / "hardware"


def as_table(name):
    """Blocks in a preset's micro-batch, tokens in each, and micro-batches in a step."""
    values = yaml.safe_load((ROOT / "configs" / "hardware" / f"{name}.yaml").read_text(encoding="utf-8"))
    data, accumulated = values["data"], values["trainer"]["accumulate_grad_batches"]
    return f"{data['batch_size']}", f"{data['block_size']}", f"{accumulated}"


def rows_of(page):
    """Preset, micro-batch and accumulation of each row of a page's table of presets."""
    row = re.compile(r"^\|.*?`(\w+)` .*?\| (\d+) \W (\d+)(?: on each)?, (\d+)", re.MULTILINE)
    return row.findall((ROOT / page).read_text("utf-8"))


@pytest.mark.parametrize("page", ["README.md", "docs/guides/hardware.md"])
def test_pages_have_the_sizes_of_the_presets(page):
    rows = rows_of(page)
    assert len(rows) == (7 if page == "README.md" else len(presets.PRESETS))
    assert [row for row in rows if row[1:] != as_table(row[0])] == []


@pytest.mark.slow
def test_the_readme_has_the_memory_that_is_predicted(capsys):
    rows = re.findall(r"`(gpu_\w+)` .* ([\d.]+) GiB \|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 7
    for name, gib in rows:
        batch, block, _ = as_table(name)  # as data has them that fill a run
        sizes = ["--batch-size", batch, "--block-size", block]
        assert main.main(["plan", "--hardware", name, "--data-dir", "stdlib-docs", *sizes, "--json"]) == 0
        assert f"{json.loads(capsys.readouterr().out)['memory_gib_estimate']:.1f}" == gib, name


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [
        ("gpu_4090", "T4", "made for RTX 4090, 24 GB, and this is Tesla T4 with 15.0 GiB; --hardware gpu_t4 is for it"),
        ("gpu_a100_80", "A100_40", "--hardware gpu_a100_40"),
        ("gpu_3090", "CPU", "this is Plain CPU with 16.0 GiB; --hardware cpu"),
        ("cpu", "RTX_4090", "made for a machine without a GPU"),
    ],
)
def test_a_preset_for_another_card_is_worth_a_warning(name, device, words):
    warning = presets.mismatch(name, getattr(devices, device))
    assert warning.startswith(f"--hardware {name}: ") and words in warning and "\n" not in warning


def test_a_careful_preset_fits_every_card():
    assert presets.mismatch("conservative", devices.B200) is None
    assert presets.mismatch(None, devices.CPU) is None


def test_a_card_and_its_ti_are_two():
    assert presets.named("RTX 2080 Ti") == "gpu_2080_ti"
    with pytest.raises(UserError, match="no such preset"):
        presets.named("2080")


@pytest.mark.parametrize("name", presets.PRESETS)
def test_the_precision_of_a_preset_is_one_that_its_cards_have(name):
    precision = presets.settings(name)["trainer"].get("precision")
    cards = [getattr(devices, device) for device, preset in OF.items() if preset == name]
    assert precision != "bf16-mixed" or all(card.supports_bf16 for card in cards)
    assert precision != "16-mixed" or not any(card.supports_bf16 for card in cards)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_value_of_a_preset_says_where_it_is_from(name):
    """In a comment, or all of them in the first line."""
    text = presets.path(name).read_text()
    values = [line for line in text.splitlines() if re.match(r"  \w", line)]
    unmarked = [line for line in values if "#" not in line]
    assert not unmarked or "all reasoned" in text.splitlines()[0]


# Advice.

TAKES = {False: 5, "selective": 3, True: 2.5}
"""GiB of a block, by what is recomputed."""


@pytest.fixture
def predicted(monkeypatch):
    """A machine that can compile, and a model whose step takes ``TAKES``."""

    def predict(request, machine):
        return Footprint(0, 0, round(TAKES[request.base.gradient_checkpointing] * request.data.batch_size * 2**30))

    monkeypatch.setattr(memory_budget, "predict", predict)
    monkeypatch.setattr(machines, "_lacking_for_triton", lambda capability: "")


@pytest.mark.usefixtures("predicted")
def test_the_dictionaries_have_the_keys_of_the_guide(machine):
    machine(devices.RTX_4090)
    info = detect_gpu_info()
    assert info["gpu_name"] == "NVIDIA GeForce RTX 4090"
    assert f"{info['gpu_memory_gb']:.2f}" == "23.50"
    assert info["supports_bfloat16"] is info["supports_tf32"] is info["supports_flash_attention"] is True
    assert (info["compute_capability"], info["preset"]) == ("8.9", "gpu_4090")
    config = get_recommended_config()
    assert (config["batch_size"], config["num_workers"], config["gradient_checkpointing"]) == (4, 8, False)
    assert (config["compile"], config["precision"], config["mixed_precision"]) == (True, "bf16-mixed", True)


@pytest.mark.usefixtures("predicted")
def test_a_machine_without_a_gpu_is_described_too(machine, monkeypatch):
    machine(replace(devices.CPU, memory_gb=64.0), driver=None, build=None)  # enough for four processes
    info = detect_gpu_info()
    assert (info["gpu_name"], info["gpu_memory_gb"], info["gpu_count"]) == (None, 0.0, 0)
    assert info["problem"] == "no NVIDIA driver" and info["preset"] == "cpu"
    config = get_recommended_config()
    assert (config["preset"], config["precision"], config["mixed_precision"]) == ("cpu", "32-true", False)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert get_recommended_config() == config  # in each of the tasks that train


@pytest.mark.parametrize(
    ("memory", "name"),
    [
        (8, "gpu_8gb"),
        (12, "gpu_low_mem"),
        (16, "conservative"),
        (24, "gpu_3090"),
        (40, "gpu_a100_40"),
        (48, "gpu_a40"),
        (80, "gpu_a100_80"),
        (141, "gpu_h200"),
    ],
)
def test_memory_alone_chooses_a_preset(memory, name):
    assert presets.for_memory(memory) == name


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (devices.A100, ["2 x NVIDIA A100", "79.0 GiB", "8.0", "gpu_a100_80", "--hardware gpu_a100_80 --data-dir"]),
        (devices.A100, ["8 x 2048 tokens x 8 accumulated", "bf16 "]),
        (devices.CPU, ["none: no NVIDIA driver", "Plain CPU", "--hardware cpu --data-dir"]),
    ],
)
@pytest.mark.usefixtures("predicted")
def test_the_machine_is_printed_with_a_command_to_run(machine, capsys, device, words):
    machine(device, driver=13 if device.kind == "cuda" else None)
    print_hardware_info()
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)


@pytest.mark.usefixtures("predicted")
def test_what_is_recommended_is_predicted_to_fit(machine, monkeypatch, capsys):
    """A 3090's batch on one with less memory than its preset was made for: recomputed, then smaller."""
    machine(devices.RTX_3090)
    whole = get_recommended_config()
    assert 0 < whole["memory_gib_estimate"] < 0.9 * 23.6 and whole["gradient_checkpointing"] is False
    machine(devices.gpu("NVIDIA GeForce RTX 3090", 20.0, (8, 6)))
    assert get_recommended_config()["gradient_checkpointing"] == "selective"
    monkeypatch.setitem(TAKES, "selective", 8)
    monkeypatch.setitem(TAKES, True, 8)
    half = get_recommended_config()
    assert half["preset"] == whole["preset"] and half["batch_size"] < whole["batch_size"]
    blocks = [config["batch_size"] * config["gradient_accumulation_steps"] for config in (whole, half)]
    assert blocks[0] == blocks[1] and half["memory_gib_estimate"] < 0.9 * 20
    assert main.main(["hardware"]) == 0
    assert "--hardware gpu_3090 --batch-size 2 --data-dir" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setitem(TAKES, True, 30)
    assert get_recommended_config()["batch_size"] == 1


@pytest.mark.slow
def test_the_command_says_what_it_was_asked_and_nothing_else():
    line = [sys.executable, "-m", "granite_scu", "hardware"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*line, "--json"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["recommended"]["preset"] == "cpu"
    gpu = subprocess.run([*line, "--gpu"], capture_output=True, text=True, env=environment)
    assert gpu.returncode == 1 and gpu.stdout.startswith("no GPU: ") and gpu.stdout.count("\n") == 1
