# `make demo` and `make test` set themselves up: a virtual environment in .venv, done again only when setup.cfg,
# pyproject.toml or constraints.txt changed. PYTHON is the interpreter it is made from (3.10 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DELETE_ON_ERROR:
.PHONY: help demo test test-trainers check bench bench-peers install clean

help:
	@echo 'make demo     train a small GPT on real text, two workers at ZeRO-2 (under 5 minutes on two cores)'
	@echo 'make test     every test (under 30 minutes on two cores)'
	@echo 'make test-trainers  TRL and transformers 4.57, in an environment of their own'
	@echo 'make check    lint, types, architecture and the fast tests'
	@echo 'make bench    the benchmarks behind docs/benchmarks.md'
	@echo 'make bench-peers  a second environment with DeepSpeed, to be measured beside (compiles for minutes)'
	@echo 'make install  install zrun into the environment of PYTHON (now: $(PYTHON))'
	@echo 'make clean    remove .venv, caches and build leftovers'

demo: $(READY)
	$(BIN)/zrun --num_gpus 2 --backend gloo examples/train_gpt.py --config examples/configs/zero2.json

test: $(READY)
	@bash tests/system_packages.sh
	$(BIN)/python -m pytest -q

test-trainers:
	PYTHON=$(PYTHON) tests/integrations/other_versions.sh

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m 'not slow'

bench: $(READY)
	$(BIN)/python benchmarks/run.py

bench-peers: $(READY)
	bash benchmarks/peers.sh

install:
	$(PYTHON) -m pip install .

clean:
	rm -rf $(VENV) .venv-trainers build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: what the constraint names is then there before anything else can ask for another.
$(READY): setup.cfg pyproject.toml constraints.txt
	@echo 'setting up $(VENV) (once, a few minutes)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
