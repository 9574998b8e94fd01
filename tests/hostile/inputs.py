"""Inputs that are careless or meant to harm, of each kind that a command reads: what is right, changed in some way."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attempts import Attempt, Workspace
from hypothesis import strategies as st

MODEL = "tiny-granite-h"
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
    odd = draw(st.lists(st.sampled_from(right).flatmap(as_file) | st.binary(max_size=60), min_size=1, max_size=5))
    lines = [*map(dumped, right), *odd]
    suffix = draw(st.sampled_from([".jsonl", ".jsonl", ".jsonl", ".JSONL.gz", ".csv", ".txt"]))
    (workspace.given / f"data{suffix}").write_bytes(b"\n".join(draw(st.permutations(lines))))
    return (*INSPECT, "--data-dir", f"given/data{suffix}")


@st.composite
def tables(draw, workspace: Workspace) -> Made:
    """A csv, tsv, parquet or compressed file, damaged."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=40), min_size=1, max_size=50))
    suffix = draw(st.sampled_from([".csv", ".tsv", ".parquet", ".txt", ".md", ".csv.gz", ".txt.zst"]))
    if suffix == ".parquet":
        file = io.BytesIO()
        parquet.write_table(pa.table({draw(texts.filter(_is_text)): rows, "text": rows}), file)
        data = file.getvalue()
    else:
        data = "\n".join(["text", *rows]).encode()
    (workspace.given / f"data{suffix}").write_bytes(draw(damaged(data)) if draw(st.integers(0, 3)) else data)
    more = draw(st.sampled_from([(), ("--encoding", "utf-16"), ("--encoding", "latin-1"), ("--text-column", "x")]))
    return (*INSPECT, "--data-dir", f"given/data{suffix}", *more)


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


def _flag_values() -> dict[str, st.SearchStrategy[list[str]]]:
    """Of each flag the values that it is made for: none for a switch, else a choice, its default or a small number."""
    from granite_scu.config import flags

    found = {}
    for flag in (flag for section in flags.SECTIONS.values() for flag in section):
        default = flags.DEFAULTS.get(flag.key)
        usual = list(map(str, flag.choices)) or [str(default if default is not None else 1), "0.5", "2"]
        found[flag.name] = st.just([]) if flag.kind is bool else st.sampled_from(usual).map(lambda text: [text])
    return found


@st.composite
def flags(draw, workspace: Workspace) -> Made:
    """Flags of the training command, most with values that they are made for, and some that nobody has."""
    odd = (
        texts.filter(lambda text: "\0" not in text)
        | numbers.map(str)
        | st.sampled_from(["auto", "none", "cpu", "last"])
    )
    known = _flag_values()
    words: list[str] = []
    for name in draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=4, unique=True)):
        words += [name, *draw(known[name] if draw(st.integers(0, 3)) else odd.map(lambda text: [text]))]
    if not draw(st.integers(0, 3)):
        words += [draw(st.sampled_from(["--data.batch_size", "--lora.targets", "--trainer.max_time"])), draw(odd)]
    fixed = ("--cache-dir", "out/cache", "--output-dir", "out/run", "--num-workers", "0")
    return ("train", "--test-run", *words, *fixed, draw(st.sampled_from(["--dry-run", "--print_config"])))


# What lies in a run folder

RUN = (
    "--test-run",
    "--max-steps",
    "4",
    "--save-steps",
    "2",
    "--eval-steps",
    "2",
    "--eval-iters",
    "1",
    "--control-every",
    "1",
)
RUN += ("--batch-size", "2", "--block-size", "64", "--target-s", "0.02", "--samples", "0")


def make_run(folder: Path) -> Path:
    """A finished run of four steps in a folder of that name, made by the command."""
    command = [sys.executable, "-m", "granite_scu", "train", *RUN, "--output-dir", str(folder)]
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
    commands = [("report", "given/run", "--out", "out/page.html"), ("runs", "given"), ("runs", "given", "--json")]
    commands += [("plot", "given/run", "--out", "out/plots"), ("publish", "given/run", "--repo", "me/x", "--dry-run")]
    return draw(st.sampled_from(commands))


READERS = (
    ("generate", "given/run", "--prompt", "x", "--max-new-tokens", "2"),
    ("merge", "given/run", "--out", "out/merged", "--no-check"),
    (
        "train",
        "--test-run",
        "--max-steps",
        "4",
        "--adapter",
        "given/run",
        "--dry-run",
        "--output-dir",
        "out/run",
        "--cache-dir",
        "out/cache",
    ),
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
    if draw(st.integers(0, 2)):
        size = int.from_bytes(data[:8], "little")
        header = draw(as_file(json.loads(data[8 : 8 + size])))
        said = draw(st.just(len(header)) | st.sampled_from([0, 10**9, 2**64 - 1]))
        file.write_bytes(said.to_bytes(8, "little") + header + data[8 + size :])
    else:
        file.write_bytes(draw(damaged(data)))
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


@st.composite
def nudged(draw, value: Any) -> Any:
    """A value of the same kind: a number a little other, a tensor of other numbers, or one of the values inside."""
    import torch

    if isinstance(value, torch.Tensor):
        return value * draw(st.floats(0.5, 2)) if value.is_floating_point() else value
    if isinstance(value, dict | list) and value:
        copy = value.copy()
        key = draw(st.sampled_from(sorted(copy, key=str) if isinstance(copy, dict) else range(len(copy))))
        copy[key] = draw(nudged(copy[key]))
        return copy
    return value * draw(st.floats(0.5, 2)) if isinstance(value, float) else value


@st.composite
def checkpoints(draw, workspace: Workspace, run: Path) -> Made:
    """A checkpoint whose manifest, or state with a manifest that fits it, is not as a run has written it."""
    import torch

    from granite_scu.storage import manifest

    folder = _copied(run, workspace) / "checkpoint-2"
    described = folder / "manifest.json"
    if not draw(st.integers(0, 3)):
        described.write_bytes(draw(as_file(json.loads(described.read_bytes()))))
    else:
        state = torch.load(folder / "state.ckpt", weights_only=True)
        torch.save(draw(changed(state) if draw(st.booleans()) else nudged(state)), folder / "state.ckpt")
        described.unlink()
        manifest.write(folder)
    again = (
        "--resume-from-checkpoint",
        "given/run/checkpoint-2",
        "--output-dir",
        "out/run",
        "--cache-dir",
        "out/cache",
    )
    return ("train", *RUN, *again, *draw(st.sampled_from([("--dry-run",), ("--dry-run",), ()])))


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
    "checkpoints": checkpoints,
}


def right_result(attempt: Attempt) -> str | None:
    """What is wrong with what a command has printed that ended with 0: its JSON must be JSON."""
    if attempt.code == 0 and "--json" in attempt.argv:
        try:
            json.loads(attempt.out, parse_constant=_no_constant)
        except ValueError as error:
            return f"printed no JSON ({error})"
    return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
