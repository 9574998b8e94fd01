"""What the run folder says of a run from its start: the whole of its settings, and the controller's."""

from dataclasses import asdict

from granite_scu.storage.provenance import git_revision, versions
from granite_scu.training.prepared_run import PreparedRun


def scu_config(run: PreparedRun) -> dict:
    """The controller as it starts, and what it measures: ``scu_config.json``."""
    config = run.request.control
    return {
        "controller": config.controller,
        "target_s": run.controller.setpoint,
        "initial_strength": run.controller.initial_strength,  # what acts before the first record of the history
        **asdict(run.controller),
        "control_every": config.every,
        "measure": config.measure,
        "actuator": config.actuator,
        "prior_sigma": run.request.prior.sigma,
        "n_tokens": run.length.n_tokens,
        **({"auto": run.found} if run.found else {}),
    }


def training_config(run: PreparedRun) -> dict:
    """Settings, plan, data, machine and versions: ``training_config.json``."""
    request = run.request
    groups = ("base", "lora", "optimizer", "prior", "data", "control", "run")
    resolved = asdict(request.control) | {"target_s": run.controller.setpoint, "auto": run.found}
    return {
        **{name: asdict(getattr(request, name)) for name in groups},
        **({"control": resolved} if run.found else {}),
        **({"start": run.start.record()} if run.start else {}),
        "trainer": {k: v for k, v in request.trainer.items() if isinstance(v, str | int | float | None)},
        "seed": request.seed,
        "hardware_preset": request.hardware,
        "plan": asdict(run.length),
        "data_summary": run.data.summary(),
        "machine": asdict(run.machine),
        "versions": versions(),
        "git_revision": git_revision(),
    }
