"""Which scan and convolution the Mamba-2 layers of a run get: compiled ones that prove right here, or else ours."""

import functools
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from subprocess import PIPE

import torch

from granite_scu.config import own_python
from granite_scu.config.errors import UserError
from granite_scu.model.mamba2.mamba import TORCH, Kernels
from granite_scu.model.mamba2.packages import HUB, fla_core, from_hub, mamba_ssm, named, version_of
from granite_scu.model.mamba2.proof import Sizes, prove

log = logging.getLogger(__name__)

INSTALL = "pip install 'granite-scu[kernels]'"
INSTALLS = {"cuda": INSTALL, "hub": "pip install 'granite-scu[hub-kernels]'"}

CANDIDATES: dict[str, Callable[[], Kernels]] = {"mamba-ssm": mamba_ssm, "fla-core": fla_core, HUB: from_hub}
"""Distributions that have kernels, in the order in which they are tried. The last fetches foreign code, so that it is
tried by ``--kernels hub`` alone."""

AMPERE = (8, 0)
"""The oldest compute capability for which mamba-ssm's kernels are tried: for Turing ptxas takes minutes for each."""

PATIENCE = 540
"""Seconds after which a check is given up: less than processes that train together wait for one another."""

A_WHILE = 60
"""Seconds after each of which a line says that a check is still at work."""


def installed(request: str = "auto") -> dict[str, str]:
    """Versions of the candidates that are installed, of those that ``request`` lets be tried."""
    found = {name: version_of(name) for name in CANDIDATES if (name == HUB) == (request == "hub")}
    return {name: version for name, version in found.items() if version}


def check(request: str, device_type: str) -> None:
    """Refuse ``--kernels cuda`` and ``hub`` where there is nothing to try. Raises UserError."""
    if request not in ("cuda", "hub"):
        return
    flag = f"--kernels {request}"
    if device_type != "cuda":
        raise UserError(f"{flag}: the run is on the CPU, where compiled kernels do not run; use --kernels auto")
    if not installed(request):
        missing = "the package kernels" if request == "hub" else "neither mamba-ssm nor fla-core"
        raise UserError(f"{flag}: {missing} is {'not ' if request == 'hub' else ''}installed; {INSTALLS[request]}")


@functools.cache  # a run loads its model more than once, and is warned once
def choose(request: str, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Kernels:
    """The first candidate that proves right on ``device``, or ours.

    Args:
        request: ``torch`` takes ours; ``auto`` the first compiled ones that prove right, else ours; ``cuda`` insists
            on one of them; ``hub`` fetches those of the Hugging Face hub, and insists on them.
        device: where the layers will run.
        dtype: of their products.
        sizes: of the layers.

    Raises:
        UserError: ``cuda`` or ``hub``, and no compiled kernels are there or right.
    """
    check(request, device.type)
    if request == "torch" or device.type != "cuda":
        return TORCH
    kernels, refused = first_correct(device, dtype, sizes, request)
    if refused and kernels is TORCH and request != "auto":
        raise UserError(f"--kernels {request}: {'; '.join(refused)}; use --kernels auto, or another version")
    if refused:
        log.warning("%s; the Mamba-2 layers run in %s", "; ".join(refused), kernels.name)
    if kernels is not TORCH:
        log.info("the first step tries variants of %s at this run's size, which may take minutes", kernels.name)
    return kernels


def first_correct(
    device: torch.device, dtype: torch.dtype, sizes: Sizes, request: str = "auto"
) -> tuple[Kernels, list[str]]:
    """The first installed candidate that proves right, or ours, and what was wrong with those before it.

    Arguments as of ``choose``.
    """
    refused = []
    for name in installed(request):
        if name != "fla-core" and torch.cuda.get_device_capability(device) < AMPERE:
            refused.append(f"{named(name)} is not tried: for this GPU each kernel takes minutes to compile")
            continue
        log.info("checking %s against PyTorch; its kernels are compiled first, which may take minutes", named(name))
        fault = fault_in_subprocess(name, device, dtype, sizes)
        if fault is None:
            return CANDIDATES[name](), refused
        refused.append(f"{named(name)} failed its self-check ({fault})")
    return TORCH, refused


def fault_in_subprocess(name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> str | None:
    """What is wrong with a candidate, found in a process of its own; None when nothing is.

    A kernel that reads where it may not leaves no CUDA context behind in which anything else could run. What the check
    tunes is not kept either: it was tuned for the size of the check, and the run tunes for its own.

    Args:
        name: of the candidate.
        device, dtype, sizes: as of ``prove``.
    """
    asked = json.dumps({"name": name, "device": str(device), "dtype": str(dtype), "sizes": asdict(sizes)})
    line = own_python.command(f"from {__name__} import answer; answer()", asked)
    untuned = os.environ | {"FLA_CACHE_RESULTS": "0"}
    with subprocess.Popen(line, env=untuned, stdout=PIPE, stderr=PIPE, text=True) as process:
        for number in range(1, math.ceil(PATIENCE / A_WHILE) + 1):
            try:
                out, err = process.communicate(timeout=A_WHILE)
                break
            except subprocess.TimeoutExpired:
                of = f"{number * A_WHILE // 60:.0f} of at most {PATIENCE // 60:.0f} minutes"
                log.info("checking %s: compiling or running it for %s", named(name), of)
        else:
            process.kill()
            return f"no answer after {PATIENCE // 60:.0f} minutes"
    try:
        return json.loads(out.splitlines()[-1])["fault"]
    except (IndexError, ValueError, KeyError, TypeError):
        said = err.strip().splitlines()[-1:] or [""]
        return f"its process ended with code {process.returncode}: {said[0][:200]}"


def answer() -> None:
    """Print what is wrong with the candidate that the command line names, as ``fault_in_subprocess`` asks."""
    asked = json.loads(sys.argv[1])
    dtype = getattr(torch, asked["dtype"].removeprefix("torch."))
    try:
        fault = prove(CANDIDATES[asked["name"]](), torch.device(asked["device"]), dtype, Sizes(**asked["sizes"]))
    except Exception as error:  # whatever a compiler or a driver may raise: these kernels do not work here
        fault = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    print(json.dumps({"fault": fault}))
