"""The legs of ``scripts/gpu_check.py`` that compare short runs of the embedded model with one another."""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, NamedTuple

from benchmarks.gpu_work import Finding, OutOfTime, Skipped, Table, Work
from granite_scu.config.errors import RunFailed
from granite_scu.model.mamba2.kernels import AMPERE, INSTALLS, installed
from granite_scu.model.mamba2.mamba import TORCH

EAGER = ("--torch-compile", "off", "--kernels", "torch")
COMPILED, RECOMPUTED = ("--torch-compile", "on"), ("--gradient-checkpointing", "on")
ANY_KERNELS, HUBS_KERNELS = ("--kernels", "auto"), ("--kernels", "hub")
NOT_RUN = "not run"
REFERENCE = ("--precision", "fp32", *EAGER)

SAME = {
    "plain": (),
    "accumulated": ("--gradient-accumulation-steps", "3"),
    "4bit": ("--4bit-quantization",),
}
"""What is trained: runs of one kind must end alike, however they compute."""

TOLERANCES = {"fp32": 2e-4, "tf32": 5e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Bits per token by which the held-out score of a run may differ from that in fp32 on the CPU. Of 8 bits of mantissa
in bf16, 11 in fp16 and TF32, 24 in fp32, some is lost to other orders of summation, and steps carry it on."""

COLUMNS = {
    "run": "run", "verdict": "verdict", "difference": "off by, bits/token|+.1e", "tolerance": "allowed|.0e",
    "adapter_test_bpt": "adapter, bits/token|.4f", "gain": "saved|+.4f", "tokens_per_s": "tokens/s|,.0f",
    "peak_gpu_memory_gb": "peak GiB|.2f", "skipped_steps": "skipped steps|d", "kernels": "Mamba-2 layers in",
    "reason": "remark",
}  # fmt: skip


class Variant(NamedTuple):
    """A way to compute a run.

    Attributes:
        precision: key of ``TOLERANCES``.
        flags: how it computes.
        same: key of ``SAME``.
    """

    precision: str
    flags: tuple[str, ...]
    same: str = "plain"


def variants(half: str) -> dict[str, Variant]:
    """By name, the most wanted first; ``half`` is the 16-bit precision of the device, or fp32 where it has none."""
    half_in = ("--precision", half)
    return {
        "as it comes": Variant(half, ()),
        "compiled": Variant(half, (*half_in, *COMPILED)),
        "kernels auto": Variant(half, (*half_in, "--torch-compile", "off", *ANY_KERNELS)),
        "compiled, recomputed": Variant(half, (*half_in, *COMPILED, *RECOMPUTED)),
        "accumulated by 3": Variant(half, half_in, "accumulated"),
        "bf16": Variant("bf16", ("--precision", "bf16", *EAGER)),
        "fp32": Variant("fp32", ("--precision", "fp32", "--no-tf32", *EAGER)),
        "fp32 in TF32": Variant("tf32", ("--precision", "fp32", "--tf32", *EAGER)),
        "4 bits, compiled, recomputed": Variant(half, (*half_in, *COMPILED, *RECOMPUTED), "4bit"),
        "4 bits": Variant(half, (*half_in, *EAGER), "4bit"),
        "recomputed": Variant(half, (*half_in, *EAGER, *RECOMPUTED)),
        "fp16": Variant("fp16", ("--precision", "fp16", *EAGER)),
        "kernels hub": Variant(half, (*half_in, "--torch-compile", "off", *HUBS_KERNELS)),
    }


def lacking(variant: Variant, work: Work) -> str | None:
    """Why a run cannot be made that way here; None where it can."""
    precision, on_gpu, info = variant.precision, work.device == "cuda", work.machine["info"]
    if precision == "tf32" and not info["supports_tf32"]:
        return "the device has no TF32"
    if precision == "fp16" and not on_gpu:
        return "fp16 is for GPUs"
    if precision == "bf16" and not (info["supports_bfloat16"] if on_gpu else work.precision == "bf16"):
        return "the device has no bf16 products"
    if variant.same == "4bit" and find_spec("bitsandbytes") is None:
        return "the package bitsandbytes is not installed"
    if variant.flags[-2:] == HUBS_KERNELS:
        return _lacking_for_the_hubs(work)
    return None


def _lacking_for_the_hubs(work: Work) -> str | None:
    """Why the kernels of the hub cannot be tried here; None where they can."""
    if work.device != "cuda":
        return "they are for GPUs"
    if not installed("hub"):
        return f"the package kernels is not installed; {INSTALLS['hub']}"
    capability = work.machine["info"]["compute_capability"]
    too_old = tuple(map(int, capability.split("."))) < AMPERE
    return "they are for Ampere and newer" if too_old else None


def parity(work: Work) -> Finding:
    """Every way to compute a run ends where fp32 on the CPU ends, within the tolerance of its precision."""
    wanted = variants(work.precision)
    reasons = {name: lacking(variant, work) for name, variant in wanted.items()}
    kinds = list(dict.fromkeys(variant.same for name, variant in wanted.items() if not reasons[name]))

    def reference(kind: str) -> dict[str, Any]:
        return work.train(f"reference-{kind}", *REFERENCE, *SAME[kind], device="cpu")

    def row(name: str) -> dict[str, Any]:
        if reasons[name]:
            return {"run": name, "verdict": "skipped", "reason": reasons[name]}
        return compared(name, wanted[name], references[wanted[name].same], work)

    def so_far() -> Finding:
        known = [
            {"run": f"fp32 on the CPU, {name}", "verdict": "reference", **scores(found)}
            for name, found in references.items()
        ]
        faults = [f"{row['run']}: {row['reason']}" for row in rows if row["verdict"] == "failed"]
        ended = {row["run"] for row in rows if row["verdict"] != NOT_RUN}
        left = tuple(f"{name}: not run" for name in wanted if name not in ended)
        table = Table(f"Against fp32 on the CPU, {work.steps} steps of the embedded model", COLUMNS, [*known, *rows])
        return Finding(verdict_of(rows), (table,), tuple(faults), left)

    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(work.jobs) as pool:
        references = dict(zip(kinds, pool.map(reference, kinds), strict=True))
        for found in pool.map(row, wanted):
            rows.append(found)
            work.tell(so_far())
    return so_far()


def compared(name: str, variant: Variant, reference: dict, work: Work) -> dict[str, Any]:
    """The row of a run."""
    folder = name.replace(", ", "-").replace(" ", "-")
    try:
        found = work.train(folder, *SAME[variant.same], *variant.flags)
    except OutOfTime as reason:
        return {"run": name, "verdict": NOT_RUN, "reason": str(reason)}
    except RunFailed as error:
        return {"run": name, "verdict": "failed", "reason": str(error)}
    kernels = work.kernels(folder)
    if variant.flags[-2:] == ANY_KERNELS and kernels == TORCH.name:
        return {"run": name, "verdict": "skipped", "reason": "no compiled kernels are installed that prove right here"}
    tolerance, score = TOLERANCES[variant.precision], scores(found)
    difference = found["adapter_test_bpt"] - reference["adapter_test_bpt"]
    row = {"run": name, "verdict": "passed", "difference": difference, "tolerance": tolerance, **score}
    row["kernels"] = kernels
    if not abs(difference) <= tolerance:  # nor NaN
        work.forget(folder)
        return row | {"verdict": "failed", "reason": f"{difference:+.1e} bits/token, {tolerance:.0e} are allowed"}
    if abs(scores(reference)["gain"]) < tolerance:  # then one that learned nothing would pass too
        row["reason"] = "too few steps: the reference has saved less than is allowed"
    return row


def scores(summary: dict[str, Any]) -> dict[str, Any]:
    """The fields of a summary that a row shows."""
    kept = {name: summary[name] for name in ("adapter_test_bpt", "tokens_per_s", "peak_gpu_memory_gb", "skipped_steps")}
    return kept | {"gain": summary["base_test_bpt"] - summary["adapter_test_bpt"]}


def verdict_of(rows: list[dict[str, Any]]) -> str:
    """How many runs were compared, and the one that came nearest to its tolerance."""
    ran = [row for row in rows if "difference" in row]
    if not ran:
        return "no run could be compared"
    worst = max(ran, key=lambda row: abs(row["difference"]) / row["tolerance"])
    share = abs(worst["difference"]) / worst["tolerance"]
    skipped = sum(row["verdict"] == "skipped" for row in rows)
    left_out = f", {skipped} skipped" if skipped else ""
    return f"{len(ran)} runs{left_out}; the furthest off is {worst['run']}, at {share:.0%} of what is allowed"


def determinism(work: Work) -> Finding:
    """Two runs with --deterministic leave the same bytes."""
    names = ("first", "second")
    found = [work.train(name, "--deterministic") for name in names]
    return same_bytes(work, names, found, f"two runs of {work.steps} steps in {work.precision} with --deterministic")


def resume(work: Work) -> Finding:
    """A run that goes on from its middle ends with the bytes of one that was not interrupted."""
    half = work.steps // 2
    whole = work.train("whole", "--deterministic", "--save-steps", half, "--eval-steps", half)
    middle = work.folder / "whole" / f"checkpoint-{half}"
    flags = ("--deterministic", "--save-steps", half, "--eval-steps", half, "--resume-from-checkpoint", middle)
    resumed = work.train("resumed", *flags)
    said = f"{work.steps} steps at once, and {half} and the rest in another process"
    return same_bytes(work, ("whole", "resumed"), [whole, resumed], said)


def same_bytes(work: Work, names: tuple[str, str], found: list[dict], said: str) -> Finding:
    """Whether two runs left the same adapter and numbers."""
    same = work.adapter(names[0]) == work.adapter(names[1])
    fields = ("adapter_test_bpt", "s", "lambda")
    rows = [{"run": name} | {key: summary[key] for key in fields} for name, summary in zip(names, found, strict=True)]
    columns = {"run": "run", "adapter_test_bpt": "adapter, bits/token|.9f", "s": "S|.9e", "lambda": "lambda|.9e"}
    differing = [key for key in fields if found[0][key] != found[1][key]] + ([] if same else ["the adapter's bytes"])
    if differing:
        for name in names:
            work.forget(name)
    faults = (f"{said} differ in {', '.join(differing)}",) if differing else ()
    end = "end with different numbers" if differing else "end with the same bytes"
    return Finding(f"{said} {end}", (Table("Runs that must be the same", columns, rows),), faults)


def two_cards(work: Work) -> Finding:
    """Two processes on half of the batch each end where one with the whole batch ends."""
    if work.device == "cuda" and work.machine["info"]["gpu_count"] < 2:
        raise Skipped("there is one card")
    flags = (*REFERENCE, "--no-tf32")
    one = work.train("one", *flags, "--batch-size", 8)
    two = work.train("two", *flags, "--batch-size", 4, processes=2)
    difference, tolerance = two["adapter_test_bpt"] - one["adapter_test_bpt"], TOLERANCES["fp32"]
    rows = [
        {"run": name, "s": summary["s"], **scores(summary)} for name, summary in (("one process", one), ("two", two))
    ]
    columns = {
        "run": "run", "adapter_test_bpt": "adapter, bits/token|.6f", "s": "S|.6e", "tokens_per_s": "tokens/s|,.0f"
    }  # fmt: skip
    said = f"two processes end {difference:+.1e} bits/token from one on the same batch; {tolerance:.0e} are allowed"
    faults = () if abs(difference) <= tolerance else (said,)
    return Finding(said, (Table("One process and two, fp32", columns, rows),), faults)
