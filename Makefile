# Everything runs in .venv, which `make setup` makes; the other targets call it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
TEXT := data/shakespeare.txt
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: help setup data demo test acceptance lint docs bench clean

help:
	@echo "make setup       .venv with everything but lm-eval (pip install '.[harness]'), and the model"
	@echo "make demo        20,000 tokens of Shakespeare with two policies: a table and a picture in demo/"
	@echo "make test        the tests that take minutes; make acceptance: those that run the real model for long"
	@echo "make lint        ruff, mypy, the order of the rooms, the documentation"
	@echo "make docs        the documentation: site/index.html"
	@echo "make data        a long real text: $(TEXT)"
	@echo "make bench       speed against the machine's limit"
	@echo "make clean       removes what was made, except .venv"

setup: $(READY)

# torch comes first and pinned: a range would let pip take a newer build, of gigabytes, made for GPUs.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
		{ echo "Python's venv module is needed (on Debian: apt-get install python3-venv)." >&2; exit 1; }
	@echo "Installing what is needed into .venv; this takes a few minutes ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plot,data,dev]'
	$(BIN)/streamh2o models get smollm2-135m
	@touch $@

data: $(TEXT)

$(TEXT): data/make_shakespeare.py | $(READY)
	$(BIN)/python data/make_shakespeare.py $@

demo: setup data
	$(BIN)/streamh2o compare $(TEXT) --max-tokens 20000 --cache 512 --policy streamh2o,streamingllm --out demo
	@echo "The picture of the two running perplexities: demo/running.png"

test: setup
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

acceptance: setup data
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(MKDOCS)

docs: setup
	$(MKDOCS)
	@echo "The documentation: site/index.html"

bench: setup
	$(BIN)/streamh2o bench $(ARGS)

clean:
	rm -rf demo site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(TEXT)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
