"""The build of PyTorch that fits a card and its driver, chosen, installed and proved.

    python scripts/torch_build.py [--dry-run]

``setup_gpu.sh`` and ``setup_gpu.ps1`` call this file. It imports the standard library alone: it runs
where PyTorch is missing, or is the wrong one.
"""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TORCH = "2.13.0"
"""The version whose builds ``BUILDS`` lists: the one that constraints.txt pins."""

ISOLATED = ("-I", "-m")
"""Of a module that Python runs: it is not looked for in the current folder."""

INDEX = "https://download.pytorch.org/whl/"


class Build(NamedTuple):
    """A build of PyTorch.

    Attributes:
        tag: its name on PyTorch's package index.
        driver: first branch of the driver that serves it: 525 for CUDA 12.x, 580 for 13.x (NVIDIA, "CUDA
            Compatibility", minor version compatibility, table 1; the CUDA Toolkit release notes have the same table).
        oldest: lowest compute capability it has kernels for.
        newest: highest.
        windows: whether it exists for Windows.
    """

    tag: str
    driver: int
    oldest: tuple[int, int]
    newest: tuple[int, int]
    windows: bool = True


BUILDS = (
    Build("cu130", 580, (7, 5), (12, 99)),
    Build("cu126", 525, (5, 0), (9, 99)),
    Build("cu129", 570, (7, 0), (12, 99), windows=False),
)
"""The builds of ``TORCH``, best first. Kernels as in PyTorch's own build scripts (TORCH_CUDA_ARCH_LIST): CUDA 13
dropped what came before Turing; CUDA 12.6 knows nothing after Hopper, so Blackwell (sm_100, sm_120) needs 12.8. The
last build is reached for Blackwell only, whose first driver is 570.26.
"""

OLDEST_DRIVER = min(build.driver for build in BUILDS)
UPDATE = (
    "update it: sudo apt install nvidia-driver-580 on Ubuntu, https://www.nvidia.com/drivers elsewhere, then restart "
    "and run this again"
)


class NoBuildError(ValueError):
    """No build fits; the text says what to do."""


class Card(NamedTuple):
    """A GPU, as nvidia-smi describes it: the maker's name, driver (such as 580.65.06), compute capability."""

    name: str
    driver: str
    capability: tuple[int, int]


def choose_build(cards: list[Card], windows: bool = False) -> str:
    """The tag of the build that runs on all of these cards under their driver.

    Raises:
        NoBuildError: none does.
    """
    if not cards:
        raise NoBuildError("nvidia-smi lists no GPU; for a machine without one: make setup")
    driver = int(cards[0].driver.partition(".")[0])
    names = ", ".join(dict.fromkeys(card.name for card in cards))
    if driver < OLDEST_DRIVER:
        raise NoBuildError(f"driver {cards[0].driver} is older than {OLDEST_DRIVER}, the first for CUDA 12; {UPDATE}")
    oldest, newest = min(card.capability for card in cards), max(card.capability for card in cards)
    running = [build for build in BUILDS if build.oldest <= oldest and newest <= build.newest]
    running = [build for build in running if build.windows or not windows]
    if not running:
        raise NoBuildError(
            f"no build of PyTorch {TORCH} has kernels for all of {names} (compute capability {dotted(oldest)} to "
            f"{dotted(newest)}); choose among them with CUDA_VISIBLE_DEVICES, and name the build with --build"
        )
    serving = [build for build in running if driver >= build.driver]
    if not serving:
        least = min(build.driver for build in running)
        raise NoBuildError(f"driver {cards[0].driver} is too old for {names}, which needs {least} or newer; {UPDATE}")
    return serving[0].tag


def dotted(capability: tuple[int, int]) -> str:
    """A compute capability as NVIDIA writes it, such as 8.0."""
    return ".".join(map(str, capability))


def find_cards() -> list[Card]:
    """The GPUs that nvidia-smi lists.

    Raises:
        NoBuildError: there is no nvidia-smi, or it fails.
    """
    command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        remedy = "sudo ubuntu-drivers install on Ubuntu, https://www.nvidia.com/drivers elsewhere"
        raise NoBuildError(
            f"no nvidia-smi, so no NVIDIA driver; install it: {remedy}, then restart. For a machine without a GPU: "
            "make setup"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoBuildError("nvidia-smi does not answer within a minute; restart the machine") from error
    said = " ".join((answer.stdout + answer.stderr).split())
    if "compute_cap" in said:
        raise NoBuildError(f"the driver is older than 495, too old to say what the card can do; {UPDATE}")
    if answer.returncode != 0:
        raise NoBuildError(f"nvidia-smi fails: {said}; restart the machine, or install the driver anew")
    return parse_cards(answer.stdout)


def parse_cards(listing: str) -> list[Card]:
    """The cards in what ``nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader`` prints.

    >>> parse_cards("NVIDIA GeForce RTX 4090, 580.65.06, 8.9")
    [Card(name='NVIDIA GeForce RTX 4090', driver='580.65.06', capability=(8, 9))]
    """
    cards = []
    for line in filter(str.strip, listing.splitlines()):
        found = re.fullmatch(r"(.+), (\d[\d.]*), (\d+)\.(\d+)", line.strip())
        if not found:
            raise NoBuildError(f"nvidia-smi says {line.strip()!r}; restart the machine, or install the driver anew")
        cards.append(Card(found[1], found[2], (int(found[3]), int(found[4]))))
    return cards


def commands(tag: str, root: Path, python: str | None = None) -> dict[str, list[str]]:
    """What sets a machine up, in order: what each command is for, and the command.

    Args:
        tag: the build.
        root: of the checkout.
        python: the interpreter to install for; null is that of .venv, which is made where it is missing.
    """
    inside = Path("Scripts", "python.exe") if sys.platform == "win32" else Path("bin", "python")
    own = root / ".venv" / inside
    make = {} if python or own.exists() else {"environment": [sys.executable, *ISOLATED, "venv", str(root / ".venv")]}
    python = python or str(own)
    constraints = str(root / "constraints.txt")
    pip = f"pip install --force-reinstall torch=={TORCH} --index-url {INDEX}{tag}"
    return {
        **make,
        "PyTorch": [python, *ISOLATED, *pip.split()],
        "granite-scu": [python, *ISOLATED, "pip", "install", "-c", constraints, "-e", f"{root}[quant]"],
        "proof": [python, str(Path(__file__).resolve()), "--prove"],
    }


def prove() -> int:
    """Multiply matrices on every GPU, on the tensor cores and in double precision, and compare; the exit code."""
    import torch  # late: this file chooses the build of what is imported here

    if not torch.cuda.is_available():
        print(
            f"error: PyTorch {torch.__version__} finds no CUDA device; nvidia-smi shows what is wrong", file=sys.stderr
        )
        return 1
    for index in range(torch.cuda.device_count()):
        factor = torch.randn(512, 512, device=f"cuda:{index}", dtype=torch.float16)
        exact = factor.double() @ factor.double()
        error = ((factor @ factor).double() - exact).norm() / exact.norm()
        name = torch.cuda.get_device_name(index)
        if not error < 1e-2:  # fp16 rounds to one part in 2048
            print(f"error: GPU {index}, {name}, multiplies wrongly: off by {error:.1%}", file=sys.stderr)
            return 1
        print(f"GPU {index}, {name}: multiplies matrices with PyTorch {torch.__version__}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Find, choose, install, prove; returns the exit code: 0, 1 where a command failed, 2 where no build fits."""
    parser = argparse.ArgumentParser(prog="setup_gpu", description="Install the build of PyTorch that fits the GPU.")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    parser.add_argument("--build", choices=[b.tag for b in BUILDS], help="use this build (default: the one that fits)")
    parser.add_argument("--python", help="install for this interpreter (default: that of .venv, made where missing)")
    parser.add_argument("--prove", action="store_true", help="only run a kernel on every GPU and check its result")
    asked = parser.parse_args(arguments)
    if asked.prove:
        return prove()
    try:
        tag = asked.build or _choose()
    except NoBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for what, command in commands(tag, Path(__file__).resolve().parents[1], asked.python).items():
        print(f"{what}: {shlex.join(command)}", flush=True)
        if not asked.dry_run and (code := subprocess.run(command).returncode):
            print(f"error: {what}: exit code {code}; fix the problem shown above and run this again", file=sys.stderr)
            return 1
    print("nothing was run" if asked.dry_run else "ready; what a run would have: make check-requirements")
    return 0


def _choose() -> str:
    cards = find_cards()
    for card in cards:
        print(f"found {card.name}, compute capability {dotted(card.capability)}, driver {card.driver}")
    tag = choose_build(cards, windows=sys.platform == "win32")
    print(f"PyTorch {TORCH}, build {tag}")
    return tag


if __name__ == "__main__":
    sys.exit(main())
