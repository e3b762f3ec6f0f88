# Everything runs from a fresh clone: each target first makes the virtual environment that it needs, once.
# On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gives the small build of torch.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help train test test-slow check format bench clean

help:
	@echo 'make train      train a small language model under ZeRO-3 on two ranks'
	@echo 'make test       the test suite'
	@echo 'make test-slow  the longer proofs'
	@echo 'make check      lint, formatting, types'
	@echo 'make format     format the sources'
	@echo 'make bench      step time and memory against DDP, FSDP2 and DeepSpeed'
	@echo 'make clean      remove the virtual environment and caches'

train: $(VENV)/installed-train
	$(BIN)/onenth train --ranks 2

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m 'not slow'

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamp says that the packages of one extra are installed as pyproject.toml and constraints.txt name them.
$(VENV)/installed-train $(VENV)/installed-dev $(VENV)/installed-bench: $(VENV)/installed-%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onenth needs Python 3.11 or newer, this is " \
		+ sys.version.split()[0] + "; name another one: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[$*]'
	@touch $@
