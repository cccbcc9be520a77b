# make serve     install what is needed and serve the bundled model
# make test      install what is needed, then lint, type check and test
# make doctor    check this machine: kernels against plain operations, times, what was chosen
# make quick     the same for every change: quick tests of what differs from main (tools/quick.py)
# make simulate  run simulated worlds: clients, faults and short bytes, millions of steps
# make mutants   break one rule of the scheduler or the cache at a time; a test must notice each
# make fuzz      requests made up from the OpenAPI document, and hostile bodies
# make soak      ten minutes of mixed load on a server whose engine is killed and frozen every 20 s
# make bench-short  a few minutes beside mlx-lm on the same weights (tools/bench/compare.py)
# make bench-NAME   any other benchmark of tools/bench/: `make bench-one-batch ARGS="--batch 1,4"`
# make dist      build the wheels of pippin and pippin-demo into dist/, and check them
# make clean     remove the virtual environment and every cache
#
# Needs Python 3.11+ and pip; `make serve PYTHON=/path/to/python3` names one. Another model or
# option: `make serve ARGS="Qwen/Qwen3.5-0.8B --port 9000"`.
#
# Plain enough for the GNU make 3.81 that macOS ships. Every path is relative, so the checkout may
# lie under a directory with a space in its name.

SHELL := /bin/sh
VENV := .venv
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip --disable-pip-version-check --quiet
# Most of what is installed is never imported.
export PIP_NO_COMPILE := 1
# Tests start many processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# The first Python that is new enough; a version manager's shim that does not run is passed over.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# What is computed on: an NVIDIA GPU, by torch, and by mlx too if its driver knows CUDA 13; or the
# CPU. On macOS `cpu` is empty: mlx brings Metal by itself.
EXTRA := $(shell nvidia-smi 2>/dev/null | grep -q 'CUDA.*Version: *1[3-9]' && echo cuda13,torch || \
	{ nvidia-smi >/dev/null 2>&1 && echo cpu,torch || echo cpu; })

.PHONY: serve test doctor quick lint types simulate mutants fuzz soak bench-short dist install install-dev \
	clean
.DELETE_ON_ERROR:

serve: install
	@exec $(RUN) pippin serve $(ARGS)

doctor: install
	@exec $(RUN) pippin doctor $(ARGS)

# A file at a time, the longest first (tests/conftest.py). Three workers keep two cores busy: now and
# then one waits for a server that starts, or for a clock.
PYTEST := pytest -n 3 --dist loadfile --no-loadscope-reorder

# Types are checked beside the tests, by one process, and shown after them.
test: lint
	@$(RUN) mypy > $(VENV)/types.log 2>&1 & types=$$!; \
	$(RUN) $(PYTEST) --ignore=tests/api/test_openapi_fuzz.py; status=$$?; \
	wait $$types || status=1; cat $(VENV)/types.log; exit $$status

quick: lint types
	@$(VENV)/bin/python tools/quick.py $(ARGS)

lint: install-dev
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .

types: install-dev
	@$(RUN) mypy

simulate: install-dev
	@$(VENV)/bin/python tools/simulate.py --steps 2000000 $(ARGS)

mutants: install-dev
	@$(VENV)/bin/python tools/mutation_check.py $(ARGS)

fuzz: install-dev
	@$(RUN) pytest -q tests/api/test_openapi_fuzz.py
	@$(VENV)/bin/python tools/fuzz_bodies.py $(ARGS)

soak: install-dev
	@$(VENV)/bin/python tools/soak.py $(ARGS)

bench-short: install
	@exec $(VENV)/bin/python tools/bench/compare.py --only prefill decode-1 decode-4 --rounds 1 $(ARGS)

bench-%: install
	@exec $(VENV)/bin/python tools/bench/$(subst -,_,$*).py $(ARGS)

dist: install-dev
	@$(VENV)/bin/python tools/dist.py $(ARGS)

install: $(VENV)/installed

install-dev: $(VENV)/installed-dev

# Some Linux distributions split venv's pip off into a package of its own: then borrow theirs.
$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "Pippin needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@echo "creating $(VENV) with $(PYTHON)"
	@if "$(PYTHON)" -c 'import ensurepip' 2>/dev/null; then "$(PYTHON)" -m venv $(VENV); else \
		"$(PYTHON)" -m venv --without-pip $(VENV) && \
		"$(PYTHON)" -m pip --python $@ --quiet install pip; fi

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing pippin[$(EXTRA)]"
	@$(PIP) install --editable ".[$(EXTRA)]"
	@touch $@

# Without torch the comparisons with transformers are skipped, and pytest says so.
$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing pippin[$(EXTRA),dev,reference]"
	@$(PIP) install --editable ".[$(EXTRA),dev,reference]" \
		|| { echo "without torch: the comparisons with transformers will be skipped"; \
		$(PIP) install --editable ".[$(EXTRA),dev]"; }
	@touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
