# make            what the targets are
# make venv       .venv with torch, everything the tests need, and this package in editable mode
# make test       every test; the browser tests need `make browser` and a Chromium
# make matrix     the tests that touch ComfyUI on every release in the cache (comfy-tp comfyui get RELEASE), and
#                 docs/comfyui.md; MATRIX="0.3.75 newest" restricts it
# make floor      the FLUX.2 tests again, with the oldest diffusers, transformers and huggingface_hub that are supported
#
# Another build of torch, for a certain GPU:
#   make venv TORCH=torch==2.9.1 TORCHVISION=torchvision==0.24.1 PIP_ARGS="--index-url URL"

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.14.1
TORCHVISION ?= torchvision==0.29.1
PIP_ARGS ?=
PYTEST_ARGS ?=
# The releases of ComfyUI that `make matrix` runs on; none: all in the cache.
MATRIX ?=
# How many processes share the test files.
WORKERS ?= 2
FLOOR_TESTS ?= $(addprefix tests/test_,architectures.py sampling.py nodes_files.py nodes_sampling.py sampler_node.py \
	nodes_components.py text_encoder.py vae.py small.py adherence.py checkpoint_writer.py requirements.py lora.py)
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv browser lint format test matrix floor demo bench soak clean

help:
	@echo "make venv | browser | lint | format | test | matrix | floor | demo | bench | soak | clean"

venv: $(STAMP)

$(STAMP): $(VENV)/.requirements pyproject.toml
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

# torch comes first, so that nothing of what follows chooses another.
$(VENV)/.requirements: requirements.txt requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(PIP_ARGS) $(TORCH) $(TORCHVISION)
	$(PIP) -r requirements-dev.txt
	touch $@

browser: tests/browser/node_modules/.installed

tests/browser/node_modules/.installed: tests/browser/package-lock.json
	cd tests/browser && npm ci --no-audit --no-fund
	touch $@

# A type checker does not follow the editable install's import hook, so it gets the package by a link.
lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	mkdir -p .mypy_cache/path && ln -sfn ../.. .mypy_cache/path/comfy_tp
	MYPYPATH=.mypy_cache/path $(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

matrix: $(STAMP)
	$(BIN)/python tests/matrix.py --workers $(WORKERS) $(MATRIX)

# On top of .venv, whose torch it uses.
floor: .venv-floor/.installed
	.venv-floor/bin/python -m pytest $(PYTEST_ARGS) $(FLOOR_TESTS)

.venv-floor/.installed: requirements-floor.txt $(STAMP)
	test -x .venv-floor/bin/python || $(BIN)/python -m venv .venv-floor
	.venv-floor/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$(.venv-floor/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz_base.pth
	touch $@

demo: $(STAMP)
	$(BIN)/comfy-tp demo

bench: $(STAMP)
	$(BIN)/comfy-tp bench load
	$(BIN)/comfy-tp bench forward
	$(BIN)/comfy-tp bench overhead

soak: $(STAMP)
	COMFY_TP_SOAK=1 $(BIN)/python -m pytest -m soak --timeout 3600 $(PYTEST_ARGS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache tests/output tests/browser/node_modules
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
