# Every target sets up what it needs. `make` alone lists them.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Ranks are many, cores are few: one thread each.
export OMP_NUM_THREADS ?= 1

# The demo: 400 steps of 16 rows bring the held-out loss from about 5.5 to 2.3 nats a byte, in two to four minutes on two cores.
STEPS ?= 400
OUT ?= out/demo

# More options for pytest: make test ARGS="-m 'not procs' -k rules"
ARGS ?=

.PHONY: help demo test check format golden matrix clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

demo: $(VENV)/.ready ## train a small GPT on real text on dp=2,tp=2 local ranks
	$(BIN)/autopar train models/gpt.py --preset demo --mesh dp=2,tp=2 --batch 16 --lr 1.5e-3 --steps $(STEPS) --out $(OUT)

test: $(VENV)/.ready ## run the tests
	$(BIN)/python -m pytest -n auto --dist worksteal --durations=40 --durations-min=5 $(ARGS)

check: $(VENV)/.ready-dev ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev ## format the code and fix what lint can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(VENV)/.ready ## write the golden texts anew; read the diff
	$(BIN)/python -m pytest --update-golden $(ARGS)
	git diff --stat -- tests/golden

matrix: $(VENV)/.ready ## every model on every mesh under every plan; goes on where it stopped
	$(BIN)/python -m tests.matrix $(ARGS)

clean: ## remove the virtual environment, caches and output
	rm -rf $(VENV) out .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or name another, make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) -e '.[test,dev]'
	@touch $@
