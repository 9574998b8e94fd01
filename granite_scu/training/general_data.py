"""The general text of a run: written by its base model, read from the user's files, or as the run had it before."""

import logging
import os

import lightning as L
from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.data.datamodule import TextDataModule
from granite_scu.data.sources.read import is_path
from granite_scu.evaluation import answers, general_text, general_writing
from granite_scu.evaluation.general_text import GeneralText
from granite_scu.model import base_digest
from granite_scu.model.compilation import evaluation_mode
from granite_scu.storage.run_folder import GENERAL, TRAINING_CONFIG, read_if_there
from granite_scu.storage.working_folder import matches
from granite_scu.training.module import GraniteModule
from granite_scu.training.prepared_run import PreparedRun
from granite_scu.training.resume import Resume

log = logging.getLogger(__name__)


def read(
    request: Request,
    resume: Resume | None,
    data: TextDataModule,
    tokenizer: PreTrainedTokenizerBase,
    rows: int | None,
    sharded: bool,
) -> GeneralText | None:
    """The general text of a run, before its model is loaded; None where it holds no drift, or the base model writes it.

    Args:
        request: what is asked for.
        resume: the checkpoint that the run continues from: it has the text that it had before.
        data: that is trained on.
        tokenizer: of the model, with the chat template in use.
        rows: of the model's embedding; None where nobody knows.
        sharded: whether no process has all of the weights.

    Raises:
        UserError: the text cannot be read, is too short, of another template or not the one that the run has had, or
            the model cannot write one.
    """
    if not request.drift.max_drift:
        return None
    asked, files, kept = request.drift, request.drift.general_files, resume and resume.path.parent / GENERAL
    if kept and kept.is_file():
        before = general_text.read(kept, tokenizer, rows)
        gone = bool(files) and not any(map(_is_there, files))
        if gone:
            log.warning("--general-data %s: is not there; the run goes by its own copy, %s", " ".join(files), kept)
        if gone or not files or " ".join(files) == before.source:
            recorded = read_if_there(kept.with_name(TRAINING_CONFIG)).get("drift", {})
            if (tokens := asked.general_tokens) != recorded.get("general_tokens", tokens):
                log.warning("--general-tokens %d: has no effect, for the run keeps the text it has, %s", tokens, kept)
            return _as_before(before, resume)
    if files:
        division = getattr(data, "division", None)  # a stream has none
        trained_on = division and division.trained_on
        found = general_text.of_files(
            files, request.data, tokenizer, asked.general_tokens, request.seed, rows=rows, trained_on=trained_on
        )
        return _as_before(found, resume, f"--general-data {' '.join(files)}", "give --general-data auto")
    if sharded:
        raise UserError("--general-data auto: with --fsdp no process has all of the weights, which writing takes; "
                        "give files of text or chats by --general-data")  # fmt: skip
    general_writing.check_template(tokenizer)
    return None


def _is_there(source: str) -> bool:
    """Whether files of text are where a source says; what the hub has may be."""
    return not is_path(source) or matches(os.path.expanduser(source))


def obtain(run: PreparedRun, trainer: L.Trainer, module: GraniteModule) -> GeneralText:
    """The general text of a run, which the run folder keeps: a run that is continued has the same one.

    Raises:
        UserError: there is none to be had.
    """

    def find() -> GeneralText:
        with module.as_it_began(), module.precision(), evaluation_mode(module.model):
            found = _find(run, module)
        found.write(run.folder.path / GENERAL, run.tokenizer)
        return found

    return general_text.of_first_process(trainer.is_global_zero, find)


def _find(run: PreparedRun, module: GraniteModule) -> GeneralText:
    if run.general:
        return run.general
    # Of an adapter to start from the base's files say nothing: what is written with it is not kept for others.
    base = None if run.start else base_digest.record(run.request.base.name)
    asked, seed = run.request.drift, run.request.seed
    found = general_writing.general_text(
        module.language_model, run.tokenizer, asked.general_tokens, seed, run.console, base, _questions(run)
    )
    return _as_before(found, run.resume)


def _as_before(
    text: GeneralText, resume: Resume | None, where: str = "", remedy: str = "restore the file"
) -> GeneralText:
    """The text, where it is the one that the checkpoint's run has had. Raises UserError, which names ``where``."""
    if resume and resume.general not in (None, text.digest):
        raise UserError(
            f"{where or resume.path.parent / GENERAL}: is not the general text that the run has had, which decides "
            f"what each of its steps is; {remedy}, or start another run"
        )
    return text


def _questions(run: PreparedRun) -> list[str]:
    """A sample of those that are trained on; of a stream, and of texts, none."""
    if not run.data.chats or not (blocks := getattr(run.data, "train", None)) or run.request.data.stream:
        return []
    found = answers.questions_of(
        blocks.stream, run.tokenizer, answers.beginning_in(blocks), general_writing.BATCH, run.request.seed
    )
    return [question.text for question in found]
