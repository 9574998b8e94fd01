"""The README.md of a run folder: what the adapter is, what was measured, how to load it."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from granite_scu.config import TINY_MODEL

NOT_MEASURED = "not measured"


def write_model_card(folder: Path, facts: dict[str, Any]) -> None:
    """Write the model card of a run. What is null or absent is shown as not measured, of paths only the last name.

    Args:
        folder: the run folder; ``README.md`` in it is replaced.
        facts: ``base_model`` (hub id, local folder or the embedded model's name), ``data`` (the corpus, in words
            or by its path), ``controller``, ``target_s`` (null without a setpoint), ``summary`` (``scu_metrics.json``:
            bits per token ``base_test_bpt``, ``final_test_bpt``, ``final_val_bpt``, ``best_val_bpt`` and
            the count ``test_tokens``; ``s_ema``, ``lambda``, ``steps``, ``tokens``, ``wall_time_s``),
            ``hyperparameters`` and ``versions``.
    """
    base = str(facts["base_model"])
    sections = (
        _front_matter(base),
        _introduction(base, facts),
        _results(facts),
        _control(facts),
        f"## Data\n\n{_text(facts.get('data'))}",
        f"## Hyper-parameters\n\n{_table(('setting', 'value'), _rows(facts.get('hyperparameters')))}",
        f"## How to load it\n\n{_loading(base)}",
        f"## Versions\n\n{_table(('package', 'version'), _rows(facts.get('versions')))}",
    )
    (folder / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _front_matter(base: str) -> str:
    fields = {
        "library_name": "peft",
        "base_model": _public_name(base),
        "license": "apache-2.0",
        "tags": ["lora", "granite", "scu"],
    }
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _introduction(base: str, facts: Mapping[str, Any]) -> str:
    name = _public_name(base)
    origin = (
        ", the model embedded in granite-scu" if base == TINY_MODEL else ", a local model" if _is_local(base) else ""
    )
    target = facts.get("target_s")
    setpoint = "no setpoint" if target is None else f"setpoint S* = {target:g}"
    controller = _text(facts.get("controller"))
    return (
        f"# LoRA adapter for {name}\n\n"
        f"A LoRA adapter for `{name}`{origin}, trained with granite-scu: controller `{controller}`, {setpoint}."
    )


def _results(facts: Mapping[str, Any]) -> str:
    summary = facts.get("summary") or {}
    target = facts.get("target_s")
    test = _scored_on(summary.get("test_tokens"))
    rows = (
        ("base model, held-out test documents", _number(summary.get("base_test_bpt"), ".4f", "bits per token", test)),
        ("with the adapter, same documents", _number(summary.get("final_test_bpt"), ".4f", "bits per token", test)),
        ("at the end, on the validation sample", _number(summary.get("final_val_bpt"), ".4f", "bits per token")),
        ("best, on the validation sample", _number(summary.get("best_val_bpt"), ".4f", "bits per token")),
        ("the better of the two", _better(summary)),
        ("S at the end, smoothed", _number(summary.get("s_ema"), ".4g")),
        *([] if target is None else [("setpoint S*", f"{target:g}")]),
        ("lambda at the end", _number(summary.get("lambda"), ".4g")),
        ("optimizer steps", _number(summary.get("steps"), ",")),
        ("training tokens", _number(summary.get("tokens"), ",")),
        ("wall time", _number(summary.get("wall_time_s"), ",.0f", "s")),
    )
    return f"## Results\n\n{_table(('measured', 'value'), rows)}\n\nOne run, one seed: no interval is given."


def _better(summary: Mapping[str, Any]) -> str:
    better = summary.get("better")
    if better is None:
        return NOT_MEASURED
    if better["adapter"] == "final":
        return "the one at the end, which this folder holds"
    return f"the best, in `best/`, by {better['by_bpt']:.4f} bits per token"


def _control(facts: Mapping[str, Any]) -> str:
    shown = "S" if facts.get("target_s") is None else "S against its setpoint"
    return (
        f"## Control\n\n![{shown}, and lambda, over the optimizer steps](control.png)\n\n"
        "S = ParamBPT / (DataBPT + ParamBPT): the bits per token that describe the adapter, as a share of those and "
        "of the bits per token that the data still costs."
    )


def _loading(base: str) -> str:
    placeholder = ""
    if base == TINY_MODEL:
        imports = "from importlib.resources import files\n\n"
        source = f'str(files("granite_scu") / "assets" / "{TINY_MODEL}")'
    else:
        imports = ""
        source = f'"{_public_name(base)}"'
        placeholder = "  # a local model: give the path of its folder" if _is_local(base) else ""
    return f"""```python
{imports}from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

adapter = "."  # this folder
base = AutoModelForCausalLM.from_pretrained({source}){placeholder}
model = PeftModel.from_pretrained(base, adapter)
tokenizer = AutoTokenizer.from_pretrained(adapter)

inputs = tokenizer("A function is", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```"""


def _is_local(base: str) -> bool:
    return Path(base).is_dir() or _is_path(base) or base.count("/") > 1


def _public_name(base: str) -> str:
    """A hub id as it is; of a local folder its name alone, which says nothing about the machine."""
    return _last_name(str(Path(base).expanduser().resolve())) if _is_local(base) else base


def _last_name(path: str) -> str:
    return PureWindowsPath(path).name  # splits at slashes of both kinds


def _is_path(text: str) -> bool:
    """Whether a text is a path that leads through folders of this machine (of either kind of system)."""
    return text.startswith((".", "~")) or PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()


def _number(value: float | None, form: str, *words: str) -> str:
    return NOT_MEASURED if value is None else " ".join([format(value, form), *filter(None, words)])


def _scored_on(tokens: int | None) -> str:
    return "" if tokens is None else f"on {tokens:,} tokens"


def _text(value: object) -> str:
    if value is None:
        return NOT_MEASURED
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    text = str(value)
    return _last_name(text) or text if _is_path(text) else text


def _rows(values: Mapping[str, object] | None) -> list[tuple[str, str]]:
    return [(name, _text(value)) for name, value in (values or {}).items()]


def _table(header: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return NOT_MEASURED.capitalize() + "."
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (header, ("---", "---"), *rows)]
    return "\n".join(f"| {name} | {value} |" for name, value in escaped)
