"""Step lambda in a real run, model what S does, propose gains, and try them."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from granite_scu import control
from granite_scu.config.errors import FAILED, RunFailed, UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import DEFAULT_EVERY, ControlConfig
from granite_scu.export.present import write_report_on_exit
from granite_scu.storage.run_folder import RunFolder, finite
from granite_scu.training.prepared_run import PreparedRun
from granite_scu.training.recipe import prepare, train
from research.identification import agreement
from research.identification.excitation import Excitation
from research.identification.fopdt import Fopdt
from research.identification.fopdt_fit import Fit, fit_fopdt
from research.identification.setpoint_step import SetpointStep
from research.identification.settings import StepTest
from research.identification.simc import Gains, effective, simc
from research.identification.stability import margins
from research.identification.step_response import Step, describe_step, step_response

RESULT = "identification.json"
OFF_SETPOINT = 0.25
"""How far S may lie from S*, in ln S, when lambda is first stepped: gain and time constant are those of that S."""
FOLLOW = 30
"""Ticks, at the least, that the verification lasts after the step."""


def identify(request: Request, config: StepTest, console: Console, as_json: bool = False) -> int:
    """Carry out the experiment and report it; returns the exit code, 1 where no gains could be proposed.

    A closed loop that did not behave as predicted is a finding and no failure: the exit code stays 0, a warning says
    in what it differed, and ``as_predicted`` of the result is false.

    Raises:
        UserError: the request cannot be met.
        RunFailed: a run ended before its experiment was over.
    """
    request = request.with_values({"control.every": request.control.every or DEFAULT_EVERY})
    law = _law(request.control, request.run.resume, config.amplitude, config.step)
    folder = RunFolder(request.run.output_dir)
    excitation = Excitation(law, config.settle, config.amplitude, config.dwell, request.seed)
    test = _experiment(request, "excitation", config.ticks, excitation, console)
    # Refused now and not after the step test, which is the half of the work.
    if config.verify:
        RunFolder(folder.path / "verification").check(request.run.overwrite, resuming=False)

    result: dict[str, Any] = {"setpoint": law.setpoint, "control_every": request.control.every}
    result |= {"step_test": asdict(config), "ema_alpha": law.ema_alpha, "verification": None}
    result["as_predicted"] = None  # not tried, or too noisy to tell
    history = _train(test, config.ticks)
    try:
        fit = fit_fopdt(_column(history, "lambda"), _column(history, "s"), start=config.settle)
    except ValueError as error:
        raise RunFailed(f"the step test cannot be evaluated: {error}") from error
    result |= _found(history, fit) | {"cautions": _cautions(history, fit.caution, law.setpoint, config.settle)}
    if fit.objection is None:
        # No filter in the loop: the law takes ParamBPT as it is and smooths DataBPT alone, which lambda hardly moves.
        seen = _in_logit(fit.model, law.setpoint)
        gains = simc(effective(seen), config.tau_c)
        result |= _proposal(seen, gains, config.step)
        if config.verify:
            # Lambda is named, so that its feed-forward does not move with S*: the prediction is of the gains alone.
            proposed = replace(law, kp=gains.kp, ki=gains.ki, lambda_init=law.lambda_start)
            ticks = config.settle + _follow(config, proposed, fit.model)
            stepped = SetpointStep(proposed, config.settle, config.step)
            # A seed of its own, so that it does not meet the noise that the model was fitted to.
            measured = _train(_experiment(request, "verification", ticks, stepped, console, shift=1), ticks)
            result |= _judged(config.settle, config.step, proposed, fit, history, measured)
    result["verdict"] = _verdict(result)
    folder.write_json(RESULT, result)
    from granite_scu.viz.style import drawing, save
    from research.identification.plot import plot_identification, read_identification

    with drawing("the picture", f"python -m research.identification.plot {folder.path}"):
        save(plot_identification(read_identification(folder.path)), folder.path / "identification")
    print(json.dumps(finite(result), indent=2)) if as_json else _print(result, folder.path, console)
    for caution in result["cautions"]:
        console.print(f"warning: {caution}", highlight=False, soft_wrap=True)
    if fit.objection is not None:
        console.print(f"no gains are proposed: {fit.objection}", highlight=False, soft_wrap=True)
        return FAILED
    if result["as_predicted"] is False:
        console.print(f"warning: {result['verdict']}", highlight=False, soft_wrap=True)
    return 0


# The experiment


def _law(asked: ControlConfig, resume: str | None, amplitude: float, factor: float) -> control.PI:
    """The law that finds the operating point."""
    if asked.controller not in control.CONTROLLERS:
        asked.law()  # says which there are
    if asked.target_s is None:
        raise UserError("--control.target_s: identify works at one operating point; give a ratio, for example 0.02")
    if asked.controller != "pi":
        raise UserError(
            f"--control.controller {asked.controller}: identify finds gains of pi; give --control.controller pi"
        )
    if not asked.target_s * factor < 1:
        raise UserError(f"--step_test.step {factor}: takes S* {asked.target_s} beyond 1; choose a smaller one")
    low, high = asked.lambda_min, asked.lambda_max
    if not math.log(high / low) >= 2 * amplitude:
        raise UserError(
            f"--control.lambda_min {low:g}, --control.lambda_max {high:g}: leave no room for steps of "
            f"--step_test.amplitude {amplitude:g} up and down, a factor of {math.exp(2 * amplitude):.3g}"
        )
    if resume:
        raise UserError(f"--run.resume {resume}: a step test cannot be continued; leave it out")
    return asked.law()


def _experiment(
    request: Request, name: str, ticks: int, controller: control.Controller, console: Console, shift: int = 0
) -> PreparedRun:
    """A run of so many ticks under that controller, in a folder of its own.

    The learning rate keeps its peak after the warm-up. A falling one slows the plant down while it is being
    looked at, and the peak is where the loop is fastest and its margins are smallest.
    """
    steps = ticks * request.control.every
    run = replace(
        request.run,
        output_dir=str(RunFolder(request.run.output_dir).path / name),
        eval_steps=steps,  # what the adapter is worth is not the question
        save_steps=steps,
        samples=0,
        early_stopping=None,
        stop_at_equilibrium=None,
    )
    asked = replace(
        request,
        optimizer=replace(request.optimizer, schedule="constant"),
        data=replace(request.data, num_epochs=None),
        run=run,
        trainer=replace(request.trainer, max_steps=steps),
        seed=request.seed + shift,
        given=request.given | {"trainer.max_steps", "control.every", "run.eval_steps"},
    )
    prepared = replace(prepare(asked, console), controller=controller)
    if prepared.machine.world_size > 1:
        raise UserError("--run.multi_gpu: identify runs in one process, twice; leave it out")
    return prepared


def _train(run: PreparedRun, ticks: int) -> list[dict]:
    """Train, and return a record a tick."""
    with write_report_on_exit(run.folder):
        train(run)
    history = run.folder.read_history()
    if len(history) < ticks:
        raise RunFailed(
            f"{run.folder.path}: ended after {len(history)} of {ticks} ticks; give it more time (--trainer.max_time), "
            "or shorten --step_test.ticks"
        )
    return history[:ticks]


def _column(history: list[dict], name: str) -> np.ndarray:
    """(ticks,) natural logarithm of a field; NaN where it is missing or not positive."""
    values = [record[name] for record in history]
    return np.array([math.log(v) if v is not None and 0 < v < math.inf else math.nan for v in values])


def _cautions(history: list[dict], of_fit: str | None, setpoint: float, settle: int) -> list[str]:
    """What makes the model worth less at S* than its standard errors say."""
    off = float(np.nanmean(_column(history, "s_ema")[settle // 2 : settle])) - math.log(setpoint)
    found = [of_fit] if of_fit else []
    if abs(off) > OFF_SETPOINT:
        found.append(
            f"S was {math.exp(off):.2g} times S* when lambda was stepped, and the model is of the S where it was "
            "measured; let it settle for longer (--step_test.settle, --step_test.ticks)"
        )
    return found


def _found(history: list[dict], fit: Fit) -> dict[str, Any]:
    """What the step test showed, as JSON has it."""
    known = {n: {"value": getattr(fit.model, n), "standard_error": se} for n, se in fit.standard_errors.items()}
    return {
        "model": known,
        "fit": {name: getattr(fit, name) for name in ("r2", "noise", "correlation", "offset", "drift", "start")},
        "objection": fit.objection,
        "excitation": {**_course(history), "log_s_fitted": fit.fitted.tolist()},
    }


def _course(history: list[dict]) -> dict[str, list[float]]:
    """By tick."""
    steps = [record["step"] for record in history]
    return {"step": steps, **{f"log_{name}": _column(history, name).tolist() for name in ("lambda", "s")}}


def _in_logit(model: Fopdt, setpoint: float) -> Fopdt:
    """The model as the gains meet it: the law acts on the logit of S, which moves by 1 / (1 - S) for a unit of ln S."""
    return replace(model, gain=model.gain / (1 - setpoint))


def _proposal(model: Fopdt, gains: Gains, factor: float) -> dict[str, Any]:
    step = step_response(model, gains.kp, gains.ki, band=_band(factor))
    return {
        "gains": {"kp": gains.kp, "ki": gains.ki, "tau_i": gains.tau_i, "tau_c": gains.tau_c},
        "margins": asdict(margins(model, gains.kp, gains.ki)),
        "step_response": _as_json(step),
    }


def _band(factor: float) -> float:
    """Ten per cent of S, as a share of the step in ln S."""
    return 0.1 / abs(math.log(factor))


def _as_json(step: Step) -> dict[str, Any]:
    return {**asdict(step), "response": step.response.tolist()}


def _judged(
    settle: int, factor: float, law: control.PI, fit: Fit, history: list[dict], measured: list[dict]
) -> dict[str, Any]:
    """The step of S* by ``factor`` after ``settle`` ticks, measured and predicted, for JSON.

    Args:
        history: of the step test.
        measured: of the verification.
    """
    level, band = float(np.mean(_column(history, "lambda")[settle:])), _band(factor)
    shares = (_column(measured, "s_ema") - math.log(law.setpoint)) / math.log(factor)
    seen, before = shares[settle:], shares[settle // 2 : settle]
    found, expected = agreement.compare(seen, law, fit, level, factor, band)
    verification = {
        **_course(measured),
        "log_s_smoothed": _column(measured, "s_ema").tolist(),
        "at": settle,
        "measured": _as_json(describe_step(seen, band)),
        "predicted": _as_json(describe_step(expected, band)),
        "agreement": found.as_json(),
        "before": float(np.sqrt(np.nanmean(before**2))),
    }
    return {"verification": verification, "as_predicted": found.as_predicted}


def _follow(config: StepTest, law: control.PI, model: Fopdt) -> int:
    """Ticks after the step of S*: three times what the linear loop takes to settle, as far as the experiment goes."""
    linear = step_response(_in_logit(model, law.setpoint), law.kp, law.ki, ticks=200, band=_band(config.step))
    return min(config.ticks - config.settle, max(FOLLOW, 3 * (linear.settling or FOLLOW)))


# Messages


def _verdict(result: dict[str, Any]) -> str:
    if result["objection"]:
        return f"nothing is proposed: {result['objection']}"
    verification = result["verification"]
    if verification is None:
        return "gains are proposed and have not been tried"
    words, as_predicted = verification["agreement"]["words"], result["as_predicted"]
    if as_predicted:
        return f"the closed loop behaved as predicted: {words}"
    if as_predicted is None:
        return f"undecided: {words}"
    before = verification["before"]
    if before > verification["agreement"]["allowed"]["swing"]:
        words += f"; it was {before:.0%} off S* before the step too: settle for longer, or take a larger tau_c"
    return f"the closed loop did not behave as predicted: {words}"


def _print(result: dict[str, Any], folder: Path, console: Console) -> None:
    table = Table(title="what lambda does to S", title_justify="left", show_header=False)
    for name, text in _rows(result).items():
        table.add_row(name, Text(text))
    table.add_row("verdict", result["verdict"])
    table.add_row("files", Text(str(folder / RESULT)))
    console.print(table, highlight=False)


def _rows(result: dict[str, Any]) -> dict[str, str]:
    def pair(name: str, unit: str) -> str:
        known = result["model"][name]
        return f"{known['value']:.3g} +- {known['standard_error']:.2g} {unit}"

    fit = result["fit"]
    rows = {
        "gain K": pair("gain", "ln S per ln lambda"),
        "time constant tau": pair("tau", "ticks"),
        "dead time theta": pair("theta", "ticks"),
        "K / tau": pair("slope", "per tick"),
        "fit": f"R^2 {fit['r2']:.2f}, residual {fit['noise']:.3f} ln S (correlation {fit['correlation']:.2f})",
    }
    if "gains" not in result:
        return rows
    gains, margin = result["gains"], result["margins"]
    rows["proposed"] = f"--kp {gains['kp']:.3g} --ki {gains['ki']:.3g}   (SIMC, tau_c = {gains['tau_c']:.3g} ticks)"
    gain, phase, delay = ("infinite" if (v := margin[k]) is None else f"{v:.3g}" for k in ("gain", "phase", "delay"))
    unstable = "" if margin["stable"] else "; the loop is UNSTABLE"
    rows["margins"] = f"gain {gain}, phase {phase} degrees, delay {delay} ticks{unstable}"
    rows["a step of S*, linear"] = _described(result["step_response"])
    if result["verification"]:
        rows["… predicted for the law"] = _described(result["verification"]["predicted"])
        rows["… measured"] = _described(result["verification"]["measured"])
    return rows


def _described(step: dict[str, Any]) -> str:
    rise, settling = ("never" if step[name] is None else f"{step[name]} ticks" for name in ("rise", "settling"))
    return f"rise {rise}, overshoot {step['overshoot']:.0%}, within 10% of S* after {settling}"
