#!/usr/bin/env python3
"""Run the quick tests as older processors would compute them, and print a table in Markdown.

    python tools/instruction_sets.py                                  all quick tests, eight times
    python tools/instruction_sets.py --only SSE4 AVX2 -- tests/model  some of both; after --, what pytest takes

The libraries below PyTorch choose their instructions by the processor, and sum in another order with others. Variables
of theirs limit the choice. Each setting runs with one and with two threads a process, on all cores. The exit code is 1
where a test fails.
"""

import argparse
import importlib
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""What PyTorch's own loops, its convolutions and bf16 products, and its other products obey."""
SETTINGS = {
    "own": {},
    "SSE4": dict(zip(LIMITS, ("default", "SSE41", "SSE4_2"), strict=True)),
    "AVX2": dict(zip(LIMITS, ("avx2", "AVX2", "AVX2"), strict=True)),
    "AVX512": dict(zip(LIMITS[1:], ("AVX512_CORE", "AVX512"), strict=True)),
}


def pytest_configure() -> None:
    """As a plugin of the tests it runs: a limited processor has no bf16 either, which PyTorch asks the real one."""
    if LIMITS[1] in os.environ:
        torch = importlib.import_module("torch")  # of the tests; the script itself answers at once
        known = getattr(torch.cpu, "get_capabilities", dict)()
        torch.cpu.get_capabilities = lambda: known | {"avx512_bf16": False, "amx_bf16": False}


def processor() -> str:
    """Its name, as Linux and else Python has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def run(setting: str, threads: int, tests: list[str]) -> tuple[str, bool]:
    """The table's row of one run of the tests, and whether all passed."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    limited = {name: value for name, value in os.environ.items() if name not in LIMITS} | SETTINGS[setting]
    # Threads that wait sleep: beside any other load, those of two that share a core would else spin away its time.
    environment = limited | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "PYTHONPATH": path}
    processes = max(1, (os.cpu_count() or 1) // threads)
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder, "tests.xml")
        line = [sys.executable, "-m", "pytest", "-q", "-p", "instruction_sets", "-p", "no:cacheprovider"]
        line += ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not slow"]
        line += [f"--junitxml={xml}", *tests]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = subprocess.run(line, cwd=ROOT, env=environment, stdout=sys.stderr).returncode
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        suite = ElementTree.parse(xml).getroot()[0] if xml.exists() else ElementTree.Element("testsuite")
    cases = suite.findall("testcase")
    failed = [case.attrib for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = ", ".join(f"`{case['classname']}::{case['name']}`" for case in failed) or ("" if code == 0 else "no result")
    minutes = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 60
    counts = f"{len(cases) - len(failed) - skipped} | {len(failed)}"
    return f"| {setting} | {threads} | {counts} | {minutes:.1f} | {names} |", code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="settings; default all")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="of a process; default 1 and 2")
    parser.add_argument("tests", nargs="*", help="files and flags for pytest; default all that are not slow")
    args = parser.parse_args()
    began = time.monotonic()
    print(f"{processor()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}\n")
    print(
        "| instructions | threads | passed | failed | CPU minutes | failures |\n|---|---|---|---|---|---|", flush=True
    )
    fine = True
    for setting in args.only:
        for threads in args.threads:
            row, passed = run(setting, threads, args.tests)
            print(row, flush=True)
            fine &= passed
    print(f"\n{(time.monotonic() - began) / 60:.0f} minutes in all.")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
