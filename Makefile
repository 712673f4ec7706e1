# make serve   start the server with serve_config.yaml (first time: virtual environment, packages, model)
# make test    unit and property tests on CPU and one Ray smoke test
#
# Needs only Python 3.10+. Variables, on the command line or in the environment:
#   PYTHON       interpreter that makes the virtual environment
#   VENV         its folder
#   TORCH_INDEX  package index for torch. Empty: PyPI, which on Linux x86-64 means the CUDA build (3 GB with its libraries).
#                CPU only, 200 MB:  make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   CONFIG       what `make serve` runs
#   PYTEST_ARGS  more arguments for pytest
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
CONFIG ?= serve_config.yaml
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
SOURCES := overlap_serve deployments tests benchmarks
# What runs on a CPU machine in some minutes.
BENCHMARKS := loop_overlap_cpu follower_hop http_load cold_start client_error loop_host_cost

# Tests and servers of this machine must not join, or be joined by, another Ray cluster here.
export RAY_ADDRESS := local
# By default Ray starts workers at nice 15: beside any other busy process they would starve, and tests of time with them.
export RAY_worker_niceness := 0
export RAY_USAGE_STATS_ENABLED ?= 0
# On few cores, thread pools of tests that run beside each other only get in their way.
TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: help setup fmt check test test-ray test-gpu soak bench serve model
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^$$/,$$d'
	@echo "more targets: setup fmt check test-ray test-gpu soak bench"

# Stamps: nothing is installed again until the lists of packages change.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing packages into $(VENV) (some minutes the first time)"
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

setup: $(VENV)/.installed-dev

model: $(VENV)/.installed
	@$(BIN)/overlap-serve models prepare

serve: $(VENV)/.installed
	$(BIN)/python -m deployments.run $(CONFIG)

fmt: setup
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

check: setup
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup model
	$(PYTEST) -m "smoke or not (ray or gpu or soak)"

test-ray: setup model
	$(PYTEST) -m "ray and not gpu and not soak"

test-gpu: setup
	$(PYTEST) -m gpu

soak: setup model
	$(PYTEST) -m soak --timeout 14400

bench: setup
	@for script in $(wildcard benchmarks/*.py); do echo "== $$script"; $(TEST_ENV) $(BIN)/python $$script || exit 1; done
