"""``granite-scu hardware``: what this machine is and which settings suit it."""

import argparse
import json

EXAMPLES = ("", "--gpu", "--command", "--json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--gpu", action="store_true", help="only whether there is a GPU that PyTorch can use; exit code "
                       "1 where there is none")  # fmt: skip
    asked.add_argument("--command", action="store_true", help="only the command that trains on this machine")
    asked.add_argument("--json", action="store_true", help="everything, as JSON")


def run(options: argparse.Namespace) -> int:
    """Print what is asked for; returns the exit code."""
    from granite_scu.hardware import advice  # late: torch takes seconds

    if options.gpu:
        return _say_gpu()
    if options.command:
        print(advice.training_command())
        return 0
    from granite_scu.model.memory import of_default_model  # late: so does transformers

    if options.json:
        recommended = advice.get_recommended_config(of_default_model)
        print(json.dumps({"info": advice.detect_gpu_info(), "recommended": recommended}, indent=2))
    else:
        advice.print_hardware_info(of_default_model)
    return 0


def _say_gpu() -> int:
    from granite_scu.hardware.advice import detect_gpu_info
    from granite_scu.hardware.nvml import why_no_cuda

    info = detect_gpu_info()
    if not info["cuda_available"]:
        found, remedy = why_no_cuda()
        print(f"no GPU: {found}; {remedy}")
        return 1
    capability = info["compute_capability"]
    print(f"{info['gpu_count']} x {info['gpu_name']}, {info['gpu_memory_gb']:.1f} GiB, compute capability {capability}")
    return 0
