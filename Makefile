# `make quickstart` and `make test` set up everything on a machine that has Python 3.11 and nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Where there is a GPU, pip may take the CUDA build; where there is none, this version has a CPU build.
TORCH := $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)

.PHONY: quickstart test lint check bench chaos clean

quickstart: $(VENV)/.ready
	$(BIN)/draftsmith retrain recipes/quickstart.yaml

test: $(VENV)/.ready
	$(BIN)/python -m pytest

# What CI adds to the tests: style, types, architecture.
lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

check: lint test

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/data_wait.py
	$(BIN)/python benchmarks/lossless.py

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[quickstart,dev]'
	@touch $@

# 200 runs under fire, about an hour and a half on two cores.
chaos: $(VENV)/.ready
	$(BIN)/python benchmarks/chaos.py

clean:
	rm -rf $(VENV) runs
