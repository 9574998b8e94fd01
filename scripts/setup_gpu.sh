#!/bin/sh
# Installs the build of PyTorch that fits this machine's GPU and driver into .venv, and proves it with a kernel.
#   scripts/setup_gpu.sh [--dry-run]      prints the commands and runs none
#   PYTHON=python3.12 scripts/setup_gpu.sh
exec "${PYTHON:-python3}" "$(dirname "$0")/torch_build.py" "$@"
