# `make wheel`: a flash-attn wheel from a fresh machine. `make test`: the tests. Both install what they need.

VENV ?= .venv
PYTHON ?= python3
RELEASE ?= cu130
SELECTION ?= --capability 10.0 --head-dim 64 --dtype fp16 --forward-only

.PHONY: wheel test slow setup

wheel: setup $(VENV)/installed
	$(VENV)/bin/pybuild build flash-attn --release $(RELEASE) $(SELECTION)

# mypy, ruff, and every test that takes less than a few minutes.
test: setup $(VENV)/installed-test
	$(VENV)/bin/ruff check pybuild tests nix
	$(VENV)/bin/ruff format --check pybuild tests nix
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest

slow: setup $(VENV)/installed-test
	$(VENV)/bin/pytest -m slow

# The distribution's packages: nix, a C++ compiler, Python with venv and headers.
setup:
	PYTHON=$(PYTHON) scripts/setup.sh

$(VENV)/bin/pip: | setup
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/pip
	$(VENV)/bin/pip install -q -e .
	touch $@

$(VENV)/installed-test: pyproject.toml | $(VENV)/bin/pip
	$(VENV)/bin/pip install -q -e '.[test]'
	touch $@
