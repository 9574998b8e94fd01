"""Which of how many processes this one is, as its environment says: a launcher's, or Lightning's. It needs no torch."""

import os
from typing import Literal

from granite_scu.config.errors import UserError

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""Where a process's rank stands: torchrun's, Lightning's, SLURM's and Open MPI's. The first that is set counts: in a
job's script SLURM_PROCID is 0 for each process that Lightning starts."""


def number(name: str, default: int = 1, least: int = 1) -> int:
    """What a variable of a launcher says. Raises UserError where that is no whole number, or less than it can be."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{name}={text}: must be a whole number and at least {least}; unset {name}, or correct it")
    return int(text)


def ranks() -> dict[str, int]:
    """Those of ``RANKS`` that are set, in their order."""
    return {name: number(name, least=0) for name in RANKS if name in os.environ}


def rank() -> int:
    """The rank of this process among all; 0 where none is set."""
    return next(iter(ranks().values()), 0)


def local_rank() -> int:
    """The rank of this process on its machine, and the number of its GPU."""
    return number("LOCAL_RANK" if "LOCAL_RANK" in os.environ else "SLURM_LOCALID", default=0, least=0)


def launcher() -> Literal["torchrun", "slurm"] | None:
    """What started this process as one of several; None where it stands alone, or Lightning started it.

    A task of SLURM's that is the only one stands alone, as do the shell of an interactive job and a job's script: that
    has the number of tasks and a rank as well, but srun alone sets what is of a step.
    """
    if "LOCAL_WORLD_SIZE" in os.environ and "WORLD_SIZE" in os.environ:
        return "torchrun"
    is_shell = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    is_task = number("SLURM_NTASKS") > 1 and "SLURM_STEP_NUM_TASKS" in os.environ
    return "slurm" if is_task and not is_shell else None


def launched_processes() -> tuple[int, int] | None:
    """(processes on a node, nodes) that the launcher started; None where there is none."""
    match launcher():
        case "torchrun":
            local = number("LOCAL_WORLD_SIZE")
            return local, number("WORLD_SIZE", least=local) // local
        case "slurm":
            nodes = number("SLURM_NNODES")
            return number("SLURM_NTASKS", least=nodes) // nodes, nodes
    return None
