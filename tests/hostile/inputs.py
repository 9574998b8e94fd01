"""Inputs that are careless or meant to harm, of each kind that a command reads: what is right, changed in some way."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attempts import Attempt, Workspace
from hypothesis import strategies as st

MODEL = "tiny-granite-h"
EMBEDDED = Path(__file__).parents[2] / "granite_scu" / "model" / "assets" / MODEL
CONTROL = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "{{ 7 * 7 }}", "{% for x in range(10**9) %}")
NASTY = (
    "",
    " ",
    "\0",
    "a\x1b[31mb",
    "‮abc",
    "\ud800",
    "../../etc/passwd",
    "/dev/zero",
    "~nobody/x",
    "x" * 5000,
    "1" * 500,
    "<script>alert(1)</script>",
    "%s%n",
    "{",
    "}",
    "[",
    '"',
    "NaN",
    "-0",
    "1e999",
    "010",
    "0x10",
    "null",
    "true",
    "'",
    *CONTROL,
)

texts = st.sampled_from(NASTY) | st.text(max_size=30)
numbers = (
    st.integers(-3, 10)
    | st.integers()
    | st.sampled_from([10**30, 10**400, -(10**400), 2**31, 2**63, 1e308, -0.0, 1e-308])
    | st.floats()
)
leaves = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
deep = st.builds(
    lambda n, open_, close: open_ * n + close * n, st.integers(1, 5000), st.just("["), st.sampled_from(["]", ""])
)


def dumped(value: Any) -> bytes:
    """As JSON, with the numbers that it has not, and with half characters as escapes."""
    return json.dumps(value).encode()


@st.composite
def damaged(draw, data: bytes) -> bytes:
    """The bytes cut, with others in between, or flipped."""
    place = draw(st.integers(0, max(0, len(data) - 1)))
    kind = draw(st.sampled_from(["cut", "insert", "flip", "repeat"]))
    if kind == "cut":
        return data[:place]
    if kind == "insert":
        return data[:place] + draw(st.binary(max_size=20)) + data[place:]
    if kind == "repeat":
        return data[:place] + data[place : place + 50] * draw(st.integers(2, 200)) + data[place:]
    return data[:place] + bytes([data[place] ^ draw(st.integers(1, 255))]) + data[place + 1 :] if data else data


@st.composite
def changed(draw, document: Any) -> Any:
    """A document of JSON with another value, without one, or with one more, somewhere in it."""
    if not isinstance(document, dict | list) or not document or draw(st.integers(0, 5)) == 0:
        return draw(values)
    copy = document.copy()
    key = draw(st.sampled_from(sorted(copy))) if isinstance(copy, dict) else draw(st.integers(0, len(copy) - 1))
    what = draw(st.sampled_from(["inside", "inside", "inside", "other", "none", "more"]))
    if what == "inside":
        copy[key] = draw(changed(copy[key]))
    elif what == "other":
        copy[key] = draw(values)
    elif what == "none":
        del copy[key]
    elif isinstance(copy, dict):
        copy[draw(texts)] = draw(values)
    else:
        copy.insert(key, draw(values))
    return copy


@st.composite
def nudged(draw, document: Any) -> Any:
    """A document with one value of those innermost changed and kept in kind, which may well be taken for right."""
    if isinstance(document, dict | list | tuple) and document:
        copy = dict(document) if isinstance(document, dict) else list(document)
        key = draw(st.sampled_from(sorted(copy, key=str) if isinstance(copy, dict) else range(len(copy))))
        copy[key] = draw(nudged(copy[key]))
        return tuple(copy) if isinstance(document, tuple) else copy
    if isinstance(document, bool):
        return not document
    if isinstance(document, int):
        return document + draw(st.integers(-3, 3)) * draw(st.sampled_from([1, 1, 1000, 2**40]))
    if isinstance(document, float):
        return document * draw(st.sampled_from([0.0, 0.5, 1.001, -1.0, 1e6, float("inf"), float("nan")]))
    if isinstance(document, str):
        return draw(texts)
    return draw(leaves) if document is None else _nudged_tensor(draw, document)


def _nudged_tensor(draw, tensor: Any) -> Any:
    """Of other numbers, another shape or another kind; what is no tensor as it stands."""
    if not hasattr(tensor, "dtype"):
        return tensor
    others = [tensor * 0, tensor.flatten()[:-1], tensor[None], tensor.double(), tensor.int()]
    if tensor.is_floating_point():
        others += [tensor * 1.01, tensor * float("nan"), tensor * 1e30]
    return draw(st.sampled_from(others)).clone()


@st.composite
def as_file(draw, document: Any) -> bytes:
    """A changed document as the bytes of a file, which may be damaged too."""
    if draw(st.integers(0, 4)):
        return dumped(draw(changed(document)))
    return draw(damaged(dumped(document))) if draw(st.booleans()) else draw(deep).encode()


# Data

RIGHT = [{"text": f"A line of words, number {number}, that says something."} for number in range(40)]
CHAT = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A walrus."}]}
PAIR = {"prompt": "What is it?", "completion": "A walrus."}
INSPECT = (
    "data",
    "inspect",
    "--model",
    MODEL,
    "--cache-dir",
    "out/cache",
    "--block-size",
    "16",
    "--samples",
    "1",
    "--json",
)

Made = tuple[str, ...]
"""The command, of what was put into the workspace."""


@st.composite
def records(draw, workspace: Workspace) -> Made:
    """A file of records in which some are not as they should be."""
    right = draw(st.sampled_from([RIGHT, [CHAT] * 40, [PAIR] * 40]))
    mild = st.sampled_from(right).flatmap(nudged).map(dumped)
    odd = mild if draw(st.booleans()) else mild | st.sampled_from(right).flatmap(as_file) | st.binary(max_size=60)
    lines = [*map(dumped, right), *draw(st.lists(odd, min_size=1, max_size=5))]
    suffix = draw(st.sampled_from([".jsonl", ".jsonl", ".jsonl", ".JSONL.gz", ".csv", ".txt"]))
    (workspace.given / f"data{suffix}").write_bytes(b"\n".join(draw(st.permutations(lines))))
    return (*INSPECT, "--data-dir", f"given/data{suffix}")


@st.composite
def tables(draw, workspace: Workspace) -> Made:
    """A csv, tsv, parquet or compressed file, damaged."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=40), min_size=1, max_size=50))
    rows += [row["text"] for row in RIGHT]
    suffix = draw(st.sampled_from([".csv", ".tsv", ".parquet", ".txt", ".md", ".csv.gz", ".txt.zst"]))
    if suffix == ".parquet":
        file = io.BytesIO()
        parquet.write_table(pa.table({draw(texts.filter(_is_text)): rows, "text": rows}), file)
        data = file.getvalue()
    else:
        data = "\n".join(["text", *rows]).encode()
    (workspace.given / f"data{suffix}").write_bytes(draw(damaged(data)) if draw(st.integers(0, 3)) else data)
    more = [(), (), (), ("--encoding", "utf-16"), ("--encoding", "latin-1"), ("--text-column", "x")]
    return (*INSPECT, "--data-dir", f"given/data{suffix}", *draw(st.sampled_from(more)))


def _is_text(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


@st.composite
def chats(draw, workspace: Workspace) -> Made:
    """Conversations with odd roles, contents and fields; some with tokens of the template in what is said."""
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "", "Assistant"]), "content": texts | values},
        optional={"tool_calls": values, "thinking": values, "name": values},
    )
    chat = st.fixed_dictionaries({"messages": st.lists(message, max_size=5)}, optional={"tools": values})
    lines = [CHAT] * 40 + draw(st.lists(chat, min_size=1, max_size=3))
    (workspace.given / "chats.jsonl").write_bytes(b"\n".join(map(dumped, lines)))
    return (*INSPECT, "--data-dir", "given/chats.jsonl")


# Settings

GROUPS = {
    "seed_everything": 1,
    "trainer": {"max_steps": 4, "accelerator": "cpu", "precision": "32-true"},
    "base": {"name": MODEL, "quantize_4bit": False},
    "data": {"path": "stdlib-docs", "batch_size": 2, "block_size": 64},
    "lora": {"rank": 4, "alpha": 8.0, "targets": ["in_proj", "q_proj"]},
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 1},
    "prior": {"sigma": 0.02},
    "control": {"controller": "pi", "target_s": 0.1, "every": 2, "kp": 0.5},
    "run": {"output_dir": "out/run", "save_steps": 2, "eval_steps": 2},
}


@st.composite
def settings(draw, workspace: Workspace) -> Made:
    """A YAML file that is not quite one of settings."""
    import yaml

    if draw(st.integers(0, 2)):
        text = yaml.safe_dump(_plain(draw(changed(GROUPS))), allow_unicode=True).encode(errors="backslashreplace")
    else:
        text = draw(damaged(yaml.safe_dump(GROUPS).encode()))
    (workspace.given / "mine.yaml").write_bytes(text)
    return (draw(st.sampled_from(["fit", "train"])), "--config", "given/mine.yaml", *draw(st.sampled_from(LOOK)))


LOOK = (("--print_config",),)


def _plain(value: Any) -> Any:
    """Without half characters, which no file in UTF-8 can hold."""
    return json.loads(json.dumps(value).replace("\\ud800", "\\ufffd"))


def _words_of(flag: Any) -> st.SearchStrategy[tuple[str, ...]]:
    """A flag with a value as its help describes it, which need not go with other flags."""
    if flag.choices:
        return st.sampled_from(flag.choices).map(lambda choice: (flag.name, choice))
    if flag.kind is bool:
        return st.sampled_from([(flag.name,), (f"--no-{flag.name[2:]}",)])
    kinds = {
        int: st.integers(0, 70) | st.sampled_from([1000, 10**6]),
        float: st.sampled_from([0, 1e-6, 0.01, 0.5, 1, 3]) | st.floats(0, 2),
    }
    value = kinds.get(
        flag.kind, st.sampled_from(["auto", "0.1", "10%", "pi", "none", "i", "kl", "00:00:01:00", "text"])
    )
    return value.map(lambda number: (flag.name, str(number)))


@st.composite
def flags(draw, workspace: Workspace) -> Made:
    """Flags of the training command: right ones, and in half of the attempts one with a value that it does not have."""
    from granite_scu.config import flags as table

    every = [*table.FLAGS.values()]
    safe = [flag for flag in every if flag.name not in ("--output-dir", "--cache-dir", "--num-workers")]
    words = [word for pair in draw(st.lists(st.sampled_from(safe).flatmap(_words_of), max_size=3)) for word in pair]
    if draw(st.booleans()):
        names = [flag.name for flag in every] + ["--data.batch_size", "--lora.targets", "--trainer.max_time"]
        wrong = texts.filter(lambda text: "\0" not in text) | numbers.map(str)
        words += [draw(st.sampled_from([*names, "--hardware"])), draw(wrong)]
    (workspace.given / "text.jsonl").write_bytes(TEXT)
    fixed = (*OUTPUT, "--num-workers", "0")
    if draw(st.integers(0, 7)) == 0:  # all of it, and briefly
        return ("train", *RUN, "--data-dir", "given/text.jsonl", *words, *fixed, "--max-steps", "2", "--samples", "0")
    return ("train", "--test-run", "--data-dir", "given/text.jsonl", *words, *fixed, draw(st.sampled_from(PLANS)))


PLANS = ("--dry-run", "--dry-run", "--print_config")
OUTPUT = ("--output-dir", "out/run", "--cache-dir", "out/cache")


# What lies in a run folder

RUN = (
    "--test-run", "--max-steps", "4", "--save-steps", "2", "--eval-steps", "2", "--eval-iters", "1",
    "--control-every", "1", "--batch-size", "2", "--block-size", "64", "--target-s", "0.02", "--samples", "0",
)  # fmt: skip
TEXT = b"\n".join(dumped({"text": f"A line of words, number {n}, that says something."}) for n in range(400))


def make_run(folder: Path) -> Path:
    """A finished run of four steps in a folder of that name, made by the command; beside it the text that it read."""
    text = folder.parent / "text.jsonl"
    text.write_bytes(TEXT)
    command = [sys.executable, "-m", "granite_scu", "train", *RUN, "--data-dir", str(text), "--output-dir", str(folder)]
    subprocess.run([*command, "--cache-dir", str(folder.parent / "cache")], check=True, capture_output=True)
    return folder


def _copied(run: Path, workspace: Workspace) -> Path:
    return Path(shutil.copytree(run, workspace.given / "run"))


@st.composite
def records_of_a_run(draw, workspace: Workspace, run: Path) -> Made:
    """A run folder of which one file of JSON is not as a run has written it."""
    folder = _copied(run, workspace)
    names = ["scu_history.json", "scu_metrics.json", "scu_config.json", "training_config.json", "documents.json"]
    file = folder / draw(st.sampled_from(names))
    file.write_bytes(draw(as_file(json.loads(file.read_bytes()))))
    return draw(st.sampled_from(LOOKS))


LOOKS = (
    ("report", "given/run", "--out", "out/page.html"),
    ("plot", "given/run", "--out", "out/plots"),
    ("publish", "given/run", "--repo-id", "me/x", "--dry-run"),
    ("runs", "given"),
    ("runs", "given", "--json"),
)


READERS = (
    ("generate", "given/run", "--prompt", "x", "--max-new-tokens", "2"),
    ("eval", "given/run", "--data-dir", "given/run/README.md", "--output", "out/eval.json"),
    ("merge", "given/run", "--out", "out/merged", "--no-check"),
    ("train", "--test-run", "--max-steps", "4", "--adapter", "given/run", "--dry-run", *OUTPUT),
)


@st.composite
def adapter_configs(draw, workspace: Workspace, run: Path) -> Made:
    """A run folder whose adapter is described otherwise."""
    file = _copied(run, workspace) / "adapter_config.json"
    file.write_bytes(draw(as_file(json.loads(file.read_bytes()))))
    return draw(st.sampled_from(READERS))


@st.composite
def adapters(draw, workspace: Workspace, run: Path) -> Made:
    """A run folder whose adapter has another header, or is damaged."""
    file = _copied(run, workspace) / "adapter_model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if kind := draw(st.integers(0, 3)):
        document = json.loads(data[8 : 8 + size])
        notes = st.dictionaries(texts, texts, max_size=4)
        header = draw(as_file(document)) if kind > 1 else dumped(document | {"__metadata__": draw(notes)})
        said = draw(st.sampled_from([len(header)] * 9 + [0, 10**9, 2**64 - 1]))
        file.write_bytes(said.to_bytes(8, "little") + header + data[8 + size :])
    elif draw(st.booleans()):
        file.write_bytes(draw(damaged(data)))
    else:  # numbers alone, which may be any
        place, other = draw(st.integers(8 + size, len(data) - 200)), draw(st.binary(min_size=1, max_size=200))
        file.write_bytes(data[:place] + other + data[place + len(other) :])
    return draw(st.sampled_from(READERS))


@st.composite
def templates(draw, workspace: Workspace, run: Path) -> Made:
    """A run folder with a chat template of somebody else's."""
    pieces = [
        "{{ messages }}",
        "{% for m in messages %}",
        "{{ m.content }}",
        "{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 'x' * 10**9 }}",
        "{% include '/etc/passwd' %}",
        "{{ 1/0 }}",
    ]
    text = "".join(draw(st.lists(st.sampled_from([*pieces, *CONTROL]) | texts, max_size=6)))
    (_copied(run, workspace) / "chat_template.jinja").write_text(text, errors="backslashreplace")
    return (*READERS[0], "--chat")


TOKENIZER_PARTS: list[tuple[str, Any]] = [
    *(("normalizer", {"type": "Replace", "pattern": pattern, "content": "x" * times}) for times in (2, 10_000)
      for pattern in ({"String": ""}, {"String": "e"}, {"Regex": "."}, {"Regex": "((("})),
    ("normalizer", {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10}] * 6}),
    ("normalizer", {"type": "Prepend", "prepend": "x" * 1_000_000}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////////////w=="}),
    ("pre_tokenizer", None),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(.+)+(.+)+Z"}, "behavior": "Isolated", "invert": False}),
    ("decoder", {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}),
    ("decoder", {"type": "Replace", "pattern": {"String": "e"}, "content": "\x1b[2J"}),
    ("padding", {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
                 "pad_type_id": 0, "pad_token": "x"}),
    ("dropout", 7.5),
    ("continuing_subword_prefix", "zzzzzzzz"),
    ("unk_token", "not there"),
    ("vocab", {}),
    ("vocab", {"a": 2**31 + 5}),
    ("merges", [["zzz", "qqq"]]),
]  # fmt: skip
"""Parts of a tokenizer.json at which the library ends, or takes long."""


@st.composite
def tokenizers(draw, workspace: Workspace, run: Path) -> Made:
    """A base model, or a run folder, whose tokenizer is not as its makers have saved it."""
    folder = _copied(run, workspace)
    file = folder / draw(st.sampled_from(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"]))
    written = json.loads(file.read_bytes())
    if file.name == "tokenizer.json" and draw(st.booleans()):
        part, value = draw(st.sampled_from(TOKENIZER_PARTS))
        target = written["model"] if part in written["model"] else written
        target[part] = value
        file.write_text(json.dumps(written))
    else:
        file.write_bytes(draw(as_file(written)))
    if draw(st.booleans()):
        return ("eval", "given/run", "--data-dir", "given/run/README.md", "--output", "out/eval.json")
    model = workspace.given / "model"
    shutil.copytree(EMBEDDED, model)
    shutil.copy(file, model / file.name)
    return (
        "data",
        "inspect",
        "--model",
        "given/model",
        "--data-dir",
        "given/run/README.md",
        *OUTPUT[2:],
        "--block-size",
        "16",
    )


@st.composite
def checkpoints(draw, workspace: Workspace, run: Path) -> Made:
    """A checkpoint whose state, with a manifest that fits it, or in some whose manifest is not as a run has written it.

    A third of the attempts train on from it, the others only plan to.
    """
    import torch

    from granite_scu.storage import manifest

    folder = _copied(run, workspace) / "checkpoint-2"
    if draw(st.integers(0, 5)) == 0:
        written = json.loads((folder / manifest.NAME).read_bytes())
        (folder / manifest.NAME).write_bytes(draw(as_file(written)))
    else:
        state = torch.load(folder / "state.ckpt", weights_only=True)
        part = draw(st.sampled_from(sorted(state)))
        state[part] = draw(nudged(state[part]) if draw(st.integers(0, 2)) else changed(state[part]))
        torch.save(state, folder / "state.ckpt")
        (folder / manifest.NAME).unlink()
        manifest.write(folder)
    return _again(draw, workspace, run, "given/run/checkpoint-2", "4")


@st.composite
def kinds_of_files(draw, workspace: Workspace, run: Path) -> Made:
    """A run folder of which a file is a pipe, a link, or has no end; or that is a copy by hard links, and continues."""
    resumed = draw(st.booleans())
    folder = Path(shutil.copytree(run, (workspace.out if resumed else workspace.given) / "run"))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kind = draw(st.sampled_from(["pipe", "endless", "linked"]))
    if kind == "linked":
        for path in files:
            other = workspace.given / "original" / path.relative_to(folder)
            other.parent.mkdir(parents=True, exist_ok=True)
            if path.name != ".lock":  # which names who has it
                other.hardlink_to(path)
    else:
        file = draw(st.sampled_from([*files, folder / "logs" / "training.log"]))
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        else:
            begin = draw(st.sampled_from([b"", b"{", b"["]))
            file.write_bytes(begin)
            os.truncate(file, draw(st.sampled_from([1 << 20, 1 << 36])))
    if not resumed:
        return draw(st.sampled_from([*LOOKS, *READERS]))
    return _again(draw, workspace, run, "last", draw(st.sampled_from(["4", "5"])))


def _again(draw, workspace: Workspace, run: Path, checkpoint: str, steps: str) -> Made:
    """The run once more, from a checkpoint; a third of the attempts train, the others only plan to."""
    shutil.copy(run.parent / "text.jsonl", workspace.given)
    shutil.copytree(run.parent / "cache", workspace.out / "cache")
    again = ("--data-dir", "given/text.jsonl", "--resume-from-checkpoint", checkpoint, *OUTPUT, "--max-steps", steps)
    return ("train", *RUN, *again, *draw(st.sampled_from([(), ("--dry-run",), ("--dry-run",)])))


SURROUNDINGS = (
    "UMASK=077", "UMASK=000", "UMASK=027", "HOME=", "HOME=/nonexistent", "HOME=relative", "TMPDIR=/nonexistent",
    "LANG=C", "LC_ALL=tr_TR.UTF-8", "COLUMNS=0", "COLUMNS=x", "TERM=", "PATH=", "USER=", "LOCAL_RANK=3", "RANK=1",
    "WORLD_SIZE=2", "SLURM_NTASKS=2", "OMP_NUM_THREADS=x", "MPLBACKEND=no", "MPLCONFIGDIR=/nonexistent",
    "CUDA_VISIBLE_DEVICES=7", "HF_TOKEN=", "TZ=nowhere", "NO_COLOR=1", "PYTHONWARNINGS=error",
)  # fmt: skip


@st.composite
def surroundings(draw, workspace: Workspace, run: Path) -> Made:
    """A command that is right, with another umask, and with variables that are missing or say what is not so."""
    (workspace.given / "text.jsonl").write_bytes(TEXT)
    _copied(run, workspace)
    words = draw(st.lists(st.sampled_from(SURROUNDINGS), min_size=1, max_size=3, unique_by=lambda w: w.split("=")[0]))
    trains = ("train", *RUN, "--data-dir", "given/text.jsonl", *OUTPUT, "--max-steps", "2")
    return (*words, *draw(st.sampled_from([trains, (*trains, "--dry-run"), *LOOKS, *READERS])))


KINDS: dict[str, Callable[..., st.SearchStrategy[Made]]] = {
    "records": records,
    "tables": tables,
    "chats": chats,
    "settings": settings,
    "flags": flags,
}
OF_A_RUN: dict[str, Callable[..., st.SearchStrategy[Made]]] = {
    "records of a run": records_of_a_run,
    "adapter configurations": adapter_configs,
    "adapters": adapters,
    "chat templates": templates,
    "tokenizers": tokenizers,
    "checkpoints": checkpoints,
    "kinds of files": kinds_of_files,
    "surroundings": surroundings,
}


def right_result(attempt: Attempt) -> str | None:
    """What is wrong with a command that ended with 0: what it calls JSON must be JSON."""
    if attempt.code == 0 and "--json" in attempt.argv:
        try:
            json.loads(attempt.out, parse_constant=_no_constant)
        except ValueError as error:
            return f"printed no JSON ({error})"
    return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
