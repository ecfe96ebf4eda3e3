# kvstore: everything that is done from a checkout. Needs python3 (3.11 or newer) and make; no root,
# no compiler. `make demo` and `make test` make the environment themselves.

PYTHON ?= python3
VENV ?= .venv
# On PyPI this is torch's default build for the platform; on Linux it brings CUDA libraries (about
# 3 GB). The tests need no GPU. For the CPU build (about 200 MB) point pip at an index that has it:
#   make venv PIP_FLAGS="--extra-index-url <the CPU wheel index that pytorch.org names>"
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
EXTRAS ?= transformers,lz4,test,lint
PYTEST_FLAGS ?=
BENCH_SIZES ?= 256KiB 1MiB 4MiB
CRASH_SEED ?= 2
SIM_SEEDS ?= 2000
SHM_SIZES ?= 256KiB 1MiB
BENCH_FLAGS ?= --rounds 300
MATCH_FLAGS ?= --entries 1000000 --keys 1024

BIN := $(VENV)/bin
STAMP := $(VENV)/.kvstore-installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-long test-crash lint format bench options clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /  make \1 \t/' | expand -t 18

venv: $(STAMP)  ## make .venv: this checkout, editable, and what tests and demo need

# editable_mode=compat: setuptools' default import hook loses against a folder called kvstore in the
# current directory, which is what a clone is.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvstore needs Python 3.11 or newer; try: make PYTHON=python3.12 " + "venv")'
	@echo "Making $(VENV) with $(TORCH), transformers, numpy, pytest, hypothesis, ruff, mypy and what"
	@echo "they need. Download: 0.3 GB with torch's CPU build, about 3 GB with its CUDA build (the"
	@echo "default on PyPI for Linux; the Makefile says how to choose). Already cached: nothing."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) \
	  --constraint constraints.txt --config-settings editable_mode=compat \
	  "$(TORCH)" --editable ".[$(EXTRAS)]"
	@touch $@

demo: venv  ## the store and a real engine: cold and warm time to first token, same tokens
	$(BIN)/kvstore demo

test: venv  ## all tests that this machine can run
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-long: venv  ## what `make test` leaves out: traces, crashes, SIM_SEEDS seeds of the simulation
	$(BIN)/python -m pytest -m long $(PYTEST_FLAGS)
	$(BIN)/python -m pytest tests/sim --sim-seeds $(SIM_SEEDS) $(PYTEST_FLAGS)

test-crash: venv  ## 500 rounds of killing and stopping daemon and clients (CRASH_SEED=2)
	KVSTORE_CRASH_SEED=$(CRASH_SEED) $(BIN)/python -m pytest -s -m long tests/daemon $(PYTEST_FLAGS)

lint: venv  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv  ## rewrite the style that can be rewritten
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv  ## measure the DRAM path, lookups and the daemon; results go to benchmarks/results/
	@mkdir -p benchmarks/results
	@set -e; for size in $(BENCH_SIZES); do echo "benchmarks/results/dram-$$size.json"; \
	  $(BIN)/kvstore bench dram --block-size $$size $(BENCH_FLAGS) --json \
	    > benchmarks/results/dram-$$size.json.part; done
	@echo "benchmarks/results/match.json"
	@$(BIN)/kvstore bench match $(MATCH_FLAGS) --json > benchmarks/results/match.json.part
	@set -e; for size in $(SHM_SIZES); do echo "benchmarks/results/shm-$$size.json"; \
	  $(BIN)/kvstore bench shm --block-size $$size --json \
	    > benchmarks/results/shm-$$size.json.part; done
	@echo "benchmarks/results/control.json"
	@$(BIN)/kvstore bench control --json > benchmarks/results/control.json.part
	@# Only now, so that no result makes the next one's tree differ from its commit.
	@for part in benchmarks/results/*.part; do mv "$$part" "$${part%.part}"; done

options: venv  ## rewrite what is made from the settings: config/kvstore.toml, a table in docs/
	$(BIN)/python docs/options.py

clean:  ## remove the environment, caches and build outputs
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf *.egg-info
	find kvstore tiers cuda server tests -name __pycache__ -type d -prune -exec rm -rf {} +
