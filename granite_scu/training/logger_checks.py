"""What a logger of ``--logger`` needs before a run starts: that it is installed, and that somebody is logged in."""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec

from granite_scu.config.errors import UserError

NEEDED = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "trackio": ("trackio",)}
"""The modules that each logger needs; of mlflow with those of its store on this machine."""

STORES = ("http", "https", "databricks", "databricks-uc", "uc", "sqlite", "mysql", "postgresql", "mssql")
"""Kinds of MLflow's address: servers and databases. Plain files it no longer writes."""


def check_loggers(names: Sequence[str], offline: bool) -> None:
    """Refuse loggers that cannot log. Asks nobody, neither the network nor the user.

    Args:
        names: of the loggers.
        offline: whether they keep to this machine.

    Raises:
        UserError: one is not installed, wandb refuses its settings or knows no key for a run that is not offline, or
            MLflow's address is no server and no database.
    """
    for name in names:
        if missing := [module for module in NEEDED[name] if not _is_installed(module)]:
            raise UserError(f"--logger {name}: {missing[0]} is not installed; pip install 'granite-scu[{name}]'")
    if "wandb" in names and not _wandb_can_log(offline):
        raise UserError(
            "--logger wandb: nobody is logged in; log in with: wandb login, or log on this machine alone with "
            "WANDB_MODE=offline"
        )
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    kind = uri.partition(":")[0].partition("+")[0]
    if "mlflow" in names and not offline and uri and kind not in STORES:
        shown = re.sub("//.*@", "//***@", uri)  # it may hold a password
        raise UserError(
            f"--logger mlflow: MLFLOW_TRACKING_URI {shown}: is neither a server (https://...) nor a database "
            "(sqlite:///mlflow.db), and MLflow no longer writes plain files; unset it to log into the run folder"
        )


def _is_installed(module: str) -> bool:
    found = find_spec(module)
    return found is not None and found.origin is not None  # a folder ./wandb, as wandb makes it, is no package


def _wandb_can_log(offline: bool) -> bool:
    """Whether wandb has a key, or needs none."""
    import wandb

    try:
        mode = wandb.setup().settings.mode
    except (ValueError, wandb.errors.Error) as error:  # the former is pydantic's
        raise UserError(
            f"--logger wandb: it refuses its settings ({' '.join(str(error).split())}); correct the environment's "
            "WANDB_ variables"
        ) from error
    if offline or mode != "online":
        return True
    try:
        return wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError as error:
        raise UserError(f"--logger wandb: {error}; log in with: wandb login") from error
