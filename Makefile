# `make quickstart` and `make test` set up everything on a machine that has Python 3.11 and nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Where there is a GPU, pip may take the CUDA build; where there is none, this version has a CPU build.
TORCH := $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)
MOONCAKE := $(if $(shell command -v nvidia-smi),mooncake-cuda,mooncake)

SGLANG := .venv-sglang

.PHONY: quickstart test lint check sglang up down bench chaos soak clean

quickstart: $(VENV)/.ready
	$(BIN)/draftsmith retrain recipes/quickstart.yaml

test: $(VENV)/.ready $(SGLANG)/.test-ready
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder

# What CI adds to the tests: style, types, architecture.
lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

check: lint test

# A whole stack on loopback: Prefect, MLflow, PostgreSQL, S3, workers. `source runs/.stack/environment` to work with it.
up: $(VENV)/.ready
	$(BIN)/draftsmith up --background

down:
	$(BIN)/draftsmith down

# Figures of benchmarks/results/, hours on two cores; nothing else should run meanwhile. lossless.py is about drafts and
# prompts that one names; methods.py trains every method and takes as long again.
bench: $(VENV)/.ready $(SGLANG)/.test-ready
	for name in data_wait transport ledger stored capture_cost engines drift gates overhead draft_step loss planner \
	    packing context_parallel pipeline goodput agreement kills; do \
	    $(BIN)/python benchmarks/$$name.py || exit 1; \
	done

$(VENV)/.ready: pyproject.toml requirements/speculators-no-deps.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[quickstart,dev,ray,$(MOONCAKE)]'
	$(BIN)/pip install --quiet --no-deps --requirement requirements/speculators-no-deps.txt
	@touch $@

# SGLang pins a torch of its own, so it lives beside ours; our distribution is there for its two entry points.
sglang: $(SGLANG)/.ready

$(SGLANG)/.ready: pyproject.toml requirements/sglang-cpu.txt requirements/sglang-cpu-no-deps.txt
	$(PYTHON) -m venv $(SGLANG)
ifeq ($(TORCH),torch)
	$(SGLANG)/bin/pip install --quiet 'sglang>=0.5.23' 'xxhash>=3.5'
else
	$(SGLANG)/bin/pip install --quiet '$(TORCH)'
	$(SGLANG)/bin/pip install --quiet '$(TORCH)' --requirement requirements/sglang-cpu.txt
	$(SGLANG)/bin/pip install --quiet --no-deps --requirement requirements/sglang-cpu-no-deps.txt
endif
	$(SGLANG)/bin/pip install --quiet --no-deps --editable .
	@touch $@

$(SGLANG)/.test-ready: $(SGLANG)/.ready tests/sglang_cpu/pyproject.toml
	$(SGLANG)/bin/pip install --quiet --no-deps --editable tests/sglang_cpu
	@touch $@

# 200 runs under fire, more than an hour on two cores; with root, a third of them on two hosts.
chaos: $(VENV)/.ready
	$(BIN)/python benchmarks/chaos.py

# A simulated fortnight of operation, about half an hour on two cores.
soak: $(VENV)/.ready
	$(BIN)/python benchmarks/soak.py

clean:
	rm -rf $(VENV) $(SGLANG) runs
