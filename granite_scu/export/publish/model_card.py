"""The model card: what the adapter is, what was measured, how to load it. Of a run folder, and on the hub."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from granite_scu.config.settings import TINY_MODEL
from granite_scu.errors import UserError
from granite_scu.storage.run_folder import (
    CONTROL_CONFIG,
    EVALUATION,
    METRICS,
    MODEL_CARD,
    TRAINING_CONFIG,
    RunFolder,
    read_json,
)

NOT_MEASURED = "not measured"


def write_model_card(folder: Path) -> None:
    """Write the model card of a finished run into its folder, from the files there."""
    RunFolder(folder).write_text(MODEL_CARD, model_card(gather(folder)))


def gather(folder: Path) -> dict[str, Any]:
    """What a run folder tells for its card, see ``model_card``.

    Raises:
        UserError: a file is missing or damaged.
    """
    summary, training, control = (read_json(folder / name) for name in (METRICS, TRAINING_CONFIG, CONTROL_CONFIG))
    try:
        plan, lora = training["plan"], dict(training["lora"])
        lora.pop("adapter", None)  # where it lay; what it was stands under start
        start = training.get("start")
        return {
            "base_model": training["base"]["name"],
            "data": training["data_summary"]["path"],
            "controller": control["controller"],
            "target_s": summary["s_target"],
            "summary": summary,
            "hyperparameters": {
                **({"starts from": f"{start['adapter']} (SHA-256 {start['sha256']})"} if start else {}),
                **lora,
                "targets": lora["targets"] or "every linear layer",
                **training["optimizer"],
                "block_size": training["data"]["block_size"],
                "tokens_per_step": plan["tokens_per_step"],
                "steps": plan["steps"],
                "seed": training["seed"],
                "precision": training["machine"]["precision"],
                "prior_sigma": training["prior"]["sigma"],
                "n_tokens": plan["n_tokens"],
            },
            "versions": training["versions"],
        }
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder}: its JSON files lack {error}; was it written by another program?") from error


def model_card(facts: Mapping[str, Any]) -> str:
    """The card as Markdown with metadata. What is null or absent is shown as not measured, of paths only the last name.

    Args:
        facts: ``base_model`` (hub id, local folder or the embedded model's name), ``data`` (the corpus, in words
            or by its path), ``controller``, ``target_s`` (null without a setpoint), ``summary`` (``scu_metrics.json``:
            bits per token ``base_test_bpt``, ``final_test_bpt``, ``final_val_bpt``, ``best_val_bpt`` and
            the count ``test_tokens``; ``s_ema``, ``lambda``, ``steps``, ``tokens``, ``wall_time_s``),
            ``hyperparameters`` and ``versions``; where they are known ``evaluation`` (see ``evaluation_of``),
            ``license`` (of the adapter; that of a known base otherwise), ``repo_id`` and ``revision`` on the hub.
    """
    base = str(facts["base_model"])
    sections = (
        _front_matter(base, facts),
        _introduction(base, facts),
        _results(facts),
        *_evaluation(facts),
        _control(facts),
        f"## Data\n\n{_text(facts.get('data'))}",
        f"## Hyper-parameters\n\n{_table(('setting', 'value'), _rows(facts.get('hyperparameters')))}",
        f"## How to load it\n\n{_loading(base, facts)}",
        f"## Versions\n\n{_table(('package', 'version'), _rows(facts.get('versions')))}",
        f"## Licence\n\n{_licence(base, facts)}",
    )
    return "\n\n".join(sections) + "\n"


def known_license(base: str) -> str | None:
    """The licence of a base model, where it is known without asking: IBM's Granite and the embedded model."""
    return "apache-2.0" if base == TINY_MODEL or base.startswith("ibm-granite/") else None


def is_local(base: str) -> bool:
    """Whether a base model is named by a folder, which says nothing to anybody else."""
    return base != TINY_MODEL and (Path(base).is_dir() or _is_path(base) or base.count("/") != 1)


def evaluation_of(folder: Path) -> dict[str, Any] | None:
    """The adapter of a run against its base as ``scripts/eval_bpt.py`` measured it; None where it did not.

    Returns:
        ``data``, ``documents``, ``tokens``, ``max_length``, ``stride``, ``units`` (of the bootstrap); ``base`` and
        ``adapter`` (each ``bits_per_token``, ``bits_per_byte``, ``perplexity``); ``difference``, ``low``, ``high``
        (bits per token, adapter minus base; no interval of too few documents: null), ``confidence``, and ``verdict``.

    Raises:
        UserError: the file is damaged, or about another adapter.
    """
    file = folder / EVALUATION
    if not file.is_file():
        return None
    content = read_json(file)
    try:
        name = folder.resolve().name
        base = next(model for model in content["models"] if model["adapter"] is None)
        adapter = next(model for model in content["models"] if model["adapter"] and _is_of(model, folder))
        pair = next(p for p in content["pairs"] if {p["a"], p["b"]} == {base["name"], adapter["name"]})
        sign = 1 if pair["b"] == adapter["name"] else -1
        measured = pair["low"] is not None  # not with too few documents
        low, high = sorted((sign * pair["low"], sign * pair["high"])) if measured else (None, None)
        return {
            **{key: content[key] for key in ("data", "documents", "tokens", "max_length", "stride", "units")},
            "base": base,
            "adapter": adapter,
            "difference": sign * pair["difference_bits_per_token"],
            "low": low,
            "high": high,
            "confidence": pair["confidence"],
            "verdict": pair["verdict"],
        }
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise UserError(
            f"{file}: does not compare the adapter of {name} with its base; run scripts/eval_bpt.py on it again"
        ) from error


def _front_matter(base: str, facts: Mapping[str, Any]) -> str:
    results = _eval_results(facts)
    card = ModelCardData(
        base_model=None if base == TINY_MODEL or is_local(base) else base,
        library_name="peft",
        pipeline_tag="text-generation",
        license=facts.get("license") or known_license(base),
        tags=["lora", "granite", "scu"],
        model_name=_title(base, facts) if results else None,
        eval_results=results or None,
    )
    return f"---\n{card.to_yaml()}\n---"


def _eval_results(facts: Mapping[str, Any]) -> list[EvalResult]:
    summary, data = facts.get("summary") or {}, _text(facts.get("data"))
    found = []
    if summary.get("final_test_bpt") is not None:
        held_out = {"dataset_type": _slug(data), "dataset_name": f"{data}, held-out documents", "dataset_split": "test"}
        found.append(_result(held_out, "bits_per_token", summary["final_test_bpt"], "bits per token"))
    if evaluation := facts.get("evaluation"):
        text = _text(evaluation["data"])
        where = {"dataset_type": _slug(text), "dataset_name": text, "dataset_config": "eval_bpt"}
        for metric in ("bits_per_token", "bits_per_byte", "perplexity"):
            found.append(_result(where, metric, evaluation["adapter"][metric], metric.replace("_", " ")))
        interval = {key: evaluation[key] for key in ("low", "high", "confidence") if evaluation["low"] is not None}
        name = f"bits per token, difference from the base model, {_interval(evaluation)}"
        found.append(_result(where, "bits_per_token_difference", evaluation["difference"], name, interval))
    return found


def _result(
    where: Mapping[str, str], metric: str, value: float, name: str, args: dict[str, Any] | None = None
) -> EvalResult:
    return EvalResult(
        task_type="text-generation", metric_type=metric, metric_value=value, metric_name=name, metric_args=args, **where
    )


def _interval(evaluation: Mapping[str, Any]) -> str:
    if evaluation["low"] is None:
        return "too few documents for an interval"
    return f"{evaluation['confidence']:.0%} interval {evaluation['low']:+.4f} to {evaluation['high']:+.4f}".replace(
        "%", " %"
    )


def _title(base: str, facts: Mapping[str, Any]) -> str:
    return str(facts.get("repo_id") or f"LoRA adapter for {public_name(base)}")


def _introduction(base: str, facts: Mapping[str, Any]) -> str:
    name = public_name(base)
    origin = (
        ", the model embedded in granite-scu" if base == TINY_MODEL else ", a local model" if is_local(base) else ""
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
    start = "with the adapter that training started from, same documents"  # of a run with --adapter
    began = summary.get("start_test_bpt")
    rows = (
        ("base model, held-out test documents", _number(summary.get("base_test_bpt"), ".4f", "bits per token", test)),
        *([] if began is None else [(start, _number(began, ".4f", "bits per token", test))]),
        ("with the adapter, same documents", _number(summary.get("final_test_bpt"), ".4f", "bits per token", test)),
        ("at the end, on the validation sample", _number(summary.get("final_val_bpt"), ".4f", "bits per token")),
        ("best, on the validation sample", _number(summary.get("best_val_bpt"), ".4f", "bits per token")),
        ("the better of the two", _better(facts)),
        ("S at the end, smoothed", _number(summary.get("s_ema"), ".4g")),
        *([] if target is None else [("setpoint S*", f"{target:g}")]),
        ("lambda at the end", _number(summary.get("lambda"), ".4g")),
        ("optimizer steps", _number(summary.get("steps"), ",")),
        ("training tokens", _number(summary.get("tokens"), ",")),
        ("wall time", _number(summary.get("wall_time_s"), ",.0f", "s")),
    )
    interval = "the interval below is over the texts alone" if facts.get("evaluation") else "no interval is given"
    return f"## Results\n\n{_table(('measured', 'value'), rows)}\n\nOne run, one seed: {interval}."


def _evaluation(facts: Mapping[str, Any]) -> list[str]:
    """The section about ``scripts/eval_bpt.py``, where it was run."""
    found = facts.get("evaluation")
    if not found:
        return []
    rows = [
        (f"{who}, {metric.replace('_', ' ')}", _number(found[key][metric], ".4f"))
        for metric in ("bits_per_token", "bits_per_byte", "perplexity")
        for who, key in (("base model", "base"), ("with the adapter", "adapter"))
    ]
    rows.append(("difference in bits per token, adapter minus base", f"{found['difference']:+.4f}, {_interval(found)}"))
    rows.append(("verdict", _text(found["verdict"])))
    few = "" if found["units"] == "documents" else ", for want of documents, and so probably too narrow"
    about = (
        f"`scripts/eval_bpt.py` on {_text(found['data'])}: {found['documents']:,} documents, "
        f"{found['tokens']:,} tokens, in windows of {found['max_length']} tokens, "
        f"each after the first {found['stride']} further. "
        f"The interval is a paired bootstrap over {found['units']}{few}."
    )
    return [f"## Against the base model\n\n{about}\n\n{_table(('measured', 'value'), rows)}"]


def _better(facts: Mapping[str, Any]) -> str:
    better = (facts.get("summary") or {}).get("better")
    here = "repository" if facts.get("repo_id") else "folder"
    if better is None:
        return NOT_MEASURED
    if better["adapter"] == "final":
        return f"the one at the end, which this {here} holds"
    place = "which is not in this repository" if facts.get("repo_id") else "in `best/`"
    return f"the best, {place}, by {better['by_bpt']:.4f} bits per token"


def _control(facts: Mapping[str, Any]) -> str:
    shown = "S" if facts.get("target_s") is None else "S against its setpoint"
    return (
        f"## Control\n\n![{shown}, and lambda, over the optimizer steps](control.png)\n\n"
        "S = ParamBPT / (DataBPT + ParamBPT): the bits per token that describe the adapter, as a share of those and "
        "of the bits per token that the data still costs."
    )


def _loading(base: str, facts: Mapping[str, Any]) -> str:
    placeholder = ""
    if base == TINY_MODEL:
        imports = "from importlib.resources import files\n\n"
        source = f'str(files("granite_scu.model") / "assets" / "{TINY_MODEL}")'
    else:
        imports = ""
        source = f'"{public_name(base)}"'
        placeholder = "  # a local model: give the path of its folder" if is_local(base) else ""
    repo_id, revision = facts.get("repo_id"), facts.get("revision")
    adapter = f'"{repo_id}"' if repo_id else '"."  # this folder'
    where = f'adapter, revision="{revision}"' if revision else "adapter"
    return f"""```python
{imports}from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

adapter = {adapter}
base = AutoModelForCausalLM.from_pretrained({source}){placeholder}
model = PeftModel.from_pretrained(base, {where})
tokenizer = AutoTokenizer.from_pretrained({where})

inputs = tokenizer("A function is", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```"""


def _licence(base: str, facts: Mapping[str, Any]) -> str:
    of_base = known_license(base)
    own = facts.get("license") or of_base
    adapter = f"The adapter: {own}." if own else "The adapter: not chosen."
    page = "" if is_local(base) else f", see https://huggingface.co/{base}"
    return f"{adapter} The base model `{public_name(base)}`: {of_base or f'its own terms apply{page}'}."


def public_name(base: str) -> str:
    """A hub id as it is; of a local folder its name alone, which says nothing about the machine."""
    return _last_name(str(Path(base).expanduser().resolve())) if is_local(base) else base


def _is_of(model: Mapping[str, Any], folder: Path) -> bool:
    """Whether a scored adapter is a folder's: by its path then, or as the folder may have moved since, by its name."""
    named, name = model["adapter"], folder.resolve().name
    return Path(named).expanduser().resolve() == folder.resolve() or name in (_last_name(named), model["name"])


def _last_name(path: str) -> str:
    return PureWindowsPath(path).name  # splits at slashes of both kinds


def _is_path(text: str) -> bool:
    """Whether a text is a path that leads through folders of this machine (of either kind of system)."""
    return text.startswith((".", "~")) or PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()


def _number(value: float | None, form: str, *words: str) -> str:
    return NOT_MEASURED if value is None else " ".join([format(value, form), *filter(None, words)])


def _scored_on(tokens: int | None) -> str:
    return "" if tokens is None else f"on {tokens:,} tokens"


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)


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
