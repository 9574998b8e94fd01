"""What of a run folder is published, checked and made safe to publish; everything else stays where it is."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from granite_scu.config.errors import UserError, attempt
from granite_scu.config.settings import TINY_MODEL, is_local
from granite_scu.config.untrusted_input import only_files
from granite_scu.export.publish import leaks, model_card
from granite_scu.model.adapter_files import check_adapter
from granite_scu.storage.run_folder import (
    ADAPTER_CONFIG,
    ANSWERS,
    BEST_ADAPTER,
    CONTROL_CONFIG,
    DOCUMENTS,
    ELSEWHERE,
    GENERAL,
    HISTORY,
    HISTORY_LINES,
    LAST_ADAPTER,
    METRICS,
    MODEL_CARD,
    NAMED_TEMPLATES,
    SAMPLES,
    STOPPED,
    TRAINING_CONFIG,
    WEIGHTS,
    as_json,
    read_json,
)
from granite_scu.storage.working_folder import found_from_here

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
REQUIRED = (
    WEIGHTS,
    ADAPTER_CONFIG,
    *TOKENIZER,
    CONTROL_CONFIG,
    METRICS,
    HISTORY,
)
PICTURES = ("control.png", "control.svg")
"""Drawn again from the history: what else a file of the folder may hold stays there."""
OPTIONAL = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
PUBLISHED = (MODEL_CARD, *REQUIRED, *PICTURES, *OPTIONAL)
"""Everything that is ever uploaded, but for the templates by name. The card is built again."""

KEPT = (
    *("config.yaml", TRAINING_CONFIG, DOCUMENTS, "eval_bpt.*", HISTORY_LINES, STOPPED, "report.html"),
    *(SAMPLES, ANSWERS, ELSEWHERE, GENERAL),
    *("identification.*", "logs", BEST_ADAPTER, LAST_ADAPTER, "checkpoint-*"),
)
"""What a run leaves besides: with paths of the machine, or pickles, or of no use to others."""

_UNFINISHED = "the run is not finished; continue it with --resume-from-checkpoint last"


@dataclass(frozen=True)
class Publication:
    """What will be uploaded, in memory: just what was checked.

    Attributes:
        files: content by name, the card first.
        base: hub id of the base model, or the embedded model's name.
        left_out: names in the run folder that stay there.
        notes: what the publisher should know before.
        counts: of the adapter, ``layers`` and ``parameters``.
    """

    files: Mapping[str, bytes]
    base: str
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    counts: Mapping[str, int]

    @property
    def card(self) -> str:
        return self.files[MODEL_CARD].decode()


def prepare(
    folder: Path, repo_id: str, revision: str | None = None, base_id: str | None = None, licence: str | None = None
) -> Publication:
    """Read a run folder, check all that is to be published, and build the card. Writes nothing.

    Args:
        folder: of a finished run.
        repo_id: where it will be, ``owner/name``.
        revision: the branch, where it is not the main one.
        base_id: hub id of a base model that was trained from a local folder.
        licence: hub identifier of the adapter's licence; None takes that of a known base.

    Raises:
        UserError: no finished run, an adapter that is not whole, a base nobody else can find, an unknown licence, or
            something that must not be published.
    """
    left_out = _survey(folder)
    named = sorted(f"{NAMED_TEMPLATES}/{path.name}" for path in (folder / NAMED_TEMPLATES).glob("*.jinja"))
    files = {name: _content(folder, name) for name in (*REQUIRED, *OPTIONAL, *named) if (folder / name).exists()}
    facts = model_card.gather(folder)
    config = read_json(folder / ADAPTER_CONFIG, files[ADAPTER_CONFIG])
    try:
        counts = check_adapter(files[WEIGHTS], config)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from error
    base = _base(folder, facts["base_model"], config.get("base_model_name_or_path"), base_id)
    if base != config["base_model_name_or_path"]:
        files[ADAPTER_CONFIG] = as_json(config | {"base_model_name_or_path": base}).encode()
    if licence is None and model_card.known_license(base) is None:
        raise UserError(
            f"--license: needed, since the licence of {base} is not known here; name the one under which its terms "
            "let you publish the adapter, as the hub writes it (apache-2.0)"
        )
    try:
        facts |= {"base_model": base, "repo_id": repo_id, "revision": revision, "license": licence}
        evaluation, problem = attempt(model_card.evaluation_of, folder)
        facts["evaluation"] = evaluation
        files = {MODEL_CARD: model_card.model_card(facts).encode(), **files, **pictures_of(folder)}
        notes = tuple(_notes(facts))
    # Values are of a kind that no run has written.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
        raise UserError(
            f"{folder}: its JSON files are not as a run has written them ({type(error).__name__}: {error}); copy the "
            "folder again"
        ) from error
    # All of them at once: what has leaked must not wait behind another refusal.
    found = [attempt(_check_content, folder, name, content)[1] for name, content in files.items()]
    if problems := [*filter(None, [*found, problem])]:
        raise UserError("; and ".join(problems))
    return Publication(files, base, tuple(left_out), notes, counts)


def _survey(folder: Path) -> list[str]:
    """The names that stay; refuses a folder that holds no finished run, or what nobody publishes knowingly."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the --output-dir of a run")
    if not (folder / TRAINING_CONFIG).is_file():
        raise UserError(
            f"{folder}: holds no {TRAINING_CONFIG}, so it is not a run folder; name the --output-dir of a run"
        )
    only_files(folder)
    for name in REQUIRED:
        if not (folder / name).is_file():
            remedy = _UNFINISHED if name in (METRICS, HISTORY) else "the run folder is not complete"
            raise UserError(f"{folder}: {name} is missing; {remedy}")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name not in (*PUBLISHED, NAMED_TEMPLATES))
    for name in names:
        if any(fnmatch(name, pattern) for pattern in KEPT):
            continue
        if name.lower().endswith(leaks.PICKLES):
            raise UserError(
                f"{folder / name}: may be a pickle, which runs code when it is loaded; move it out of the folder"
            )
        if leaks.is_secret_name(name):
            raise UserError(f"{folder / name}: looks like a secret by its name; move it out of the folder")
    return names


def _content(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{path}: is a link to a file outside the run folder; put the file itself there")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def pictures_of(folder: Path) -> dict[str, bytes]:
    """The run's pictures, by name: the same run gives the same bytes."""
    from granite_scu.viz.control_plot import plot_control  # late: Matplotlib
    from granite_scu.viz.run_folder import read_run
    from granite_scu.viz.style import as_designed, save

    with tempfile.TemporaryDirectory() as drawn, as_designed():
        return {file.name: file.read_bytes() for file in save(plot_control(read_run(folder)), Path(drawn) / "control")}


def _base(folder: Path, of_run: str, of_adapter: str | None, given: str | None) -> str:
    """The base model as strangers find it."""
    if of_run != of_adapter:
        raise UserError(
            f"{folder}: {ADAPTER_CONFIG} names the base model {of_adapter}, the run trained on {of_run}; "
            "one of the files is of another run"
        )
    local = is_local(found_from_here(of_run, folder))
    if given is None and local:
        raise UserError(
            f"--base-model-id: needed, since the base model {of_run} is on this machine only; "
            "name the same model on the hub (owner/name)"
        )
    if given is not None and not local and given != of_run and of_run != TINY_MODEL:
        raise UserError(f"--base-model-id {given}: the run trained on {of_run}; leave the flag out")
    return given or of_run


def _check_content(folder: Path, name: str, content: bytes) -> None:
    """Refuse a file that holds a credential or a path of this machine."""
    if name.endswith(".png"):
        return
    if name == WEIGHTS:  # of a tensor file the header is text
        content = content[8 : 8 + int.from_bytes(content[:8], "little")]
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{folder / name}: is not text in UTF-8, as its kind of file is") from error
    if found := leaks.secret_in(text, os.environ):
        line, kind = found
        raise UserError(f"{folder / name}:{line}: looks like {kind}; remove it, and revoke it if others saw it")
    places = {"the text": text} if name in (MODEL_CARD, WEIGHTS) else {}
    if name.endswith(".json"):
        value = read_json(folder / name, content, list if name == HISTORY else dict)
        if name == "tokenizer.json":  # its vocabulary may well hold strings that look like paths
            value = {key: entry for key, entry in value.items() if key not in ("model", "added_tokens")}
        places = dict(leaks.strings(value))
    for place, words in places.items():
        # A chat template is a program in which any text may occur, and it comes with the base model.
        if place != "chat_template" and (path := leaks.local_path_in(words)):
            raise UserError(f"{folder / name}: {place} names {path}, a path of this machine; remove it from the file")


def _notes(facts: Mapping[str, Any]) -> list[str]:
    summary = facts["summary"]
    base, adapter = summary.get("base_test_bpt"), summary.get("adapter_test_bpt")
    notes = []
    if base is not None and adapter is not None and adapter >= base:
        notes.append(
            f"the adapter is no better than its base on held-out documents: {adapter:.4f}, {base:.4f} bits per token"
        )
    if facts["base_model"] == TINY_MODEL:
        notes.append(f"the base model {TINY_MODEL} is not on the hub: who has no granite-scu cannot load the adapter")
    if facts["evaluation"] is None:
        notes.append("no interval: granite-scu eval has not scored this folder")
    return notes
