"""The command on a CPU without bf16: ``compare_controllers.py`` with its arguments.

A script, since its workers are spawned: each of them imports this file, and finds the same CPU.
"""

import sys
from pathlib import Path

import torch

if __name__ in ("__main__", "__mp_main__"):  # the command and its workers, and not whoever looks for doctests here
    torch.cpu.get_capabilities = dict

if __name__ == "__main__":
    from research.comparison.command import main

    sys.exit(main(sys.argv[1:], root=Path(__file__).parents[3]))
