"""The part of a report that a person reads first: what base model and adapter make of two test documents."""

from collections.abc import Mapping
from html import escape
from typing import Any

from granite_scu.viz.run_folder import Run
from granite_scu.viz.words import is_number

_TEXTS = ("prompt", "document", "base", "adapter")


def samples(run: Run) -> str:
    """Each beginning with its continuations side by side; empty where the run has none."""
    listed = run.samples.get("samples")
    found = [each for each in listed if _is_sample(each)] if isinstance(listed, list) else []
    if not found:
        return ""
    tokens, temperature = run.samples.get("max_new_tokens"), run.samples.get("temperature")
    drawn = f", at temperature {temperature:g} and from the same seed" if is_number(temperature) else ""
    note = f"Both continue the same test documents, each by at most {tokens} tokens{drawn}. This is no measurement."
    return (
        f'<section class="samples" aria-label="Samples"><h2>What the models write</h2><p class="faint">{escape(note)}'
        f"</p>{''.join(_sample(each) for each in found)}</section>"
    )


def _is_sample(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in _TEXTS)


def _sample(texts: Mapping[str, str]) -> str:
    columns = (("Base model", "base"), ("Adapter", "adapter"))
    continuations = "".join(
        f'<div><h4>{escape(heading)}</h4><p class="text">{escape(texts[name]) or "(nothing)"}</p></div>'
        for heading, name in columns
    )
    same = '<p class="faint">Both continue it in the same words.</p>' if texts["base"] == texts["adapter"] else ""
    return (
        f'<article><h4>Beginning</h4><p class="text faint">{escape(texts["prompt"])}</p>'
        f'<div class="pair">{continuations}</div>{same}<details><summary>How the document continues</summary>'
        f'<p class="text">{escape(texts["document"])}</p></details></article>'
    )
