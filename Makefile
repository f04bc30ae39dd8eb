# `make demo` and `make test` set themselves up: a virtual environment in .venv with the versions of constraints.txt.
VENV := .venv
BIN := $(VENV)/bin
# The first Python from 3.11 on; override with `make PYTHON=/path/to/python3.12`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help demo test test-all test-newest lint bench results docs clean

help:
	@echo "make demo    plan, check, draw and train a small transformer on four ranks of this machine"
	@echo "make test    run the quick tests, on two workers (WORKERS=n for more; EIGHTH=n: with an eighth of the others)"
	@echo "make test-all  with all that take longer or add names, sizes, seeds and whole runs; before a release"
	@echo "make test-newest  what depends on torch's pipelining, with the newest torch; once per release"
	@echo "make lint    ruff and mypy --strict"
	@echo "make docs    make the pictures and schedule pages of docs/ with zbc itself"
	@echo "make bench   measure compiler, runtime and search beside their peers; writes bench/results/"
	@echo "make results write docs/results.md and the table of the README from the newest of these"

# By a path, not by setuptools' finder, which comes after a folder named zbc: `import zbc` works beside the clone.
LINKED := --config-settings editable_mode=compat

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "zbc needs Python 3.11 or newer; none was found on the PATH" >&2; exit 6; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(LINKED) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(LINKED) -e '.[dev]'
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run
	$(BIN)/zbc plan plans/tiny.toml -o build/demo
	$(BIN)/zbc visualize build/demo
	$(BIN)/zbc run build/demo --local 4 $(if $(STEPS),--steps $(STEPS))

WORKERS ?= 2
# What is imported is compiled once, and kept for the many processes that tests start.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS)

test: $(VENV)/.dev
	$(PYTEST) $(if $(EIGHTH),--eighth $(EIGHTH))

# Compiled kernels write where they are told to: the tests of the search once more with every index looked at.
test-all: $(VENV)/.dev
	$(PYTEST) --all
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=build/checked-kernels $(PYTEST) tests/search

# In a virtual environment of its own, with the newest of everything; TORCH=2.11.0 asks for that one.
NEWEST := .venv-newest
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check 'torch$(if $(TORCH),==$(TORCH))' -e '.[dev]'
	$(NEWEST)/bin/python -m pytest -q -n $(WORKERS) --all tests/processes/test_torch_oracle.py tests/interop \
		tests/runtime/test_private.py tests/runtime/test_gradients.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev
	$(BIN)/python docs/make.py

# Each writes a file of its own; what is written stays where one of them is interrupted.
BENCHES := "plan compile" "plan search" "predict steps" "predict memory" "published runs" "overhead ops" "overhead split" \
	"run throughput" "run fidelity"
bench: $(VENV)/.dev
	@echo "some minutes for each of these, on a machine that does nothing else:" $(BENCHES)
	@for name in $(BENCHES); do set -- $$name; echo "bench/$$1.py $$2"; $(BIN)/python bench/$$1.py $$2 || exit 1; done

# Refuses a record that is older than what it measures, and says how to measure again.
results: $(VENV)/.dev
	$(BIN)/python bench/results.py

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
