# Every target sets up what it needs in .venv; a fresh checkout needs nothing but Python ≥ 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two workers with two threads each on two cores take five times as long as with one thread each: idle threads spin.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
# Without files of bytecode, each process of the tests compiles the package, and each worker all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-extras torch check docs build clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# torch first and alone: an exact version is what a CPU wheel on disk or in an index can satisfy.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@

demo: $(STAMP)  ## Audit the bundled demo, with importance and its copies at initialization, and write rankwise-audit/index.html.
	$(BIN)/rankwise audit --importance --at-init

test: $(STAMP)  ## Run the tests.
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --durations 25 tests src/rankwise experiments --doctest-modules $(ARGS)

# Engines that most work on Rankwise does not need: over 300 MB, most of it Ray.
test-extras: $(STAMP)  ## Install Ray, Lightning, peft, hqq and lm-evaluation-harness, and run the tests that need them.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray,lightning]' \
		'lm-eval>=0.4.13' 'peft>=0.17' hqq
	$(BIN)/python -m pytest -m extra tests $(ARGS)

# Another version of torch gets a folder of its own; nothing but torch, numpy and pytest is needed.
TORCH_BIN = .venv-torch-$(TORCH)/bin

torch:  ## Test what torch keeps private against a version of it: make torch TORCH=2.9.0
	test -n "$(TORCH)" || { echo "Name a version: make torch TORCH=2.9.0" >&2; exit 2; }
	test -x $(TORCH_BIN)/python || $(PYTHON) -m venv .venv-torch-$(TORCH)
	$(TORCH_BIN)/python -m pip install --quiet 'torch==$(TORCH)' 'numpy>=1.26' 'pytest>=8'
	PYTHONPATH=src $(TORCH_BIN)/python -m pytest -p no:cacheprovider --noconftest --override-ini addopts= tests/internals/test_torch_private.py $(ARGS)

check: $(STAMP)  ## Lint, format, types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## Check that pages are those of the results, and build the documentation into site/; warnings are errors.
	PYTHONPATH=. $(BIN)/python -m experiments render --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

build: $(STAMP)  ## Build the wheel into dist/.
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## Remove what the targets made.
	rm -rf $(VENV) .venv-torch-* build dist site rankwise-audit .pytest_cache .mypy_cache .ruff_cache
