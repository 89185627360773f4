# Every command here works from a fresh clone with Python 3.11 or newer and nothing else: each one
# makes the virtual environment, installs the pinned lock and starts the servers that it needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
VOCAB  := .cache/qwen3/tokenizer.json
ARGS   ?=
# Options for pip where PyTorch is installed, e.g. an index of builds without CUDA.
HF_PIP ?=
HF_TESTS := $(shell grep -rl --include='test_*.py' '^need_torch()' tests)

.PHONY: demo test check bench setup lock clean ops-test hf hf-test
.DEFAULT_GOAL := demo

setup: $(VENV)/.stamp $(VOCAB)

$(VENV)/.stamp: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Rollstream needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV) (once) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-input --require-hashes -r requirements.lock
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-input --no-deps --no-build-isolation -e .
	@touch $@

$(VOCAB): examples/vocabulary.py | $(VENV)/.stamp
	@$(PY) -W ignore -m examples.vocabulary $(dir $@) >/dev/null 2>&1 \
	  || $(PY) -m examples.vocabulary $(dir $@)

# Apart from the lock: PyTorch is several GB, and only the hf engine needs it.
$(VENV)/.hf-stamp: requirements-hf.txt $(VENV)/.stamp
	@echo "installing PyTorch into $(VENV) (once) ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-input $(HF_PIP) -r requirements-hf.txt
	@touch $@

hf: setup $(VENV)/.hf-stamp  ## what python -m worker.engines.hf needs

demo: setup            ## a whole run on this machine, with a summary at the end
	@$(PY) -m examples.demo $(ARGS)

test: setup            ## the tests that need PyPI packages only
	@$(PY) -m pytest -q -n 2 --dist loadfile -m "not slow" $(ARGS)

check: setup           ## lint, types, import rules
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache

bench: setup           ## the budgets of docs/benchmarks.md
	@$(PY) -m benchmarks.merge --json
	@$(PY) -m benchmarks.turns --json
	@$(PY) -m benchmarks.agents --json
	@$(PY) -m benchmarks.pipeline --json
	@$(PY) -m benchmarks.queue --json
	@$(PY) -m benchmarks.updates --mode keep --json
	@$(PY) -m benchmarks.updates --mode abort --json
	@$(PY) -m benchmarks.mixture --json
	@$(PY) -m benchmarks.telemetry --json
	@$(PY) -m benchmarks.verify --json

hf-test: hf            ## the tests that need PyTorch: a real model, token by token
	@ROLLSTREAM_REQUIRE_HF=1 $(PY) -m pytest -q -n 2 --dist loadfile -m "not slow" $(HF_TESTS) $(ARGS)

ops-test: setup        ## checks that need Debian or npm tools
	@$(PY) -m pytest -q -n 2 --dist loadfile -m slow tests/ops $(ARGS)

lock: setup            ## resolve the pinned lock again
	@$(PY) -m pip install --quiet uv
	@$(VENV)/bin/uv pip compile pyproject.toml --extra cli --extra service --group dev --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --upgrade -o requirements.lock
	@$(VENV)/bin/uv pip compile pyproject.toml --extra service --extra cli --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --upgrade -o ops/requirements.lock

clean:
	rm -rf $(VENV) .cache out
