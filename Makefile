# Two commands: `make run` trains the tiny policy, `make test` runs every test that needs nothing but this machine.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
PLUGINS := $(sort $(wildcard plugins/*/pyproject.toml))
EDITABLE := -e . $(patsubst %/pyproject.toml,-e ./%,$(PLUGINS))

.PHONY: run test lint soak bench clean

run: .venv/run.stamp
	$(BIN)/atropos run --bridge ipc --env gsm8k

test: .venv/test.stamp lint
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Long fault and statistics runs. Writes benchmarks/results/soak.json with the commit that it ran on.
soak: .venv/test.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.soak

# Beside TRL, in an environment of its own.
bench: .venv/run.stamp .venv-trl/stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.quickstart

.venv/run.stamp: pyproject.toml constraints.txt $(PLUGINS)
	@echo "installing into .venv (about a minute; torch is the most of it)"
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Atropos needs Python 3.11 or later; this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation $(EDITABLE)
	touch $@

.venv/test.stamp: .venv/run.stamp
	$(PIP) --no-build-isolation -e '.[test]'
	touch $@

.venv-trl/stamp: benchmarks/requirements-trl.txt constraints.txt
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip --disable-pip-version-check install -q -r benchmarks/requirements-trl.txt
	touch $@

clean:
	rm -rf .venv .venv-trl build dist
