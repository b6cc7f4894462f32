# Every target sets up what it needs in .venv; a fresh checkout needs nothing but Python ≥ 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 2

.PHONY: help demo test check docs build clean

help:  ## Show this list.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# torch first and alone: an exact version is what a CPU wheel on disk or in an index can satisfy.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@

demo: $(STAMP)  ## Audit the bundled demo, with worth and baseline, and write rankwise-audit/index.html.
	$(BIN)/rankwise audit --worth --baseline

test: $(STAMP)  ## Run the tests.
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests src/rankwise --doctest-modules $(ARGS)

check: $(STAMP)  ## Lint, format, types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## Build the documentation into site/; warnings are errors.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

build: $(STAMP)  ## Build the wheel into dist/.
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## Remove what the targets made.
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
