# make run | test | lab | check | bench | clean. Everything is installed into $(VENV), once, on first use.
PY ?= python3
VENV ?= .venv
# An extra package index for torch, for instance one that offers CPU builds; empty: the configured one.
TORCH_INDEX ?=
# Processes that share the tests; each test uses one thread.
TEST_PROCESSES ?= 2

BIN := $(VENV)/bin
# Experts are small matrices: one thread each is fastest, and oversubscription costs a factor of 100.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: run test lab check bench clean chromium
.DELETE_ON_ERROR:

run: $(VENV)/.ok
	$(BIN)/python -m moeproxy run --out out

test: $(VENV)/.ok-dev chromium
	$(BIN)/python -m pytest -n $(TEST_PROCESSES)

lab: $(VENV)/.ok
	$(BIN)/python -m jupyterlab notebooks/00_start_here.ipynb $(if $(filter 0,$(shell id -u)),--allow-root)

check: $(VENV)/.ok-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/test_layers.py

# Hours of processor time; runs that are finished are not repeated, so it can be stopped and called again.
bench: $(VENV)/.ok
	$(BIN)/python -m moeproxy.lab.bench_record record
	$(BIN)/python -m moeproxy.lab.bench_record pack

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written after a complete installation only, so a broken one is redone.
$(VENV)/.ok: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "moeproxy: installing into $(VENV), a few minutes the first time"
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.ok-dev: $(VENV)/.ok
	@echo "moeproxy: installing what tests and checks need"
	$(PIP_INSTALL) -e '.[test,check]'
	@touch $@

$(VENV)/bin/python:
	@command -v $(PY) >/dev/null || { echo "moeproxy: $(PY) not found; install it: apt-get install python3 python3-venv, or name one: make PY=..." >&2; exit 1; }
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "moeproxy: $(PY) is older than Python 3.11; name a newer one: make PY=python3.12" >&2; exit 1; }
	@$(PY) -c 'import ensurepip, venv' 2>/dev/null || { echo "moeproxy: $(PY) cannot make environments, python3-venv is missing; install it: apt-get install python3-venv" >&2; exit 1; }
	$(PY) -m venv $(VENV)

# The browser tests need a Chromium. Root can install Debian's; anybody else gets a clear skip (in CI: a failure).
chromium:
	@if [ -n "$$CHROMIUM" ] || { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null; \
	then exit 0; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "moeproxy: installing chromium for the browser tests"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
		|| echo "moeproxy: chromium could not be installed; the browser tests will be skipped" >&2; \
	else echo "moeproxy: no chromium; the browser tests will be skipped (install it: apt-get install chromium)" >&2; fi
