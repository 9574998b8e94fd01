"""The legs of ``scripts/gpu_check.py``, in their order."""

import json
import re
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import gpu_runs
from benchmarks.gpu_work import ROOT, SCRIPT, Finding, Skipped, Table, Work
from granite_scu.config.errors import RunFailed
from granite_scu.config.settings import BaseConfig

PRESET_STEPS = 5
ROOMY, TWICE_ROOMY = 36, 100
"""GiB of a card on which a step of 8 x 1024 tokens is measured too, and of one that has all variants at once."""
MARGIN = 0.1
"""Share of a device's memory that a prediction leaves free; one that is off by more may end a run."""


class Leg(NamedTuple):
    """A step of the check.

    Attributes:
        run: does it.
        minutes: what it takes on one card, guessed; it is not begun where less is left.
        about: what it shows.
    """

    run: Callable[[Work], Finding]
    minutes: float
    about: str


# ---- what is there ----


def facts(work: Work) -> Finding:
    """What the machine is, and what it has and lacks for a run of the default model."""
    line = (SCRIPT, "--check-requirements", "--json", "--accelerator", work.device)
    found = answer_of(work.python("requirements", *line).out, "--check-requirements")
    missing = [check["name"] for check in found["checks"] if check["needed"] and not check["ok"]]
    machine = [{"name": name.replace("_", " "), "value": value} for name, value in work.machine["info"].items()]
    tables = (
        Table("The machine", {"name": "fact", "value": "found"}, machine),
        Table(
            "Requirements of the default model",
            {"name": "what", "found": "found", "ok": "there", "meaning": "meaning"},
            found["checks"],
        ),
    )
    name = work.machine["info"]["gpu_name"] or "a CPU"
    state = "lacks " + ", ".join(missing) if missing else "can start"
    return Finding(f"{name}; a run of the default model {state}", tables)


def tests(work: Work) -> Finding:
    """The tests that need a GPU."""
    done = work.python("pytest", "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", ROOT / "tests")
    said = (done.out.strip() or done.last_words).splitlines()[-1].strip("= ")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", said)}
    if done.code not in (0, 5):
        failed = tuple(re.findall(r"^(?:FAILED|ERROR) (.*)$", done.out, re.MULTILINE))
        return Finding(said, faults=failed or (said,))
    if not counts.get("passed"):
        raise Skipped(f"none of the tests for a GPU can run here: {said}")
    return Finding(said)


# ---- what a step does ----


def syncs(work: Work) -> Finding:
    """No step between two ticks waits for the device."""
    if work.device != "cuda":
        raise Skipped("a CPU is not waited for")
    found = steps_of(work, "syncs")
    if found["waits"]:
        raise RunFailed(f"a step waits for the device: {found['waits']}")
    return Finding(f"none in {found['guarded']} micro-batches between ticks, in {found['precision']}")


def trace(work: Work) -> Finding:
    """Where the time of a step goes."""
    found = steps_of(work, "trace")
    columns = {"name": "kernel", "calls": "calls a step|.1f", "ms": "ms a step|.3f", "share": "share|.1%"}
    table = Table(f"The longest kernels of a step of {found['case']}", columns, found["kernels"])
    return Finding(f"{found['ms']:.1f} ms of kernels a step of {found['case']}, over {found['steps']} steps", (table,))


def steps_of(work: Work, what: str) -> dict[str, Any]:
    """What ``benchmarks/gpu_steps.py`` finds."""
    line = (ROOT / "benchmarks" / "gpu_steps.py", what, "--device", work.device, "--precision", work.precision)
    return json.loads(work.python(what, *line).require(what).out)


# ---- the default model ----


def preset(work: Work) -> Finding:
    """A few steps of the default model with the preset of this card, and the memory that was predicted."""
    if work.device != "cuda":
        raise Skipped("a preset is chosen for a card")
    model, remark = default_model(work)
    flags = ("--hardware", "auto", "--data-dir", "stdlib-docs", "--target-s", "0.02", "--accelerator", "cuda", *model)
    ends = [value for flag in ("--max-steps", "--eval-steps", "--save-steps") for value in (flag, PRESET_STEPS)]
    line = (SCRIPT, *flags, *ends, "--eval-iters", 2, "--output-dir", work.folder / "run", "--overwrite")
    plan = json.loads(work.python("plan", *line, "--dry-run", "--json").require("the dry run").out)
    work.python("run", *line).require("the run")
    shutil.rmtree(work.folder / "weights", ignore_errors=True)
    summary = json.loads((work.folder / "run" / "scu_metrics.json").read_text())
    predicted, measured = plan["memory_gib_estimate"], summary["peak_gpu_memory_gb"]
    row = {
        "preset": work.machine["info"]["preset"], "batch": plan["batch"], "precision": plan["precision"],
        "predicted_gb": predicted, "measured_gb": measured, "tokens_per_s": summary["tokens_per_s"],
        "mfu": summary["mfu"], "saved": summary["base_test_bpt"] - summary["adapter_test_bpt"],
    }  # fmt: skip
    columns = {
        "preset": "preset", "batch": "batch", "precision": "precision", "predicted_gb": "predicted GiB|.2f",
        "measured_gb": "measured GiB|.2f", "tokens_per_s": "tokens/s|,.0f", "mfu": "MFU|.1%", "saved": "saved|+.4f",
    }  # fmt: skip
    what = f"{BaseConfig().name}{remark}"
    said = f"{row['preset']} trained {PRESET_STEPS} steps of {what} at {summary['tokens_per_s']:,.0f} tokens/s"
    faults = memory_faults([{"case": plan["batch"], **row}])
    return Finding(said, (Table(f"{what}, the preset of this card", columns, [row]),), faults)


def default_model(work: Work) -> tuple[tuple[Any, ...], str]:
    """The flags that name the default model, and a remark on it.

    Where the hub does not answer and nothing is cached, random weights of its sizes take as long and as much memory.
    """
    name = BaseConfig().name
    code = f"from huggingface_hub import hf_hub_download; print(hf_hub_download({name!r}, 'config.json'))"
    if not work.python("hub", "-c", code).code:
        return (), ""
    folder = work.folder / "weights"
    make = f"from benchmarks.training import save_random; save_random('whole', {str(folder)!r}, {work.device!r})"
    work.python("weights", "-c", make).require("making random weights")
    return ("--model", folder), "'s sizes, random weights"


# ---- benchmarks ----


def memory(work: Work) -> Finding:
    """The memory that training takes, predicted and measured; on a GPU with the batches of all presets that fit it."""
    from benchmarks.memory import COLUMNS

    rows = benchmark(work, "memory", "--presets")
    if not rows:
        raise Skipped("no preset's micro-batch is predicted to fit this card without recomputing")
    faults = (*not_measured(rows, "measured_gb"), *memory_faults(rows))
    known = [row["ratio"] for row in rows if row["ratio"]]
    said = f"predicted over measured is {min(known):.2f} to {max(known):.2f}" if known else "nothing was measured"
    return Finding(f"{len(rows)} cases; {said}", (Table("Memory of training", COLUMNS, rows),), faults)


def memory_faults(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """The cases that take more than was predicted and the margin that is left for it."""
    return tuple(
        f"{row['case']}: {row['measured_gb']:.2f} GiB measured, {row['predicted_gb']:.2f} predicted"
        for row in rows
        if row["measured_gb"] and row["measured_gb"] * (1 - MARGIN) > row["predicted_gb"]
    )


def scan(work: Work) -> Finding:
    """The scan, forward and backward, against transformers' and compiled ones."""
    from benchmarks.scan import COLUMNS

    rows = benchmark(work, "scan", "--lengths", 1024, 4096)
    return compared(rows, "the scan", COLUMNS)


def step(work: Work) -> Finding:
    """An optimizer step in variants of ours, and of Hugging Face's Trainer with PEFT."""
    from benchmarks.train_step import COLUMNS

    memory = work.machine["info"]["gpu_memory_gb"]
    together = ["--together"] * (memory > TWICE_ROOMY)
    whole = ("--model", "whole", "--length", 1024, "--repeats", 3, *together)
    rows = benchmark(work, "train_step", *whole, "--batch", 2, "--variants", "eager", "recomputed", "four_bits")
    if memory > ROOMY:
        rows += benchmark(work, "train_step", *whole, "--batch", 8, "--alone", "--variants", "eager", "recomputed")
    return compared(rows, "a step", COLUMNS)


def controller(work: Work) -> Finding:
    """What SCU costs."""
    from benchmarks.controller_overhead import COLUMNS

    rows = benchmark(work, "controller_overhead", "--model", "embedded", "whole", "--repeats", 5)
    known = [row for row in rows if row["overhead"] is not None]
    said = ", ".join(f"{row['case']} {row['overhead']:+.1%}" for row in known) or "nothing was measured"
    return Finding(f"SCU adds: {said}", (Table("What SCU costs", COLUMNS, rows),), not_measured(rows, "ours_s"))


def benchmark(work: Work, name: str, *flags: Any) -> list[dict[str, Any]]:
    """The cases of a benchmark; ``flags`` are those for a GPU, on a CPU it does its quick cases."""
    line = (ROOT / "benchmarks" / f"{name}.py", "--device", work.device, "--json")
    done = work.python(name, *line, *(flags if work.device == "cuda" else ("--quick",)))
    return json.loads(done.require(f"benchmarks/{name}.py").out)


def compared(rows: list[dict[str, Any]], what: str, columns: dict[str, str]) -> Finding:
    """The finding of a benchmark that sets our side against another."""
    known = [row for row in rows if row["speedup"]]
    said = ", ".join(f"{row['case']} {row['speedup']:.2f}" for row in known) or "the other side was not measured"
    table = Table(f"Benchmark: {what}", columns, rows)
    return Finding(f"their time over ours: {said}", (table,), not_measured(rows, "ours_s"))


def not_measured(rows: list[dict[str, Any]], field: str) -> tuple[str, ...]:
    """The cases of which our own side was not measured. That the other one was not is no fault of ours."""
    return tuple(f"{row['case']}: {row['reason']}" for row in rows if row[field] is None)


def answer_of(out: str, name: str) -> dict[str, Any]:
    """The JSON that a command printed, whatever its exit code."""
    try:
        return json.loads(out)
    except json.JSONDecodeError as error:
        raise RunFailed(f"{name} printed no JSON: {error}") from error


LEGS = {
    "facts": Leg(facts, 0.5, "the card, its driver, versions, requirements"),
    "tests": Leg(tests, 1, "the tests that need a GPU"),
    "parity": Leg(gpu_runs.parity, 7, "runs in every precision against fp32 on the CPU"),
    "determinism": Leg(gpu_runs.determinism, 1, "two --deterministic runs leave the same bytes"),
    "resume": Leg(gpu_runs.resume, 1, "a resumed run ends with the bytes of a whole one"),
    "syncs": Leg(syncs, 1, "no step between ticks waits for the device"),
    "preset": Leg(preset, 3, "the preset of this card trains the default model"),
    "memory": Leg(memory, 4.5, "memory predicted and measured; on a GPU of all presets that fit, uncompiled"),
    "scan": Leg(scan, 2, "the scan against other scans"),
    "step": Leg(step, 4, "a step against Hugging Face's Trainer with PEFT"),
    "controller": Leg(controller, 3, "what SCU costs"),
    "trace": Leg(trace, 1, "the longest kernels of a step"),
    "two-cards": Leg(gpu_runs.two_cards, 1, "two processes end where one ends"),
}
