# make train ARGS="--env bigfish"    make test    make lint    make format    make bench    make tensorboard    make docs
SHELL := /bin/bash
VENV := .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3; do $$p -c "" 2>/dev/null && echo $$p && break; done)
READY := $(VENV)/.installed
DEV_READY := $(VENV)/.installed-dev
RAY_READY := $(VENV)/.installed-ray
DOCS_READY := $(VENV)/.installed-docs
LOGDIR ?= logs

.PHONY: train test lint format bench tensorboard docs

train: $(READY)
	@$(VENV)/bin/python -m tfrl.ppo_procgen $(ARGS)

# One process more than cores, up to four: tests wait for the processes that they start.
TEST_PROCESSES ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 4)))

# In the order of tests/conftest.py short files come last: at the end of a long one, one core would wait.
test: lint $(RAY_READY)
	@$(VENV)/bin/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(DEV_READY)
	@$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check . && $(VENV)/bin/vulture && $(VENV)/bin/mypy

format: $(DEV_READY)
	@$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

bench: $(READY)
	@$(VENV)/bin/python -m benchmarks.throughput $(ARGS)

# Several files of a run grow at once where an evaluator follows it (docs/distributed.md).
tensorboard: $(READY)
	@$(VENV)/bin/tensorboard --logdir $(LOGDIR) --reload_multifile true $(ARGS)

# A warning, of a broken link, say, is an error (mkdocs.yml).
docs: $(DOCS_READY)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build $(ARGS)
	@echo "The site is in site/index.html. For its search: $(VENV)/bin/mkdocs serve"

# The stamp is written last, so an interrupted install is done again.
$(READY): requirements.txt
	@echo "Setting up $(VENV) with $(PYTHON) (a few minutes, once)"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else "tfrl needs Python 3.10, 3.11 or 3.12, not %d.%d: make PYTHON=/path/to/python3.11" % v)'
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip  # 23.0 found no set for 3.10
	@# By a path: a script beside the checkout must find the package, and not the folder of the same name.
	@# setuptools warns of this mode, which pyproject.toml keeps by its bound.
	@PYTHONWARNINGS="ignore:Compat editable installs" $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt --config-settings editable_mode=compat -e .
	@touch $@

$(DEV_READY): $(READY) requirements-dev.txt
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(RAY_READY): $(READY) requirements-ray.txt
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-ray.txt
	@touch $@

$(DOCS_READY): $(READY) requirements-docs.txt
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@
