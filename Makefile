# Every target sets up what it needs in .venv, once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

.PHONY: help setup test test-fast lint types check chaos demo bench gpu-check slurm browser test-slurm clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## create .venv with everything the tests need

# A .venv that is half-made, or of a Python that is too old, is made anew. torch is installed first and
# pinned: a range would allow the newest release and download gigabytes.
RECENT := import sys; sys.exit(sys.version_info < (3, 10))
# DeepSpeed compiles at a first use what is not compiled when it is installed; such a wheel fits this torch
# alone, so pip must not keep it for other environments.
DEEPSPEED = DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation
ANOTHER := name another with make setup PYTHON=/path/to/python3
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(RECENT)' 2>/dev/null || { echo "make setup: $(PYTHON) is" \
		"$$($(PYTHON) --version 2>&1 | head -n 1), and dml needs Python 3.10 or newer; $(ANOTHER)" >&2; exit 1; }
	@$(BIN)/python -c 'import pip; $(RECENT)' 2>/dev/null || { rm -rf .venv && \
		$(PYTHON) -m venv .venv >/dev/null 2>&1; } || { rm -rf .venv; echo "make setup: $(PYTHON) cannot" \
		"make a virtual environment; on Debian, apt install python3-venv, or $(ANOTHER)" >&2; exit 1; }
	$(BIN)/python -m pip install -q -c constraints.txt torch numpy
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,dev,icons,cars196,pretrained,slurm]'
	$(BIN)/python -m pip install -q -c constraints.txt setuptools wheel ninja
	@echo "compiling DeepSpeed's operator for processes without GPUs: about a minute"
	@DS_BUILD_SHM_COMM=1 $(DEEPSPEED) --no-cache-dir --no-deps deepspeed >/dev/null 2>&1 \
		|| echo "make setup: it cannot be compiled here (g++ and Python.h?); the first ZeRO run on CPUs tries again"
	$(DEEPSPEED) -e '.[deepspeed]'
	touch $(STAMP)

# Files of tests side by side; the longest begin first (LONGEST of tests/conftest.py). Three of them on
# two cores: many tests wait for a process, a clock or Slurm. Many start interpreters, which need what
# another one has compiled.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q --dist loadfile
SLOW = processes or training or slow or slurm

test: $(STAMP) ## all tests: twelve minutes on two cores
	$(PYTEST) -n 3 --no-loadscope-reorder

test-fast: $(STAMP) ## tests without groups of processes, training or Slurm: two or three minutes
	$(PYTEST) -n 2 -m "not ($(SLOW))"

# Installs apt packages, so it needs root. Without them the cluster's tests are skipped; in CI they fail.
slurm: ## install Slurm for the tests (Debian, as root)
	@(for each in slurmctld slurmd sbatch munged; do command -v $$each >/dev/null || exit 1; done) \
		|| { apt-get update -q && apt-get install -y --no-install-recommends \
		slurmctld slurmd slurm-client munge; }

browser: ## install Chromium for the tests of images and pages (Debian, as root)
	@command -v chromium >/dev/null \
		|| { apt-get update -q && apt-get install -y --no-install-recommends chromium; }

test-slurm: $(STAMP) slurm ## sweeps on a real Slurm of two nodes (as root)
	$(BIN)/python -m pytest -q tests/cluster

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

check: lint types test ## what CI runs

chaos: $(STAMP) ## random faults against real runs, for ten minutes (as root: full disks and Slurm, too)
	$(BIN)/python -m tests.chaos --minutes 10

bench: $(STAMP) ## run all benchmarks and write docs/benchmarks.md: a quarter of an hour
	$(BIN)/python benchmarks/run.py

gpu-check: $(STAMP) ## prove and measure it on this machine's GPUs, and write gpu-check.json
	$(BIN)/dml gpu-check --json gpu-check.json

demo: $(STAMP) ## train on the bundled icons with two processes: a minute or two
	rm -rf runs/icons_mini
	$(BIN)/dml demo

clean: ## remove .venv and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
