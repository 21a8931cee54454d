# Everything runs in .venv, which the first target that needs it creates; a second run installs nothing.
# On the command line: PYTHON=python3.12, ACCEL=cpu or gpu, PIP_ARGS='…', ARGS='…' (for recexp, pytest or JupyterLab).
# Paths are relative, so that the clone may lie in a folder whose name has spaces.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check --no-input $(PIP_ARGS)
ifndef ACCEL
ACCEL := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
endif
ifeq ($(filter cpu gpu,$(ACCEL)),)
$(error ACCEL is "$(ACCEL)": say cpu or gpu)
endif
INSTALLED := $(VENV)/.installed-$(ACCEL)
PINS := $(VENV)/constraints.txt
SERVING := $(VENV)-serving
SERVES := $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -))
EXPERIMENT := configs/experiments/compare_backbones.yaml

.PHONY: env serving-env compare seeds test lab clean help
.NOTPARALLEL:

env: $(INSTALLED)  ## set up .venv
	@echo "Ready: $(VENV). Next: make compare (main experiment), make test, make lab, make help."

serving-env: $(INSTALLED) $(SERVING)/.installed  ## set up .venv-serving: a Triton server for Linux on x86_64

compare: $(INSTALLED)  ## set up, fetch MovieLens-100K, train and compare both backbones, write the report
	@$(PY) -m recexp data fetch ml-100k
	@$(PY) -m recexp run $(EXPERIMENT) $(ARGS)

seeds: $(INSTALLED)  ## quality of both backbones over three seeds
	@$(PY) -m recexp data fetch ml-100k
	@$(PY) -m recexp seeds $(EXPERIMENT) $(ARGS)

# One thread and one process: on tensors as small as the tests' a second thread costs a third more processor time and no
# less of the clock, and tests that measure time should not share the machine with each other.
test: $(INSTALLED) $(if $(SERVES),$(SERVING)/.installed)  ## set up, then style, types and tests
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest $(ARGS)

lab: $(INSTALLED)  ## JupyterLab on this machine only, its kernel bound to .venv
	@JUPYTER_PATH="$(CURDIR)/$(VENV)/share/jupyter" $(PY) -m jupyterlab --ServerApp.ip=127.0.0.1 $(ARGS)

clean:  ## remove .venv and everything built or cached here; results stay
	@rm -rf $(VENV) $(SERVING) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

# torch goes first: it decides about Triton. A CUDA build requires one release of it; beside a CPU build, constraints.txt
# chooses. An environment left by an interrupted or by another installation is made anew.
$(INSTALLED): pyproject.toml constraints.txt constraints-gpu.txt
	@set -e; if [ ! -e $(VENV)/.installing ] && [ -z "$$(ls $(VENV)/.installed-* 2>/dev/null | grep -v -x $@)" ] \
	    && $(PY) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then exit 0; fi; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    || { echo "recexp needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -1)." \
	              "Name another: make PYTHON=python3.12" >&2; exit 1; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo "$(PYTHON) has no venv module. On Debian and Ubuntu: apt install python3-venv (needs an administrator);" \
	              "or name a Python that has it: make PYTHON=…" >&2; exit 1; }; \
	echo "[1/4] Creating $(VENV) with $$($(PYTHON) --version)"; \
	rm -rf $(VENV); $(PYTHON) -m venv $(VENV)
	@touch $(VENV)/.installing
	@rm -f $@
ifeq ($(ACCEL),gpu)
	@{ cat constraints-gpu.txt; sed -E '/^(fbgemm-gpu-cpu|setuptools|torch|triton)==/d' constraints.txt; } > $(PINS)
else
	@sed '/^triton==/d' constraints.txt > $(PINS)
endif
	@echo "[2/4] Installing PyTorch for $(ACCEL): the largest download, a few minutes"
	@$(PIP) install -qq -c $(PINS) torch setuptools
	@case $(ACCEL)$$($(PY) -W ignore -c 'import torch; print("-cuda" if torch.version.cuda else "")') in \
	    gpu) echo "nvidia-smi works here, but pip chose a PyTorch without CUDA: take the CPU index out of pip's settings," \
	              "or go without the GPU: make ACCEL=cpu" >&2; exit 1;; \
	    gpu-cuda) $(PY) -W ignore -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
	        || echo "Warning: PyTorch cannot use this GPU; is its driver too old? See nvidia-smi." >&2;; \
	    cpu) sed -n '/^triton==/p' constraints.txt >> $(PINS);; \
	esac
	@echo "[3/4] Installing recexp and what it needs"
	@$(PIP) install -qq -c $(PINS) --no-build-isolation --config-settings editable_mode=compat -e '.[$(ACCEL),lab,cluster,serving,dev]'
	@echo "[4/4] Binding the notebooks' kernel to $(VENV)"
	@$(PY) -m ipykernel install --sys-prefix >/dev/null
	@rm -f $(VENV)/.installing
	@touch $@

# The server's Python wants numpy below 2, which ends with Python 3.12: an environment in front of .venv, not a second
# PyTorch. On another Python there is none, and the tests that need it say so.
$(SERVING)/.installed: constraints-serving.txt | $(INSTALLED)
	@set -e; if $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then \
	    echo "No serving environment: numpy below 2 needs Python 3.11 or 3.12; make PYTHON=python3.12 has one"; exit 0; fi; \
	echo "Creating $(SERVING): a Triton server for this machine"; \
	rm -rf $(SERVING); $(PY) -m venv --without-pip $(SERVING); \
	$(PIP) --python $(SERVING)/bin/python install -qq --no-deps -r constraints-serving.txt; \
	printf '%s\n' 'import os, site, sys; site.addsitedir(os.path.join(sys.prefix, "..", "$(VENV)", "lib",' \
	    '"python%d.%d" % sys.version_info[:2], "site-packages"))' | paste -sd ' ' - \
	    > "$$(echo $(SERVING)/lib/python3*/site-packages)/beside.pth"; \
	touch $@
