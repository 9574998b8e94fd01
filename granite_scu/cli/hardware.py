"""``python -m granite_scu.cli.hardware``: what this machine is and which settings suit it.

``--gpu`` only says whether there is a GPU that PyTorch can use (exit code 1 where not); ``--command`` prints the
command that trains with the preset for this machine; ``--json`` prints everything for programs.
"""

import json
import sys

from granite_scu.cli import guard
from granite_scu.cli.argument_parser import Parser
from granite_scu.hardware.advice import detect_gpu_info, get_recommended_config, print_hardware_info, training_command
from granite_scu.hardware.nvml import why_no_cuda


def main() -> int:
    """Print what is asked for; returns the exit code."""
    parser = Parser(prog="python -m granite_scu.cli.hardware", description=__doc__.partition("\n")[0])
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--gpu", action="store_true", help="only whether there is a GPU that PyTorch can use")
    asked.add_argument("--command", action="store_true", help="only the command that trains on this machine")
    asked.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_debug()
    given = parser.parse_args()
    if given.gpu:
        return _say_gpu()
    if given.command:
        print(training_command())
        return 0
    from granite_scu.model.memory import of_default_model  # late: transformers takes seconds

    if given.json:
        recommended = get_recommended_config(predict=of_default_model)
        print(json.dumps({"info": detect_gpu_info(), "recommended": recommended}, indent=2))
    else:
        print_hardware_info(predict=of_default_model)
    return 0


def _say_gpu() -> int:
    info = detect_gpu_info()
    if not info["cuda_available"]:
        found, remedy = why_no_cuda()
        print(f"no GPU: {found}; {remedy}")
        return 1
    capability = info["compute_capability"]
    print(f"{info['gpu_count']} x {info['gpu_name']}, {info['gpu_memory_gb']:.1f} GiB, compute capability {capability}")
    return 0


if __name__ == "__main__":
    sys.exit(guard.guarded(main, "--debug" in sys.argv, how_to_continue="nothing was changed"))
