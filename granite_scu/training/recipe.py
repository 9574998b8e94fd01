"""A training run from what was asked for to the run folder, top to bottom: ``prepare``, then ``train``."""

from collections.abc import Callable
from dataclasses import replace

import lightning as L
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from granite_scu.config.progress import say
from granite_scu.config.request import Request
from granite_scu.config.settings import check
from granite_scu.data.datamodule import TextDataModule
from granite_scu.hardware.detection import Device
from granite_scu.storage.run_folder import BEST_ADAPTER, RunFolder
from granite_scu.training import batch_size, general_data, memory_budget
from granite_scu.training.assembly import assemble
from granite_scu.training.base import compile_where_it_pays, open_base, settle_machine
from granite_scu.training.callbacks.final_score import FinalScore
from granite_scu.training.continuing import check_base, check_continued, check_resumable, run_to_its_end
from granite_scu.training.controller import settle_law
from granite_scu.training.fitting import build_data, fit_to_text
from granite_scu.training.loggers import logging_to
from granite_scu.training.output_folder import is_main, locked_run_folder, open_run_folder
from granite_scu.training.preflight import announce
from granite_scu.training.prepared_run import PreparedRun, build_module, length_of
from granite_scu.training.resume import attribute_errors_to_checkpoint, open_checkpoint, with_checkpoint_settings
from granite_scu.training.trainer import given_objects


def prepare(
    request: Request,
    console: Console | None = None,
    *,
    data: TextDataModule | None = None,
    card: Device | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreparedRun:
    """Refuse what can be refused without loading a model. Makes no run folder; what it tokenises is cached.

    Args:
        request: what is asked for.
        console: where progress goes.
        data: is trained on in place of what ``request.data`` describes; not yet prepared.
        card: is planned for in place of this machine's device; such a run can be described, not trained.
        tokenizer: in place of the model's own.

    Raises:
        UserError: the request cannot be met on this machine, or its data is wrong.
    """
    # What no machine and no text can change.
    given_objects(request.trainer)

    # The checkpoint that the run continues from.
    folder = RunFolder(request.run.output_dir)
    resume = open_checkpoint(folder, request.run.resume)
    if resume:
        request = with_checkpoint_settings(request, resume)

    # The model, not yet loaded, and the machine: what is wrong with the request itself has been said by then.
    request, base = open_base(request, resume, tokenizer)
    asked = request.base
    request, machine, measured = settle_machine(request, base, card)

    # The text, and what nobody gave of blocks, steps and rate, fitted to it.
    data, console, block = data or build_data(request), console or Console(), request.data.block_size
    say(f"reading the text {request.data.named}", console)
    request, chosen = fit_to_text(request, data, base.tokenizer, base.config, machine.world_size)
    size, wanted = request.data.block_size, request.data.train_tokens
    check(wanted is None or wanted >= size, "--data.train_tokens", wanted, f"must be at least a block of {size}")
    base = base._replace(size=base.size.in_blocks(request.base.name, block, size))

    # N and the length of the run, and whether it is long enough for its layers to be compiled.
    length = length_of(request, data.epochs.mean(request.data.num_epochs), data.n_tokens, machine.world_size)
    request, machine, why = compile_where_it_pays(request, machine, base, length, asked)
    data.uniform_batches = machine.compiled

    # The micro-batch that is predicted to fit, and whether activations have to be recomputed for it.
    request = batch_size.fit_to_memory(request, machine)
    data.config = replace(data.config, batch_size=request.data.batch_size)
    at_once = (data.config.eval_batch_size or data.config.batch_size) * machine.world_size
    data.check_validation(request.trainer.limit_val_batches * at_once)

    # The law of lambda, and the general text that drift is held on.
    request, law = settle_law(request, length.steps)
    general = general_data.read(request, resume, data, base.tokenizer, base.rows, machine.sharded)
    run = PreparedRun(
        request=request,
        console=console,
        machine=machine,
        folder=folder,
        resume=resume,
        tokenizer=base.tokenizer,
        start=base.start,
        data=data,
        length=length,
        size=base.size,
        growth=base.growth(request, length.n_tokens),
        controller=law,
        general=general,
        chosen=[*measured, *chosen, *why],
    )
    if resume:
        check_continued(run, resume)
    return run


def train(
    run: PreparedRun,
    *,
    final_score: Callable[..., FinalScore] = FinalScore,
    questions: Callable[..., L.Callback] | None = None,
    resume_command: str = "the same settings, and the checkpoint to resume from",
) -> dict:
    """Train, score and write the run folder; returns the summary that ``scu_metrics.json`` holds.

    Args:
        run: the run.
        final_score: makes the callback that scores and saves at the end, of ``FinalScore``'s arguments.
        questions: makes the callback that asks ``--samples`` questions after that, of the arguments of
            ``callbacks.samples.Samples``; None asks none.
        resume_command: the command that continues the run, for whoever stops it.
    """
    L.seed_everything(run.request.seed, workers=True, verbose=False)
    with locked_run_folder(run):
        # What is found by trying.
        run.machine.claim(run.request.run.memory_fraction)
        if run.request.run.auto_batch_size:
            run = batch_size.prove(run)
        with memory_budget.explain_oom(run.request, run.machine, continues=run.resume is not None):
            # The model and its adapters.
            module = build_module(run)
            if run.resume:  # again, now that no other process has the folder
                check_resumable(run, run.resume)
            say(f"loading the model {run.request.base.name}", run.console)
            module.configure_model()
            if run.resume:
                check_base(run.resume, run.request.base.name)

            # What measures, steers, scores and saves.
            trainer, best, final, loggers = assemble(run, module, final_score, questions, resume_command)
            if run.resume:
                with attribute_errors_to_checkpoint(run.resume):
                    module.on_load_checkpoint(run.resume.state)
                    run.data.start_batch = run.resume.state["micro_batches"]

            # Only now is the folder written to: a request that is refused loses nothing.
            if is_main():
                open_run_folder(run)
                announce(run, module.language_model)
            if run.resume:
                say(f"continuing from {run.resume.path.name} at step {run.resume.step}", run.console)
                best.resume(run.resume.path / BEST_ADAPTER, write=is_main())

            # The training itself, and the score at its end.
            with logging_to(loggers, run):
                run_to_its_end(run, trainer, module)
            return final.summary
