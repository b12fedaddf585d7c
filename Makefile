# Every target sets up what it needs in .venv of this clone; what is already there is left alone.
#
#   make chat          talk to the demo model          MODEL=file.gguf  ARGS="--temp 0"
#   make test          lint and all tests but the slow ones, with each part's seconds
#   make test-fast     the tests that need no model: under a minute            ARGS="-k grammar"
#   make test-slow     soak tests, large statistics, a fresh install
#   make test-web      the web page in Chromium or Chrome
#   make test-clients  Python's and npm's clients, unchanged, against the server
#   make coverage      which lines the fast and the native tests reach: build/coverage/index.html
#   make lint          ruff format --check, ruff check, mypy --strict
#   make format        ruff format, and ruff's automatic fixes
#   make docs          run the documents' examples, draw the web page's pictures anew
#   make bench         tokens/s and acceptance         ARGS="..."
#   make clean         remove what the targets made, .venv too
#   make cuda          build llama.cpp for an NVIDIA GPU, once; later targets use it
#   make setup         .venv with gguf-mtp              make dev    and with everything tests need
#
# make cuda builds for the GPU that is here, else for CUDA_ARCH=90. CUDA_FA=OFF leaves out the kernels
# of flash attention; CUDA_ARGS="-D..." adds CMake options.
#
# llama-cpp-python is built from source once per CPU and CMAKE_ARGS (.ci/llama-wheel) and reused.
# For a GPU: make cuda, once. Where the index's torch is a GPU
# build of gigabytes: TORCH_ARGS="--index-url <the CPU builds' index>".

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# What `make cuda` was built with holds for every later target.
CMAKE_ARGS ?= $(or $(shell cat $(VENV)/.cmake-args 2>/dev/null),-DGGML_RPC=ON -DLLAVA_BUILD=OFF)
CUDA_ARCH ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .),90)
CUDA_FA ?= ON
CUDA_ARGS ?=
export CMAKE_ARGS
TORCH_ARGS ?=
ARGS ?=
MODEL ?=
PURE := not native and not slow and not package and not server and not web

# Other build flags or another CPU give another key, hence another stamp: the library is replaced then.
KEY := $(shell .ci/llama-wheel --key)
LLAMA := $(VENV)/.llama-$(KEY)
# Setup must neither eat the chat's input nor mix with its output.
QUIET := </dev/null >&2
PIP := $(PY) -m pip install -qq --disable-pip-version-check

.PHONY: help setup dev chat cuda test test-fast test-slow test-web test-clients coverage lint format \
	docs bench clean
help:
	@sed -n 's/^#   make/make/p' Makefile

setup: $(VENV)/.run
dev: $(VENV)/.dev

$(PY):
	@echo "setting up $(VENV) with $$($(PYTHON) --version)" >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	@$(PYTHON) -m venv $(VENV) $(QUIET)

$(LLAMA): .ci/llama-wheel | $(PY)
	@wheel=$$(PYTHON=$(PY) .ci/llama-wheel </dev/null) && $(PIP) --force-reinstall --no-deps "$$wheel" $(QUIET)
	@rm -f $(VENV)/.llama-* && touch $@

$(VENV)/.run: pyproject.toml $(LLAMA)
	@echo "installing gguf-mtp and its run-time dependencies" >&2
	@$(PIP) --editable . $(QUIET)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what the tests need" >&2
	@$(PIP) $(TORCH_ARGS) "$$(sed -n 's/^ *"\(torch==[^"]*\)",$$/\1/p' pyproject.toml | head -n 1)" $(QUIET)
	@$(PIP) --editable '.[dev]' $(QUIET)
	@touch $@

chat: $(VENV)/.run
	@$(VENV)/bin/gguf-mtp chat $(MODEL) $(ARGS)

cuda: CMAKE_ARGS := -DGGML_RPC=ON -DLLAVA_BUILD=OFF -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCH) -DGGML_CUDA_FA=$(CUDA_FA) $(CUDA_ARGS)
cuda: | $(PY)
	@command -v nvcc >/dev/null || { echo "make cuda needs nvcc, of NVIDIA's CUDA toolkit" >&2; exit 1; }
	@$(MAKE) --no-print-directory setup CMAKE_ARGS="$(CMAKE_ARGS)"
	@echo "$(CMAKE_ARGS)" >$(VENV)/.cmake-args

bench: $(VENV)/.run
	@$(VENV)/bin/gguf-mtp bench $(ARGS)

lint: $(VENV)/.dev
	@.ci/lint

test:
	@.ci/test

test-fast: $(VENV)/.dev
	@$(PY) -m pytest -q -n 2 -m "$(PURE)" $(ARGS)

test-slow: $(VENV)/.dev
	@$(PY) -m pytest -m slow $(ARGS)

test-web: $(VENV)/.dev
	@.ci/test-web $(ARGS)

test-clients: $(VENV)/.dev
	@.ci/test-clients

coverage: $(VENV)/.dev
	@$(PIP) pytest-cov $(QUIET)
	@$(PY) -m pytest -q -n 2 --dist loadfile -m "not slow and not web and not package" \
		--cov=gguf_mtp --cov-report=term:skip-covered --cov-report=html:build/coverage $(ARGS)

format: $(VENV)/.dev
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

docs: $(VENV)/.dev
	@$(PY) -m pytest -q tests/native/test_docs.py tests/unit/test_offload_docs.py
	@$(PY) -m tests.support.screenshots docs

clean:
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
