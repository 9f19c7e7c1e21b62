# One target per chore, the same here and in CI. `make help` lists them.

VENV := .venv
STAMP := $(VENV)/.set-up
# A venv with a Python that has gone, or one that was copied or moved here with the project, is of no use.
USABLE := { $(VENV)/bin/python -c "import pip" && grep -F "$(CURDIR)/$(VENV)" $(VENV)/bin/activate; } >/dev/null 2>&1
# Whatever pip's own settings (pip.conf, PIP_*) say decides where packages come from; pyproject.toml pins torch exactly.
INSTALL := python -m pip install --disable-pip-version-check --editable ".[dev]"
# Most tests use one core at a time: two processes share them out.
PYTEST := OMP_NUM_THREADS=1 python -m pytest --numprocesses 2 --dist worksteal
BENCHMARKS := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

# The Python to make .venv with, if it is not to be the first that fits: `make setup PYTHON=python3.12`.
PYTHON ?=
export PYTHON
export SYSTEM_PATH := $(PATH)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full lint format bench docs clean set-up-again

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## Make .venv with everything epl and its tests need (the other targets do it by themselves)

ifneq ($(shell $(USABLE) && echo yes),yes)
$(STAMP): set-up-again
endif
$(STAMP): pyproject.toml
	@PATH="$$SYSTEM_PATH"; fits='import sys; sys.exit(sys.version_info < (3, 11))'; found=; without_venv=; seen=; \
	for python in $${PYTHON:-python3.11 python3}; do \
	    version=$$("$$python" --version 2>&1) || version=none; \
	    seen="$$seen $$python ($$version)"; \
	    "$$python" -c "$$fits" 2>/dev/null || continue; \
	    if "$$python" -c "import ensurepip, venv" 2>/dev/null; then found="$$python"; break; fi; \
	    without_venv="$$python"; \
	done; \
	if [ -z "$$found$$without_venv" ]; then \
	    echo "Missing: Python 3.11 or later. Found:$$seen." >&2; \
	    echo "Debian 12, Ubuntu 24.04 or later: sudo apt install python3 python3-venv" >&2; \
	    echo "If it is installed under another name: make setup PYTHON=/path/to/python" >&2; exit 1; \
	elif [ -z "$$found" ]; then \
	    echo "Missing: python3-venv, the package with which $$without_venv makes virtual environments." >&2; \
	    echo "Debian, Ubuntu: sudo apt install python3-venv (pythonX.Y-venv for a Python beside the system's)" >&2; exit 1; \
	fi; \
	if ! $(USABLE) || ! $(VENV)/bin/python -c "$$fits"; then \
	    echo "Making $(VENV) with $$("$$found" --version)"; \
	    "$$found" -m venv --clear $(VENV); \
	fi
	$(INSTALL)
	@touch $@
	@echo "$(VENV) is ready"

demo: $(STAMP) ## Train the quickstart on 2 ranks of this machine
	@cd examples/quickstart && \
	    epl-launch --num_workers 1 --gpu_per_worker 2 --log_dir "$(CURDIR)/experiments/demo" run.sh
	@echo "The output of each rank is in experiments/demo"

test: lint ## Lint, types and the test suite
	$(PYTEST)

test-full: lint ## The same with the whole products, much longer
	$(PYTEST) -m "full or not full"

lint: $(STAMP) ## Style, form and types
	ruff check .
	ruff format --check .
	mypy

format: $(STAMP) ## Bring the sources into form
	ruff check --fix .
	ruff format .

bench: $(STAMP) ## Run every benchmark; QUICK=1 only sees that they run
	@failed=; for file in $(BENCHMARKS); do \
	    echo "== $$file"; \
	    python "$$file" $(if $(QUICK),--quick) || failed="$$failed $$file"; \
	done; \
	[ -z "$$failed" ] || { echo "failed or short of a bar:$$failed" >&2; exit 1; }

docs: $(STAMP) ## Write the pages that are made from the sources
	python -m epl.config.reference docs/config.md
	python docs/map.py
	python docs/images/draw.py

clean: ## Remove caches, build products and the demo's logs; .venv stays (rm -r .venv for that)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis experiments/demo
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
