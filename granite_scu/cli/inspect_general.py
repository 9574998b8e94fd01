"""``granite-scu data inspect --general``: the general text on which drift is measured, to look at."""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.text import Text

from granite_scu.cli.console import make_console, print_facts, quiet
from granite_scu.config.errors import UserError
from granite_scu.config.progress import say
from granite_scu.config.settings import BaseConfig, DataConfig, DriftConfig, check_model
from granite_scu.config.untrusted_input import printable
from granite_scu.control.units import counted
from granite_scu.storage.atomic import replacing
from granite_scu.storage.run_folder import TRAINING_CONFIG, is_general_text, read_json, require_writable_file

if TYPE_CHECKING:
    from granite_scu.evaluation.general_text import GeneralText

SHARES = (0, 10, 50, 90, 99, 100)
"""Percentiles of the documents' lengths that are shown."""

SHOWN = 600
"""Characters of a sample that are printed."""


def run(options: argparse.Namespace, data: DataConfig) -> int:
    """Carry out the command; returns the exit code. ``data`` is how text is read, its sources those to look at."""
    if options.save:
        options.save = require_writable_file("--save", options.save)
        if any(options.save == Path(name).expanduser().resolve() for name in data.sources):
            raise UserError(f"--save {options.save}: is read; name another file")
    asked = DriftConfig(general_data=data.sources or "auto", general_tokens=options.general_tokens)
    # Late: torch takes seconds.
    from granite_scu.data.tokens import templates
    from granite_scu.evaluation import general_text
    from granite_scu.model import loading

    quiet(make_console(stderr=True))
    files, own = asked.general_files, None
    if len(files) == 1 and is_general_text(files[0]):
        folder = Path(files[0]).expanduser().parent
        own = templates.saved_in(folder)
        if (record := folder / TRAINING_CONFIG).is_file() and not options.model:
            options.model = read_json(record).get("base", {}).get("name")
    model = options.model or BaseConfig.name
    check_model(model)
    tokenizer = templates.of_data(templates.with_template(loading.load_tokenizer(model), own), data)
    rows = loading.embedding_rows(loading.known_config(model))
    if files:
        text = general_text.of_files(files, data, tokenizer, asked.general_tokens, options.seed, rows=rows)
    else:
        # To train on it is another than a run measures drift on.
        text = _written(model, tokenizer, asked.general_tokens, options.seed + bool(options.save), rows)
    if options.save:
        save(text, tokenizer, options.save)
    facts = {"model": model, **facts_of(text, tokenizer)}
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    console = make_console()
    print_facts("general text, on which drift is measured", describe(facts), console)
    console.print("samples: [bold green]counted[/], [dim]not counted[/]")
    for number, document in enumerate(text.documents[: options.samples]):
        shown = marked(document.tokens, document.counted, tokenizer, console)
        console.print(Text.assemble((f"text {number}: ", "bold"), shown[:SHOWN], "..." if len(shown) > SHOWN else ""))
    return 0


def _written(model: str, tokenizer: Any, tokens: int, seed: int, rows: int | None) -> "GeneralText":
    """What the model has written before, or writes now."""
    from granite_scu.evaluation import general_writing
    from granite_scu.hardware import detection, machine  # late, as above
    from granite_scu.model import base_digest, loading

    base = base_digest.record(model)
    place = general_writing.place_of(tokenizer, tokens, seed, base)
    if (kept := general_writing.kept(place, tokenizer, rows)) is not None:
        return kept
    device = loading.device_named("auto")
    dtype = loading.WEIGHT_DTYPES[machine.resolve_precision(None, detection.detect(device.type))]
    loaded = loading.load_model(BaseConfig(model), dtype).to(device).eval()
    return general_writing.general_text(loaded, tokenizer, tokens, seed, make_console(stderr=True), base)


def save(text: "GeneralText", tokenizer: Any, file: Path) -> None:
    """Write it as records to train on.

    Raises:
        UserError: the model has not written it, or no sentence of it is whole.
    """
    from granite_scu.evaluation import general_text, general_writing  # late, as above

    if text.source != general_text.AUTO:
        raise UserError(f"--save: {text.source} is not the model's own text; give it to --data-dir as it is")
    lines = [
        json.dumps(record, ensure_ascii=False) + "\n" for record in general_writing.records(text.documents, tokenizer)
    ]
    if not lines:
        raise UserError(
            f"--save {file}: of {len(text.documents)} texts none has a whole sentence; raise --general-tokens"
        )
    with replacing(file) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")
    say(f"{counted(len(lines), 'text')} saved in {file}", make_console(stderr=True))


def facts_of(text: "GeneralText", tokenizer: Any) -> dict[str, Any]:
    """The counts that ``--json`` prints."""
    from granite_scu.evaluation.general_writing import has_end  # late, as above

    parts = text.parts()
    return {
        "source": text.source,
        "documents": len(text.documents),
        "tokens": sum(len(document.tokens) for document in text.documents),
        "counted_tokens": text.n_counted,
        "ended_documents": sum(has_end(document, tokenizer) for document in text.documents),
        "repeated_documents": len(text.documents) - len(set(text.documents)),
        "document_tokens": percentiles([len(document.tokens) for document in text.documents]),
        "parts": {
            name: sum(document.n_counted for document in part)
            for name, part in (("anchor", parts.anchor), ("steering", parts.steering), ("held_out", parts.held_out))
        },
    }


def describe(facts: dict[str, Any]) -> dict[str, str]:
    """The counts in words, by the name of each row."""
    tokens, parts = facts["document_tokens"], facts["parts"]
    return {
        "model": facts["model"],
        "text": "written by the model" if facts["source"] == "auto" else facts["source"],
        "documents": f"{facts['documents']:,}, of which {facts['ended_documents']:,} have their end and "
        f"{facts['repeated_documents']:,} repeat another",
        "tokens": f"{facts['tokens']:,}, of which {facts['counted_tokens']:,} are counted: {parts['anchor']:,} anchor, "
        f"{parts['steering']:,} steer, {parts['held_out']:,} are held out",
        "length": f"{tokens['p50']:,} tokens in the middle; 10 % have at most {tokens['p10']:,}, 90 % at most "
        f"{tokens['p90']:,}, the longest has {tokens['p100']:,}",
    }


def percentiles(lengths: ArrayLike) -> dict[str, int]:
    """``SHARES`` of some lengths, by name."""
    found = np.percentile(lengths, SHARES, method="nearest").astype(int)
    return {f"p{share}": int(value) for share, value in zip(SHARES, found, strict=True)}


def marked(tokens: Any, learned: Any, tokenizer: Any, console: Console) -> Text:
    """Tokens as text, with what is learned or counted in bold, and in quotes where the output is no terminal."""
    tokens, learned, shown = np.asarray(tokens), np.asarray(learned), Text()
    changes = [0, *(np.flatnonzero(learned[1:] != learned[:-1]) + 1).tolist(), len(learned)]
    for begin, end in pairwise(changes):
        text = printable(tokenizer.decode(tokens[begin:end].tolist()))
        if learned[begin]:
            shown.append(text if console.is_terminal else f"«{text}»", style="bold green")
        else:
            shown.append(text, style="dim")
    return shown
