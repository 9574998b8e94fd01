#!/usr/bin/env python3
"""The same chats trained by granite-scu and by TRL's SFTTrainer: what each learned, lost and took.

    python benchmarks/beside_trl.py --model FOLDER                               thirty facts of an observatory
    python benchmarks/beside_trl.py --model FOLDER --chats C.jsonl --questions Q.jsonl      chats of your own
    python benchmarks/beside_trl.py --model FOLDER --ours "" --ours "--lora-r 32" --seeds 1 2    granite-scu alone

Four runs, one after the other, each a process of its own: granite-scu at its defaults; TRL at its defaults but for the
rate, which is for full fine-tuning (2e-4 is what its LoRA examples have); both in fp32 at the settings that granite-scu
chose, without a controller.
``trl_script.py`` is the script of 30 lines that a user of TRL writes. All adapters are then scored by
``granite-scu eval`` on the questions, which none has seen, and on general questions.

``seconds`` is the training alone as each side reports it, ``cpu_s`` the processor time of its whole command without
scoring, ``memory_gib`` the most that the command had resident. One seed says little: ``--seeds`` takes several.
``--ours`` compares settings of granite-scu with each other instead; ``--json`` has each answer too.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measure

COLUMNS = {
    "arm": "run", "right": "answers right|.0f", "questions": "of|.0f",
    "bits": "bits a token|.3f", "became_wrong": "general answers lost|.0f", "general": "of|.0f",
    "general_bits": "general bits|+.3f", "seconds": "training s|.0f", "cpu_s": "processor s|.0f",
    "memory_gib": "memory GiB|.2f",
}  # fmt: skip
ARMS = ("ours, defaults", "TRL, defaults", "TRL, our settings", "ours, fp32 without controller")
CHATS = ROOT / "benchmarks" / "chats"
TRL_DEFAULTS = {"learning_rate": 2e-4}
CHATS_IN_A_STEP = 8
"""Of granite-scu where a run is short."""
NO_SCORES = ("--samples", "0", "--held-out-share", "0")
"""Neither side holds anything out, or asks questions at the end: both are scored afterwards."""


class Took(NamedTuple):
    """What a command printed, its processor time in seconds, and the most memory it had, in GiB."""

    output: str
    cpu_s: float
    memory_gib: float


def carried_out(line: list[str]) -> Took:
    """Run a command. Raises RuntimeError with what it printed where it fails."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        printed = output.read()
    if child.returncode:
        raise RuntimeError(f"{' '.join(line)}\n{printed}")
    return Took(printed, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20)


def ours(options: argparse.Namespace, folder: Path, seed: int, flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train with granite-scu into a folder."""
    line = [sys.executable, "-m", "granite_scu", "train", "--model", options.model, "--data-dir", options.chats]
    line += ["--accelerator", options.device, "--output-dir", str(folder), "--seed", str(seed), *NO_SCORES, *flags]
    took = carried_out(line)
    summary = json.loads((folder / "scu_metrics.json").read_text(encoding="utf-8"))
    return {"seconds": summary["train_time_s"], "cpu_s": took.cpu_s, "memory_gib": took.memory_gib}


def theirs(options: argparse.Namespace, folder: Path, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with TRL into a folder."""
    script = str(ROOT / "benchmarks" / "trl_script.py")
    given = json.dumps(settings | {"seed": seed})
    took = carried_out([sys.executable, script, options.model, options.chats, str(folder), given])
    found = re.search(r"'train_runtime': '?([\d.]+)", took.output)
    assert found, took.output
    return {"seconds": float(found[1]), "cpu_s": took.cpu_s, "memory_gib": took.memory_gib}


def chosen(folder: Path) -> dict[str, Any]:
    """The settings that a run of granite-scu chose, as SFTConfig has them: chats in a step for blocks of chats."""
    settings = json.loads((folder / "training_config.json").read_text(encoding="utf-8"))
    summary = json.loads((folder / "scu_metrics.json").read_text(encoding="utf-8"))
    return {
        "learning_rate": settings["optimizer"]["learning_rate"],
        "lr_scheduler_type": settings["optimizer"]["schedule"],
        "warmup_steps": settings["optimizer"]["warmup_steps"],
        "max_steps": summary["steps"],
        "per_device_train_batch_size": CHATS_IN_A_STEP,
    }


def scored(options: argparse.Namespace, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What ``granite-scu eval`` finds of each adapter: answers, bits, and what changed elsewhere."""
    line = [sys.executable, "-m", "granite_scu", "eval", *map(str, folders.values()), "--json", "--model"]
    line += [options.model, "--data-dir", options.questions, "--accelerator", options.device, "--samples", "30"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout)
    records = found["answers"]["records"]
    rows: dict[str, dict[str, Any]] = {}
    for arm, model in zip(("base", *folders), found["models"], strict=True):
        general, said = found["elsewhere"][model["name"]], found["answers"]["models"][model["name"]]
        rows[arm] = {
            "right": said["right"],
            "questions": found["answers"]["n"],
            "bits": model["bits_per_token"],
            "general_right": general["right_after"],
            "became_wrong": general["became_wrong"],
            "general": general["n"],
            "general_bits": general["bits_after"] - general["bits_before"],
            "answers": [[record["question"], record["expected"], record[model["name"]]] for record in records],
        }
    return rows


def compare(options: argparse.Namespace, seed: int, where: Path) -> list[dict[str, Any]]:
    """A row for the base and each of the four runs of a seed."""
    folders = {arm: where / arm.replace(" ", "-").replace(",", "") for arm in ARMS}
    took = {ARMS[0]: ours(options, folders[ARMS[0]], seed)}
    equal = chosen(folders[ARMS[0]])
    took[ARMS[1]] = theirs(options, folders[ARMS[1]], seed, TRL_DEFAULTS)
    took[ARMS[2]] = theirs(options, folders[ARMS[2]], seed, equal)
    took[ARMS[3]] = ours(options, folders[ARMS[3]], seed, ("--controller", "none", "--precision", "fp32"))
    settings = {ARMS[1]: TRL_DEFAULTS, ARMS[2]: equal, ARMS[3]: equal, ARMS[0]: equal}
    rows = scored(options, folders)
    return [{"arm": arm, "seed": seed, **row, **took.get(arm, {}), "settings": settings.get(arm)}
            for arm, row in rows.items()]  # fmt: skip


def compare_ours(options: argparse.Namespace, seed: int, where: Path) -> list[dict[str, Any]]:
    """A row for the base, and one for each of granite-scu's settings that are compared with each other."""
    arms = {flags or "defaults": tuple(flags.split()) for flags in options.ours}
    folders = {arm: where / f"ours-{number}" for number, arm in enumerate(arms)}
    took = {arm: ours(options, folders[arm], seed, flags) for arm, flags in arms.items()}
    return [{"arm": arm, "seed": seed, **row, **took.get(arm, {})} for arm, row in scored(options, folders).items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="base model: folder or hub id")
    parser.add_argument("--chats", default=CHATS / "observatory.jsonl", help="trained on: jsonl with messages")
    parser.add_argument("--questions", default=CHATS / "observatory_questions.jsonl", help="whose answers are asked")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--ours", action="append", metavar="FLAGS", help="only granite-scu, with these flags of train "
                        "(\"\" for the defaults); again for others")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON list of all rows")
    options = parser.parse_args()
    options.chats, options.questions = (str(Path(given).resolve()) for given in (options.chats, options.questions))
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as where:
            rows += (compare_ours if options.ours else compare)(options, seed, Path(where))
    measure.present(rows if options.json else medians(rows), COLUMNS, "granite-scu beside TRL", options.json)
    return 0


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each arm, of the medians over the seeds.

    >>> medians([{"arm": "base", "bits": bits, "settings": None} for bits in (1.0, 4.0, 2.0)])
    [{'arm': 'base', 'bits': 2.0}]
    """
    arms = {row["arm"]: [other for other in rows if other["arm"] == row["arm"]] for row in rows}
    return [
        {"arm": arm, **{name: statistics.median(row[name] for row in each)
                        for name, value in each[0].items() if name in COLUMNS and name != "arm" and value is not None}}
        for arm, each in arms.items()
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
