"""The words that a reader of a report may not know: each is a button that opens its explanation, without a script."""

import re
from html import escape

TERMS = {
    "S": (
        "The share ParamBPT / (DataBPT + ParamBPT), in per cent. It says how much of the bits that describe text and "
        "adapter together go to the adapter."
    ),
    "S*": "The setpoint: the S that the controller aims at.",
    "DataBPT": "Bits per token that the training text costs under base model and adapter: the loss. Lower is better.",
    "ParamBPT": (
        "Bits that describe the adapter, under a Gaussian prior, divided by the tokens of the training text. It is 0 "
        "for an adapter that changes nothing, and grows as the adapter grows."
    ),
    "tick": "A moment, every few optimizer steps, at which S is measured and λ is set anew.",
    "λ": (
        "Lambda, the regularisation strength: the loss is DataBPT + λ · ParamBPT. The controller raises λ while S is "
        "above S*, and lowers it while S is below. With --max-drift it does so for drift, which stands in place of "
        "ParamBPT then."
    ),
}
_SAME = {"ticks": "tick"}
_WORD = re.compile(r"(?<![\w*])(DataBPT|ParamBPT|ticks?|S\*|S|λ)(?![\w*])")
_IDS = {"S": "s", "S*": "setpoint", "DataBPT": "databpt", "ParamBPT": "parambpt", "tick": "tick", "λ": "lambda"}


def explain_terms(html: str) -> str:
    """HTML without tags, of words that are ours: each term in it explains itself where it is first used."""
    used: set[str] = set()

    def button(found: re.Match[str]) -> str:
        term = _SAME.get(found[0], found[0])
        if term in used:
            return found[0]
        used.add(term)
        return (
            f'<button type="button" class="term" popovertarget="term-{_IDS[term]}" '
            f'title="{escape(TERMS[term])}">{found[0]}</button>'
        )

    return _WORD.sub(button, html)


def explanations() -> str:
    """What the buttons open."""
    return "\n".join(
        f'<div popover id="term-{_IDS[term]}" class="explanation"><strong>{term}</strong> {escape(text)}</div>'
        for term, text in TERMS.items()
    )
