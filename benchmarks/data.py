#!/usr/bin/env python3
"""What preparing and loading text costs: against the tokenizers library alone, in memory, and against a training step.

    benchmarks/data.py --quick        10 MB of generated text
    benchmarks/data.py --json         10 MB, 100 MB and 1 GB; takes a gigabyte of disk, and several for the tokens
    benchmarks/data.py --chats        the same text as prompts and completions, packed by best fit

Tokenisation, on every core: the library's ``encode_batch_fast`` on documents that are in memory, and their ids, as it
hands them out; ``encode`` on the same documents, which also makes arrays of them, takes their fingerprints, and notes
each token's bytes and what is supervised; and ``prepare``, which reads the file as well, twice (once for its digest),
and writes the arrays. Memory: the most that a process of its own takes beyond what it has with the tokenizer loaded,
without pages of mapped files, which the system takes back when it needs them. Loader: a batch of the loader against an
optimizer step of the embedded model.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from rich.console import Console
from rich.table import Table

from granite_scu.cli import exit_codes
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.errors import UserError
from granite_scu.config.settings import TINY_MODEL, DataConfig, LoraConfig, OptimizerConfig, PriorConfig

MEGABYTE = 1_000_000
SIZES = (10, 100, 1000)
"""Megabytes of text that memory is measured at; tokenisation at all but the last, a batch at the first."""

BLOCK, BATCH = 128, 8
"""Of the loader's batch: those of --test-run."""


def texts(megabytes: float) -> Iterator[str]:
    """Documents of the embedded documentation, each told from all others by its number."""
    from granite_scu.data.sources.corpora import stdlib_docs

    topics = [document.text for document in stdlib_docs()]
    written = number = 0
    while written < megabytes * MEGABYTE:
        text = f"{number}\n{topics[number % len(topics)]}"[: 1000 + 997 * (number % 7)]
        yield text
        written += len(text.encode())
        number += 1


def write(path: Path, megabytes: float, chats: bool = False) -> None:
    """One document a line; as chats, the first half of each asks for the second."""
    with path.open("w", encoding="utf-8") as lines:
        for text in texts(megabytes):
            half = len(text) // 2
            record = {"prompt": text[:half], "completion": text[half:]} if chats else {"text": text}
            lines.write(json.dumps(record) + "\n")


def tokenisation(path: Path, megabytes: float, repeats: int) -> dict[str, Any]:
    """Seconds of all three, turn by turn, and the medians of their ratios."""
    from granite_scu.data.sources.documents import Document
    from granite_scu.data.tokens.corpus import prepare
    from granite_scu.data.tokens.encoding import GROUP, encode
    from granite_scu.model.loading import load_tokenizer

    tokenizer = load_tokenizer(TINY_MODEL)
    in_memory = list(texts(megabytes))
    documents = [Document(f"{path}:{number}", text) for number, text in enumerate(in_memory, start=1)]
    per_call = max(1, GROUP * len(in_memory) // sum(map(len, in_memory)))

    def theirs() -> None:
        for start in range(0, len(in_memory), per_call):
            some = in_memory[start : start + per_call]
            encodings = tokenizer.backend_tokenizer.encode_batch_fast(some, add_special_tokens=False)
            sum(len(encoding.ids) for encoding in encodings)

    def tokenised() -> None:
        encode(documents, tokenizer)

    def prepared() -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as cache:
            prepare(DataConfig(str(path), cache_dir=cache), tokenizer, show_progress=False)

    sides = (theirs, tokenised, prepared)
    for warm_up in sides:
        warm_up()
    turns = [tuple(seconds(side) for side in sides) for _ in range(repeats)]
    return {
        "megabytes": megabytes,
        "tokenizers_s": median(turn[0] for turn in turns),
        "encode_s": median(turn[1] for turn in turns),
        "prepare_s": median(turn[2] for turn in turns),
        "encode_ratio": median(turn[1] / turn[0] for turn in turns),
        "prepare_ratio": median(turn[2] / turn[0] for turn in turns),
    }


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def memory(path: Path, megabytes: float) -> dict[str, Any]:
    """The most memory that preparing a text takes, in a process of its own, and once more with the tokens kept."""
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        line = [sys.executable, __file__, "--peak-of", str(path), "--cache", cache]
        first, again = (
            json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout) for _ in "12"
        )
    return {"megabytes": megabytes, "prepare_mb": first, "kept_mb": again}


def peak_of(path: str, cache: str) -> float:
    """Megabytes of anonymous memory that ``prepare`` takes at most, sampled every few milliseconds."""
    from granite_scu.data.datamodule import TextDataModule
    from granite_scu.model.loading import load_tokenizer

    tokenizer = load_tokenizer(TINY_MODEL)
    tokenizer.backend_tokenizer.encode_batch_fast(["warm up"] * 100, add_special_tokens=False)
    start, peak, done = anonymous(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    data = TextDataModule(DataConfig(path, cache_dir=cache, block_size=BLOCK, batch_size=BATCH), seed=0)
    data.prepare(tokenizer)
    next(iter(data.train_dataloader()))
    done.set()
    watcher.join()
    return round(peak - start, 1)


def anonymous() -> float:
    """Megabytes of this process that are no pages of files; all resident ones where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.is_file():
        import psutil

        return psutil.Process().memory_info().rss / MEGABYTE
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024 / MEGABYTE


def loader(path: Path, repeats: int) -> dict[str, Any]:
    """Seconds of a batch and of a step, and their ratio."""
    import torch

    from granite_scu.config.settings import BaseConfig
    from granite_scu.data.datamodule import TextDataModule
    from granite_scu.model.loading import load_tokenizer
    from granite_scu.training.module import GraniteModule

    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        data = TextDataModule(DataConfig(str(path), cache_dir=cache, block_size=BLOCK, batch_size=BATCH), seed=0)
        data.prepare(load_tokenizer(TINY_MODEL))
        batches = iter(data.train_dataloader())
        list(islice(batches, 10))
        count = 20 * repeats
        batch_s = seconds(lambda: list(islice(batches, count))) / count
        module = GraniteModule(BaseConfig(TINY_MODEL), LoraConfig(), OptimizerConfig(), PriorConfig(0.02, 1000), 100)
        module.configure_model()
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], fused=True)

        def step() -> None:
            module(**next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step_s = median(seconds(step) for _ in range(5 * repeats))
    return {"batch": BATCH, "block_size": BLOCK, "batch_s": batch_s, "step_s": step_s, "share": batch_s / step_s}


def measure(quick: bool, chats: bool, repeats: int, console: Console) -> dict[str, Any]:
    """All three, each size's text written and deleted again. Of chats no tokenisation, which has no other side."""
    found: dict[str, Any] = {"tokenisation": [], "memory": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.jsonl"
        for size in SIZES[:1] if quick else SIZES:
            console.print(f"{size} MB of text", highlight=False)
            write(path, size, chats)
            if size == SIZES[0]:
                found["loader"] = loader(path, repeats)
            if size != SIZES[-1] and not chats:
                found["tokenisation"].append(tokenisation(path, size, repeats))
            found["memory"].append(memory(path, size))
    return found


def show(found: dict[str, Any], console: Console) -> None:
    load = found["loader"]
    table = Table("what", "measured", title="data", title_justify="left")
    for at in found["tokenisation"]:
        for what in ("encode", "prepare"):
            ratio, duration = at[f"{what}_ratio"], at[f"{what}_s"]
            table.add_row(f"{what} / tokenizers alone, {at['megabytes']} MB", f"{ratio:.3f} ({duration:.2f} s)")
    for at in found["memory"]:
        table.add_row(f"memory at {at['megabytes']} MB", f"{at['prepare_mb']:.0f} MB, {at['kept_mb']:.0f} MB when kept")
    table.add_row("a batch / a step", f"{load['share']:.2%} ({1e3 * load['batch_s']:.2f} ms)")
    console.print(table)


def main() -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="10 MB of text only")
    parser.add_argument("--chats", action="store_true", help="conversations in place of plain text")
    parser.add_argument("--repeats", type=int, default=9, metavar="INT", help="timed turns (default: 9)")
    parser.add_argument("--peak-of", metavar="PATH", help="measure one preparation's memory and print it; for itself")
    parser.add_argument("--cache", metavar="DIR", help="of --peak-of")
    parser.add_debug()
    options = parser.parse_args()
    if options.repeats < 1:
        raise UserError(f"--repeats {options.repeats}: must be at least 1")
    if options.peak_of:
        print(peak_of(options.peak_of, options.cache))
        return 0
    found = measure(options.quick, options.chats, options.repeats, Console(stderr=True))
    print(json.dumps(found, indent=2)) if options.json else show(found, Console())
    return 0


if __name__ == "__main__":
    sys.exit(exit_codes.exit_code_of(main, "--debug" in sys.argv, exit_codes.NOTHING_KEPT))
