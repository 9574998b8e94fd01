"""``granite-scu data inspect``: what a run would train on, before it does."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from granite_scu.cli import inspect_general, script_flags, validate
from granite_scu.cli.console import make_console, print_facts, quiet
from granite_scu.cli.inspect_general import SHOWN, marked, percentiles
from granite_scu.config import flags
from granite_scu.config.errors import UserError
from granite_scu.config.settings import SEED, BaseConfig, DataConfig, TrainerConfig, check_model
from granite_scu.control.units import counted, per_cent

SPLITS = {"train": "training", "validation": "validation", "test": "test"}
"""What each split is called."""

DIVIDED = {
    "document": "divided by document",
    "block": "divided by block, for documents are too few or too uneven",
    "published": "divided as it comes",
    "files": "all of it to train on",
    "nothing": "all of it to train on, and nothing held out",
}
"""How a text is divided, by the name of the way."""

DEFAULT_MODEL = BaseConfig.name
"""That of a run: another tokenizer counts other tokens, and another template lays chats out otherwise."""

EXAMPLES = (
    "inspect my_texts/",
    "inspect --data-dir chats.jsonl --block-size 1024 --samples 5",
    "inspect --data-dir chats.jsonl --model tiny-granite-h --json",
    "inspect --general --model tiny-granite-h",
)

SETTINGS = {
    "text": ("--data-dir", "--validation-data", "--test-data", "--held-out-share", "--data-weights", "--text-column",
             "--record-format", "--encoding", "--split-seed", "--cache-dir"),
    "conversations": ("--chat-template", "--chat-template-args", "--system", "--control-tokens", "--loss-on"),
    "blocks": ("--block-size", "--packing", "--on-long"),
}  # fmt: skip
"""Flags of training that say how text is read and cut, by the title above them."""

COMMONEST = (
    "--model", "--data-dir", "--text-column", "--record-format", "--chat-template", "--block-size", "--samples",
    "--json",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of training that concern the text, and what is shown of it."""
    parser.add_argument("what", metavar="inspect", type=_what, help="counts, lengths and samples of a text")
    parser.add_argument("files", nargs="*", metavar="FILE", help="texts, as --data-dir")
    for title, names in SETTINGS.items():
        group = parser.add_argument_group(title)
        if title == "text":
            group.add_argument("--model", metavar="NAME",
                               help=f"whose tokenizer and template (default: {DEFAULT_MODEL})")  # fmt: skip
        for name in names:
            dest = flags.FLAGS[name].key.removeprefix("data.")
            group.add_argument(name, dest=dest, default=argparse.SUPPRESS, **script_flags.argument(flags.FLAGS[name]))
    general = parser.add_argument_group("general text, on which drift is measured")
    general.add_argument("--general", action="store_true", help="show it instead: what the model writes by itself, or "
                         "what is taken of FILE; a run's is RUN/general.jsonl")  # fmt: skip
    tokens = flags.FLAGS["--general-tokens"]
    general.add_argument(tokens.name, default=tokens.default, **script_flags.argument(tokens))
    general.add_argument("--save", type=Path, metavar="FILE", help="write it as chats, or texts, to train on; of what "
                         "has no end whole sentences")  # fmt: skip
    general.add_argument("--seed", type=int, default=SEED, metavar="INT", help=f"of a run (default: {SEED})")
    output = parser.add_argument_group("output")
    output.add_argument("--samples", type=int, default=3, metavar="INT", help="blocks to show (default: 3)")
    output.add_argument("--json", action="store_true", help="print the counts as JSON, no samples")


def _what(word: str) -> str:
    if word != "inspect":
        raise UserError(f"data {word}: there is no such command; there is granite-scu data inspect")
    return word


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    if options.samples < 0:
        raise UserError(f"--samples {options.samples}: must not be negative")
    if options.files:
        options.path = [*options.files, *getattr(options, "path", [])]
    names = {field for field in DataConfig.__dataclass_fields__ if hasattr(options, field)}
    config = DataConfig(**{name: getattr(options, name) for name in names})
    validate.check_data(config, begins=not options.general)
    if options.general:
        return inspect_general.run(options, config)
    if options.save:
        raise UserError("--save: writes general text; add --general")
    options.model = options.model or DEFAULT_MODEL
    check_model(options.model)
    # Late: torch takes seconds.
    from granite_scu.data.datamodule import TextDataModule
    from granite_scu.data.tokens import templates
    from granite_scu.data.tokens.encoding import beginning
    from granite_scu.model import loading
    from granite_scu.training.defaults import Usual
    from granite_scu.training.fitting import cut_to_fit

    quiet(make_console(stderr=True))
    data = TextDataModule(config, seed=0)
    tokenizer = templates.of_data(loading.load_tokenizer(options.model), data.config)
    model = loading.known_config(options.model)
    data.read(tokenizer, loading.embedding_rows(model), options.model)
    usual = Usual(config.batch_size, TrainerConfig.accumulate_grad_batches, config.block_size)
    cut_to_fit(data, tokenizer, model, usual, "block_size" in names)
    begins = {"text_begins_with": tokenizer.decode(beginning(tokenizer))}
    facts = {"model": options.model, **begins, **data.summary(), "document_tokens": lengths(data)}
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    console = make_console()
    print_facts("what would be trained on", describe(facts, data.on_long), console)
    console.print("samples of the training blocks: [bold green]learned[/], [dim]not learned[/], | between documents")
    for index in range(min(options.samples, len(data.train))):
        _show_block(data, index, tokenizer, console)
    return 0


def describe(facts: dict[str, Any], on_long: str) -> dict[str, str]:
    """The counts in words, by the name of each row; of what is left out only what there is.

    Args:
        facts: as ``--json`` has them.
        on_long: what becomes of long documents.
    """
    from granite_scu.data.blocks.filtering import BECOMES, CUT  # late: torch
    from granite_scu.data.sources.record_formats import LABELS

    kind, tokens, unlearned, cut = (
        facts[name] for name in ("kind", "document_tokens", "unsupervised_documents", "cut_answers")
    )
    divided = DIVIDED[facts["split_by"]]
    long = f"{counted(facts['long_documents'], kind)}: {BECOMES.get(on_long)} (--on-long)"
    omitted = (
        counted(facts["empty_documents"], "empty document"),
        counted(facts["copies_left_out"], "repeated document"),
        counted(facts["gap_blocks"], "block") + " between the splits",
        counted(facts["dropped_tokens"], "token"),
        counted(unlearned, kind) + " without anything to learn",
    )
    rows = {
        "tokenizer": facts["model"],
        "text": f"{facts['path']}, {divided}",
        "read as": ", ".join(f"{LABELS[name]}: {count:,}" for name, count in facts["record_formats"].items()),
        **{
            name: _split(facts[split], kind, facts["block_size"], "learn" if split == "train" else "measure on")
            for split, name in SPLITS.items()
        },
        **({"test": "the same as validation"} if facts["test_is_validation"] else {}),
        f"length of a {kind}": f"{tokens['p50']:,} tokens in the middle; 10 % have at most {tokens['p10']:,}, 90 % at "
        f"most {tokens['p90']:,}, the longest has {tokens['p100']:,}",
        "a text begins with": f"{facts['text_begins_with']} (the tokenizer's own; a chat as its template says)"
        if facts["text_begins_with"]
        else "",
        "longer than a block": long if facts["long_documents"] else "",
        "cut answers": f"{counted(cut, 'answer')}; such {CUT.get(on_long)} (--on-long)" if cut else "",
        "left out": ", ".join(words for words in omitted if not words.startswith("0 ")),
    }
    return {name: text for name, text in rows.items() if text}


def _split(counts: dict[str, Any], kind: str, block_size: int, use: str) -> str:
    if not counts["documents"]:
        return "none: nothing is held out"
    copies = f", {counts['copies']:,} of them copies" if counts["copies"] else ""
    documents = f"{counted(counts['documents'], kind)}{copies} ({decimal(counts['bytes'], precision=2)})"
    blocks = f"{counted(counts['blocks'], 'block')} of {block_size}, {per_cent(counts['utilisation'])} full"
    return f"{documents}: {counts['supervised_tokens']:,} tokens to {use}, in {blocks}"


def lengths(data: Any) -> dict[str, int]:
    """Percentiles of the tokens of a document, over all of them."""
    bounds = data.train.stream.bounds
    return percentiles(bounds[:, 1] - bounds[:, 0])


def _show_block(data: Any, index: int, tokenizer: Any, console: Console) -> None:
    """A block as text, with what is learned in bold, and in quotes where the output is no terminal."""
    blocks, shown = data.train, Text()
    stream = blocks.stream
    for number, (start, stop) in enumerate(blocks.spans_of(index).tolist()):
        stop = min(stop, int(stream.ends[np.searchsorted(stream.ends, start)])) + 1  # the last label
        learned = np.append(False, stream.targets[start + 1 : stop])  # no position of the block predicts its first
        shown.append(" | " if number else "", style="bold red")
        shown.append_text(marked(stream.tokens[start:stop], learned, tokenizer, console))
        if len(shown) > SHOWN:
            break
    console.print(Text.assemble((f"block {index}: ", "bold"), shown[:SHOWN], "..." if len(shown) > SHOWN else ""))
