"""The model card: what the adapter is, what was measured, how to load it. Of a run folder, and on the hub."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, PackageLoader

from granite_scu.config.errors import UserError
from granite_scu.config.settings import TINY_MODEL, DataConfig, from_record, is_local, last_part, listed
from granite_scu.config.untrusted_input import printable
from granite_scu.control.units import per_cent
from granite_scu.storage import manifest
from granite_scu.storage.run_folder import CONTROL_CONFIG, EVALUATION, METRICS, TRAINING_CONFIG, WEIGHTS, read_json
from granite_scu.viz.run_folder import read_validations
from granite_scu.viz.what_now import lower_rate, verdict

NOT_MEASURED = "not measured"
_FACTS = (
    *("data", "tested", "controller", "target_s", "summary", "hyperparameters", "versions"),
    *("evaluation", "license", "repo_id", "revision", "model_type", "chats", "answer_end", "lower_rate", "validations"),
)
"""What a card may tell besides the base model."""


def gather(folder: Path) -> dict[str, Any]:
    """What a run folder tells for its card, see ``model_card``.

    Raises:
        UserError: a file is missing or damaged.
    """
    summary, training, control = (read_json(folder / name) for name in (METRICS, TRAINING_CONFIG, CONTROL_CONFIG))
    try:
        plan, lora, data = training["plan"], dict(training["lora"]), from_record(DataConfig, training["data"])
        lora.pop("adapter", None)  # where it lay; what it was stands under start
        start = training.get("start")
        return {
            "base_model": training["base"]["name"],
            "model_type": training.get("model_type"),
            "data": listed(data.path) or training["data_summary"]["path"],
            "tested": data.tested,
            "chats": bool(training["data_summary"].get("conversations")),
            "answer_end": training.get("answer_end"),
            "controller": control["controller"],
            "target_s": summary["s_target"],
            "summary": summary,
            "lower_rate": lower_rate(training),
            "validations": read_validations(folder, summary),
            "hyperparameters": {
                **({"base model's commit": commit} if (commit := _commit(training)) else {}),
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
            or by its paths), ``tested`` (what is tested on, where that is another), ``controller``, ``target_s`` (null
            without a setpoint), ``summary`` (``scu_metrics.json``: bits per token ``base_test_bpt``,
            ``adapter_test_bpt``, ``best_val_bpt`` and the counts ``test_tokens`` and ``best_val_step``; ``s_ema``,
            ``lambda``, ``steps``, ``tokens``, ``wall_time_s``),
            ``hyperparameters`` and ``versions``; where they are known ``evaluation`` (see ``evaluation_of``),
            ``license`` (of the adapter; that of a known base otherwise), ``repo_id`` and ``revision`` on the hub,
            ``model_type`` (of the base, as transformers names it), ``chats`` (whether it was trained on them),
            ``answer_end`` (the token that ends an answer of a chat, where generating stops),
            ``lower_rate`` and ``validations`` (see ``what_now.verdict``).
    """
    base = str(facts["base_model"])
    facts = {**dict.fromkeys(_FACTS), **facts}
    scored = facts["evaluation"] or {}
    bounds = (scored["low"], scored["high"]) if scored.get("low") is not None else None
    return TEMPLATES.get_template("model_card.md.jinja").render(
        facts,
        metadata=_metadata(base, facts),
        base=base,
        name=public_name(base),
        embedded=base == TINY_MODEL,
        local=is_local(base),
        base_license=known_license(base),
        summary=defaultdict(lambda: None, facts["summary"] or {}),
        interval=scored and _interval(scored),
        verdict=verdict(facts["summary"] or {}, facts["lower_rate"], bounds, facts["validations"] or ()),
    )


def _commit(training: Mapping[str, Any]) -> str | None:
    """Of the base model on the hub, as training had it; None of other models."""
    recorded = training.get("base_files")
    return str(recorded["commit"]) if isinstance(recorded, Mapping) and recorded.get("commit") else None


def known_license(base: str) -> str | None:
    """The licence of a base model, where it is known without asking: IBM's Granite and the embedded model."""
    return "apache-2.0" if base == TINY_MODEL or base.startswith("ibm-granite/") else None


def family(model: str) -> list[str]:
    """The tag of a base model's family, by its type or, where an older run has not recorded that, by its name."""
    return ["granite"] if "granite" in model.lower() else []


def evaluation_of(folder: Path) -> dict[str, Any] | None:
    """The adapter of a run against its base as ``granite-scu eval`` measured it; None where it did not.

    Returns:
        ``data``, ``documents``, ``tokens``, ``max_length``, ``stride``, ``units`` (of the interval); ``base`` and
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
        # A difference is the later model minus the earlier, and the base is always the first.
        pair = next(p for p in content["pairs"] if (p["a"], p["b"]) == (base["name"], adapter["name"]))
        return {
            **{key: content[key] for key in ("data", "documents", "tokens", "max_length", "stride", "units")},
            "base": base,
            "adapter": adapter,
            "difference": pair["difference_bits_per_token"],
            **{key: pair[key] for key in ("low", "high", "confidence", "verdict")},
        }
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise UserError(
            f"{file}: does not compare the adapter of {name} with its base; score it again with granite-scu eval"
        ) from error


def _metadata(base: str, facts: Mapping[str, Any]) -> str:
    """What the hub reads, in YAML."""
    results = _eval_results(facts)
    card = ModelCardData(
        base_model=None if base == TINY_MODEL or is_local(base) else base,
        library_name="peft",
        pipeline_tag="text-generation",
        license=facts["license"] or known_license(base),
        tags=["lora", *family(facts["model_type"] or public_name(base)), "scu"],
        model_name=str(facts["repo_id"] or f"LoRA adapter for {public_name(base)}") if results else None,
        eval_results=results or None,
    )
    return card.to_yaml()


def _eval_results(facts: Mapping[str, Any]) -> list[EvalResult]:
    summary, data = facts["summary"] or {}, _text(facts["tested"] or facts["data"])
    found = []
    if summary.get("adapter_test_bpt") is not None:
        split = "validation" if summary.get("test_is_validation") else "test"
        of = {"validation": "validation documents", "test": "held-out documents"}[split]
        scored = {"dataset_type": _slug(data), "dataset_name": f"{data}, {of}", "dataset_split": split}
        found.append(_result(scored, "bits_per_token", summary["adapter_test_bpt"], "bits per token"))
    if evaluation := facts["evaluation"]:
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


def public_name(base: str) -> str:
    """A hub id as it is; of a local folder its name alone, which says nothing about the machine."""
    return _one_line(_last_name(str(Path(base).expanduser().resolve())) if is_local(base) else base)


def _is_of(model: Mapping[str, Any], folder: Path) -> bool:
    """Whether a scored adapter is a folder's: by its weights, or in an older file by its path or name."""
    if "adapter_sha256" in model:
        return bool(model["adapter_sha256"] == manifest.sha256(folder / WEIGHTS))
    named, name = model["adapter"], folder.resolve().name
    return Path(named).expanduser().resolve() == folder.resolve() or name in (_last_name(named), model["name"])


def _last_name(path: str) -> str:
    return PureWindowsPath(path).name  # splits at slashes of both kinds


def _number(value: float | None, form: str, *words: str) -> str:
    return NOT_MEASURED if value is None else " ".join([format(value, form), *filter(None, words)])


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)


def _text(value: object) -> str:
    """In one line, of paths only the last name."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return last_part(_one_line(str(value)))


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())


def _plain(value: object) -> str:
    """A text that Markdown shows as it is: names in a run folder may be a stranger's.

    >>> print(_plain("# a_b ![x](y) <b>"))
    \\# a_b !\\[x\\](y) \\<b\\>
    """
    return re.sub(r"([\\`*\[\]<>|&]|^(?:[#~=]|[+-](?=[ +-])|\d+(?=[.)] )))", _escaped, _text(value))


def _escaped(found: re.Match[str]) -> str:
    return found[0] + "\\" if found[0].isdigit() else "\\" + found[0]


def _code(value: object) -> str:
    """The same between backticks."""
    return f"`{_text(value).replace('`', chr(39))}`"


TEMPLATES = Environment(
    loader=PackageLoader("granite_scu.export.publish", "."),
    autoescape=False,  # Markdown, not HTML: ``plain`` and ``code`` escape
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {
    "number": _number,
    "share": lambda ratio: NOT_MEASURED if ratio is None else per_cent(ratio),
    "plain": _plain,
    "code": _code,
    "quoted": partial(json.dumps, ensure_ascii=False),
}
