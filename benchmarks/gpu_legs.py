"""The legs of ``scripts/gpu_check.py``, in their order."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import gpu_runs
from benchmarks.cells import lines_of
from benchmarks.gpu_work import ROOT, SCRIPT, Finding, OutOfTime, Skipped, Table, Work, cores
from benchmarks.train_step import COLUMNS as STEP
from benchmarks.train_step import SIDES
from granite_scu.config.errors import RunFailed
from granite_scu.config.settings import BaseConfig
from granite_scu.model.mamba2.kernels import INSTALLS, installed
from granite_scu.storage.atomic import replacing

SMALL = {"whole": "embedded", "dense": ROOT / "research" / "evidence" / "bases" / "tiny-prose-dense"}
"""What a CPU trains in the place of a model of random weights."""
PRESET_STEPS = 5
LOOK = 5
"""Seconds between two looks at runs that go on."""
TASKS_OF_C = 10
"""Of the protocol's runs on a GPU, which a process each may take."""
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
    line = [ROOT / "benchmarks" / "gpu_steps.py", what, "--device", work.device, "--precision", work.precision]
    if what == "trace" and work.device == "cuda":
        line += ["--model", weights(work, "whole"), "--batch", 8]
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
    return ("--model", weights(work, "whole")), "'s sizes, random weights"


def weights(work: Work, model: str) -> Path:
    """The folder of random weights of a model's sizes, which legs share."""
    folder = work.folder.parent / "weights" / model
    if not folder.exists():
        making = folder.with_suffix(".part")
        make = f"from benchmarks.training import save_random; save_random({model!r}, {str(making)!r}, {work.device!r})"
        work.python("weights", "-c", make).require("making random weights")
        making.rename(folder)
    return folder


# ---- benchmarks ----


def step(work: Work) -> Finding:
    """The default step in our own kernels, and that of Hugging Face's Trainer with PEFT, which may not fit the card."""
    rows = steps(work, "whole", "--sides", "ours", "theirs", "--ours=--kernels torch")
    if work.device == "cuda" and rows[0]["theirs_s"] is None:
        work.tell(compared(rows, "a step", STEP))
        rows += steps(work, "whole", "--sides", "theirs", batch=2)
    return compared(rows, "a step", STEP)


def with_packages(work: Work) -> Finding:
    """The default step in the packages' kernels."""
    if work.device != "cuda":
        raise Skipped("the packages' kernels are for GPUs")
    if not installed():
        raise Skipped(f"no package with kernels is installed; {INSTALLS['cuda']}")
    return compared(steps(work, "whole", "--sides", "ours", "--ours=--kernels cuda"), "a step", STEP)


def trl(work: Work) -> Finding:
    """The same step of TRL's SFTTrainer at its defaults."""
    if find_spec("trl") is None:
        raise Skipped("the package trl is not installed")
    return compared(steps(work, "whole", "--sides", "trl"), "a step", STEP)


def dense(work: Work) -> Finding:
    """A step of a dense model, by all three."""
    sides = [*SIDES[:2], *["trl"] * (find_spec("trl") is not None)]
    return compared(steps(work, "dense", "--sides", *sides), "a step of a dense model", STEP)


def steps(work: Work, model: str, *flags: Any, batch: int = 8) -> list[dict[str, Any]]:
    """What ``benchmarks/train_step.py`` finds, one side after the other on a GPU."""
    if work.device != "cuda":
        small = ("--model", SMALL[model], "--batch", 2, "--length", 64, "--block", 1, "--repeats", 1)
        return benchmark(work, "train_step", quick=(*small, "--precisions", "fp32", *flags))
    sizes = ("--model", weights(work, model), "--batch", batch, "--length", 1024)
    return benchmark(work, "train_step", *sizes, "--repeats", 3, "--block", 5, "--apart", *flags)


def variants(work: Work) -> Finding:
    """The default step operator by operator, recomputed, and in 4 bits."""
    ways = ("--variants", "eager", "recomputed", *["four_bits"] * (find_spec("bitsandbytes") is not None))
    return compared(steps(work, "whole", "--sides", "ours", *ways, batch=2), "a step in other ways", STEP)


def memory(work: Work) -> Finding:
    """The memory that training takes, predicted and measured; on a GPU of 8 x 1024 tokens."""
    models = [] if work.device != "cuda" else [weights(work, model) for model in ("whole", "dense")]
    return memory_found(benchmark(work, "memory", "--model", *models))


def memory_of_presets(work: Work) -> Finding:
    """The same with the batches of all presets that fit the card, uncompiled."""
    if work.device != "cuda":
        raise Skipped("presets are for cards")
    return memory_found(benchmark(work, "memory", "--presets"))


def memory_found(rows: list[dict[str, Any]]) -> Finding:
    """The finding of ``benchmarks/memory.py``."""
    from benchmarks.memory import COLUMNS

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


def controller(work: Work) -> Finding:
    """What SCU costs."""
    from benchmarks.controller_overhead import COLUMNS

    rows = benchmark(work, "controller_overhead", "--model", "embedded", "whole", "--repeats", 5)
    known = [row for row in rows if row["overhead"] is not None]
    said = ", ".join(f"{row['case']} {row['overhead']:+.1%}" for row in known) or "nothing was measured"
    return Finding(f"SCU adds: {said}", (Table("What SCU costs", COLUMNS, rows),), not_measured(rows, "ours_s"))


def benchmark(work: Work, name: str, *flags: Any, quick: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
    """The cases of a benchmark; ``flags`` are those for a GPU, on a CPU it does its quick cases with ``quick``."""
    line = (ROOT / "benchmarks" / f"{name}.py", "--device", work.device, "--json")
    done = work.python(name, *line, *(flags if work.device == "cuda" else ("--quick", *quick)))
    rows = json.loads(done.require(f"benchmarks/{name}.py").out)
    if not rows:
        raise Skipped(f"no case of benchmarks/{name}.py is for this device, or predicted to fit it")
    return rows


def compared(rows: list[dict[str, Any]], what: str, columns: dict[str, str]) -> Finding:
    """The finding of a benchmark that sets our side against others."""
    said = [f"{row['case']}: {', '.join(words)}" for row in rows if (words := list(in_words(row)))]
    faults = not_measured([row for row in rows if "ours" in row.get("sides", ("ours",))], "ours_s")
    if not (said or faults or any(row["ours_s"] for row in rows)):
        raise Skipped("nothing was measured: " + "; ".join(str(row.get("trl_reason") or row["reason"]) for row in rows))
    return Finding("; ".join(said) or "ours alone was measured", (Table(f"Benchmark: {what}", columns, rows),), faults)


def in_words(row: dict[str, Any]) -> Iterator[str]:
    """What a row says: the rate of each side, and their time over ours."""
    for side in SIDES:
        if rate := row.get(f"{side}_tokens_per_s"):
            yield f"{side} {rate:,.0f} tokens/s" + (f" (MFU {mfu:.0%})" if (mfu := row.get(f"{side}_mfu")) else "")
    if row.get("speedup"):
        yield f"their time over ours {row['speedup']:.2f}"


def not_measured(rows: list[dict[str, Any]], field: str) -> tuple[str, ...]:
    """The cases of which our own side was not measured. That the other one was not is no fault of ours."""
    return tuple(f"{row['case']}: {row['reason']}" for row in rows if row[field] is None)


def answer_of(out: str, name: str) -> dict[str, Any]:
    """The JSON that a command printed, whatever its exit code."""
    try:
        return json.loads(out)
    except json.JSONDecodeError as error:
        raise RunFailed(f"{name} printed no JSON: {error}") from error


# ---- the real model ----


def evidence(work: Work) -> Finding:
    """Runs of the protocol on real models, as many as there is time for; on a CPU of small bases."""
    if find_spec("research.real") is None:
        raise Skipped("research/real is not in this checkout")
    kept, there = work.results / "evidence.jsonl", ROOT / "research" / "evidence" / "real"
    work = replace(work, end=min(work.end, work.deadline))  # of these runs there are more than any leg has time for
    work.folder.mkdir(parents=True, exist_ok=True)
    for kind in ("general-*.jsonl", "said-*.json"):  # what else the base would have to write
        for path in there.glob(kind):
            shutil.copy(path, work.folder)
    runs = work.folder / "runs.jsonl"
    # Those of such a device: the texts differ by the version of Python, and with them what can be compared.
    known = [each for each in lines_of(there / "runs.jsonl") if json.loads(each).get("device") == work.device]
    if not runs.exists():
        runs.write_text("".join([*known, *lines_of(kept)]), encoding="utf-8")
    line = ["-m", "research.real", "--device", work.device, "--results", runs, "--minutes", work.seconds_left / 60]
    if work.device == "cuda":
        line += ["--stage", "C", "--jobs", min(TASKS_OF_C, max(1, cores() - 2)), "--model", real_model(work)]

    def so_far() -> Finding:
        new = [each for each in lines_of(runs) if each not in known]
        with replacing(kept) as path:
            path.write_text("".join(new), encoding="utf-8")
        return Finding(f"{len(new)} runs, in {kept.name}", left=("there may be more",))

    def run() -> None:
        with suppress(OutOfTime):  # the runs that have ended are kept
            work.python("runs", *line).require("the runs")

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        while wait([running], timeout=LOOK).not_done:
            work.tell(so_far())
    found = so_far()
    running.result()
    return found


def chats(work: Work) -> Finding:
    """A real model trained on the same chats by ours and by TRL, and asked."""
    from benchmarks.beside_trl import COLUMNS

    if work.device != "cuda":
        raise Skipped("on a CPU it takes ten minutes: benchmarks/beside_trl.py")
    line = (ROOT / "benchmarks" / "beside_trl.py", "--model", real_model(work), "--device", work.device, "--json")
    rows = json.loads(work.python("beside_trl", *line).require("benchmarks/beside_trl.py").out)
    said = ", ".join(f"{row['arm']} {row['right']} of {row['questions']}" for row in rows)
    return Finding(f"answers right: {said}", (Table("Chats, ours beside TRL", COLUMNS, rows),))


def real_model(work: Work) -> Path:
    """The folder of the real model's weights in bf16, which are made of a GGUF file where that is what is there."""
    packed = next(work.real.glob("*.gguf"), None)
    if packed is None and not (work.real / "config.json").exists():
        raise Skipped(f"{work.real} has no model; scripts/fetch_smollm2.py makes it")
    folder = work.folder.parent / "weights" / "real"
    if packed is None or folder.exists():
        return folder if packed else work.real
    making = folder.with_suffix(".part")
    making.mkdir(parents=True, exist_ok=True)
    names = [str(packed), str(making), packed.name]
    code = "import sys; from pathlib import Path as P; from granite_scu.model.finding import write_whole; "
    code += "write_whole(P(sys.argv[1]), P(sys.argv[2]), sys.argv[3])"
    work.python("weights", "-c", code, *names).require("making the weights")
    making.rename(folder)
    return folder


LEGS = {
    "facts": Leg(facts, 0.5, "the card, its driver, versions, requirements"),
    "step": Leg(step, 2, "the default step in our kernels, and Hugging Face's Trainer with PEFT"),
    "packages": Leg(with_packages, 1.5, "the default step in the packages' kernels"),
    "trl": Leg(trl, 1, "the same step of TRL"),
    "dense": Leg(dense, 2, "a step of a dense model, by all three"),
    "memory": Leg(memory, 1.5, "memory predicted and measured"),
    "trace": Leg(trace, 0.5, "the longest kernels of a step"),
    "parity": Leg(gpu_runs.parity, 2, "runs in every precision against fp32 on the CPU"),
    "preset": Leg(preset, 1.5, "the preset of this card trains the default model"),
    "evidence": Leg(evidence, 1.5, "runs of the protocol on real models"),
    "tests": Leg(tests, 1, "the tests that need a GPU"),
    "determinism": Leg(gpu_runs.determinism, 1, "two --deterministic runs leave the same bytes"),
    "resume": Leg(gpu_runs.resume, 1, "a resumed run ends with the bytes of a whole one"),
    "syncs": Leg(syncs, 1, "no step between ticks waits for the device"),
    "chats": Leg(chats, 3, "a real model on the same chats by ours and TRL"),
    "presets": Leg(memory_of_presets, 2.5, "memory of all presets that fit, uncompiled"),
    "scan": Leg(scan, 1.5, "the scan against other scans"),
    "variants": Leg(variants, 1.5, "a step operator by operator, recomputed, in 4 bits"),
    "controller": Leg(controller, 2.5, "what SCU costs"),
    "two-cards": Leg(gpu_runs.two_cards, 1, "two processes end where one ends"),
}
