# Everything a developer does. Each target does its own set-up; Python 3.11 or newer, git and make suffice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test check lint audit serve docs clean constraints

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## Create .venv with everything a developer needs

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; say which one with: make PYTHON=python3.11 install")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install  ## Train on real data for a minute and see the advice
	$(BIN)/noisescale demo

test: install  ## Run the tests
	$(BIN)/python -m pytest

lint: install  ## Format, lint, types, import rules and insecure code, without the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive noisescale client server

audit:  ## Ask which pinned dependencies have known vulnerabilities; needs the internet
	@test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && build/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit; }
	build/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

check: lint  ## What CI runs: lint, types, import rules, tests
	@$(MAKE) --no-print-directory test

serve: install  ## Run the server on this machine
	$(BIN)/noisescale-server serve

docs: install  ## Build the documentation into build/docs
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs
	@echo "open build/docs/index.html"

constraints: install  ## Write down the versions that are installed now
	@sed -n '/^#/p' constraints.txt > constraints.new
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' >> constraints.new
	@mv constraints.new constraints.txt

clean:  ## Remove everything that can be made again
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis .import_linter_cache build dist demo-output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
