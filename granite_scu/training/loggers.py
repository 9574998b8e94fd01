"""The loggers of ``--logger``: wandb, mlflow and trackio, none of which may stop a training.

Lightning has its own for the first two. Each is opened in the main process when the run folder is there, and continues
the run that the folder has the id of.
"""

import contextlib
import io
import logging
import os
import re
import secrets
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import constants
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from granite_scu.config.progress import say
from granite_scu.storage.run_folder import LOGGER_RUNS, read_if_there
from granite_scu.training.output_folder import is_main, scu_config
from granite_scu.training.prepared_run import PreparedRun

log = logging.getLogger(__name__)

PROJECT = "granite-scu"
"""What runs are filed under where the library's own variable names nothing else."""

FINISH_SECONDS = 120
"""What wandb may take for what it has not sent by the end of a run. It stays on the disk, for ``wandb sync``."""


class Place(NamedTuple):
    """Where a logger logs to.

    Attributes:
        logs: the folder ``logs`` of the run folder.
        name: what people call the run.
        id: what the logger calls the run that is continued; None where it is a new one.
        settings: everything that describes the run.
        offline: whether nothing may leave this machine.
    """

    logs: Path
    name: str
    id: str | None
    settings: dict[str, Any]
    offline: bool


class RunLogger(Logger):
    """One of the loggers, opened in the main process alone. A failure is reported once, and the training continues.

    Args:
        kind: ``wandb``, ``mlflow`` or ``trackio``.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self._logger: Logger | None = None

    def open(self, place: Place) -> str | None:
        """Begin, or continue, a run; returns its id, None where that failed."""
        try:
            self._logger, run = OPENERS[self.kind](place)
        except Exception as error:  # of three libraries, of theirs below them, and of the network
            return self._give_up(error)
        return run

    def close(self, status: str) -> None:
        """End the run: ``success`` or ``failed``."""
        self._do(lambda logger: CLOSERS[self.kind](logger, status))
        self._logger = None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._do(lambda logger: logger.log_metrics(dict(metrics), step))

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are logged when the run is opened."""

    def finalize(self, status: str) -> None:
        """Nothing: values may follow the last step. ``close`` comes after them."""

    @property
    def name(self) -> str:
        return self.kind

    @property
    def version(self) -> None:
        return None

    def _do(self, action: Callable[[Logger], object]) -> None:
        if self._logger is not None:
            try:
                action(self._logger)
            except Exception as error:  # as in ``open``
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._logger = None
        reason = f"{type(error).__name__}: {redacted(str(error))}"
        log.warning("--logger %s: %s; no more goes there, TensorBoard and CSV have everything", self.kind, reason)


@contextlib.contextmanager
def logging_to(loggers: Sequence[RunLogger], run: PreparedRun) -> Iterator[None]:
    """Open the loggers for a run whose folder is there, and close them at its end."""
    if not loggers or not is_main():
        yield
        return
    file, status = run.folder.path / LOGGER_RUNS, "failed"
    known = read_if_there(file)
    settings = {**yaml.safe_load(run.request.stored), "scu_config": scu_config(run)}
    for logger in loggers:
        name, offline = run.folder.path.resolve().name, run.request.run.logger_offline
        place = Place(run.folder.path / "logs", name, known.get(logger.kind), settings, offline)
        if identity := logger.open(place):
            known[logger.kind] = identity
            run.folder.write_json(LOGGER_RUNS, known)
            say(f"logging to {logger.kind}: run {identity}", run.console)
    try:
        yield
        status = "success"
    finally:
        for logger in loggers:
            logger.close(status)


def redacted(text: str) -> str:
    """A short line without what is secret: names and passwords in addresses, and values of such variables as a key's.

    >>> redacted("no answer from https://me:secret@host/x")
    'no answer from https://***@host/x'
    """
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search("KEY|TOKEN|SECRET|PASSWORD", name):
            text = text.replace(value, "***")
    return textwrap.shorten(re.sub(r"(?<=://)[^/@\s]+@", "***@", text), 300, placeholder=" ...")


def _open_wandb(place: Place) -> tuple[Logger, str]:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    settings = wandb.Settings(
        quiet=True,
        console="off",  # what is printed has the run's own log file
        save_code=False,
        disable_git=True,  # it would send the changes of a checkout that are not committed
        finish_timeout=FINISH_SECONDS,
    )
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", place.name),
        dir=place.logs,
        id=place.id or secrets.token_hex(4),
        resume="allow",
        config=place.settings,
        allow_val_change=True,
        mode="offline" if place.offline else None,
        settings=settings,
        reinit="create_new",  # a notebook may have a run of its own
    )
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run), run.id


def _open_mlflow(place: Place) -> tuple[Logger, str]:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")  # it would say how it makes its tables
    folder, uri = (place.logs / "mlflow").resolve(), os.environ.get("MLFLOW_TRACKING_URI")
    here = place.offline or not uri
    if here:
        folder.mkdir(exist_ok=True)
    logger = MLFlowLogger(
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT),
        run_name=place.name,
        tracking_uri=f"sqlite:///{folder}/mlflow.db" if here else uri,
        artifact_location=(folder / "artifacts").as_uri() if here else None,
        run_id=place.id,
    )
    if place.id is None:  # mlflow never changes one
        logger.log_hyperparams(place.settings)
    return logger, logger.run_id


def _open_trackio(place: Place) -> tuple[Logger, str]:
    name = place.id or f"{place.name}-{secrets.token_hex(2)}"  # trackio finds a run again by its name
    return TrackioLogger(name, place.settings, place.offline), name


class TrackioLogger(Logger):
    """A run of trackio, in its folder on this machine or where ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL`` say.

    Args:
        name: of the run, which continues where trackio has one of that name.
        settings: everything that describes it.
        offline: whether neither variable counts, and the hub is not asked who the user is.
    """

    def __init__(self, name: str, settings: dict[str, Any], offline: bool) -> None:
        super().__init__()
        import trackio

        hub_offline, hidden = constants.HF_HUB_OFFLINE, ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") if offline else ()
        elsewhere = {variable: os.environ.pop(variable) for variable in hidden if variable in os.environ}
        constants.HF_HUB_OFFLINE = hub_offline or offline
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.experiment = trackio.init(
                    os.environ.get("TRACKIO_PROJECT", PROJECT),
                    name,
                    config=settings,
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        finally:
            constants.HF_HUB_OFFLINE = hub_offline
            os.environ.update(elsewhere)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log(dict(metrics), step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are given at the start."""

    def finalize(self, status: str) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()

    @property
    def name(self) -> str:
        return self.experiment.project

    @property
    def version(self) -> str:
        return self.experiment.name


OPENERS: dict[str, Callable[[Place], tuple[Logger, str]]] = {
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "trackio": _open_trackio,
}

CLOSERS: dict[str, Callable[[Any, str], None]] = {
    "wandb": lambda logger, status: logger.experiment.finish(exit_code=int(status != "success")),
    "mlflow": MLFlowLogger.finalize,
    "trackio": TrackioLogger.finalize,
}
