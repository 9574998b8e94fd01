# Installs the build of PyTorch that fits this machine's GPU and driver into .venv, and proves it with a kernel.
#   scripts\setup_gpu.ps1 [--dry-run]      prints the commands and runs none
#   $env:PYTHON = "py"; scripts\setup_gpu.ps1
$python = if ($env:PYTHON) { $env:PYTHON } else { "python" }
& $python (Join-Path $PSScriptRoot "torch_build.py") @args
exit $LASTEXITCODE
