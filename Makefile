# Two commands: `make demo` and `make test`. Each sets up what it needs and is safe to repeat.
# `PYTHON=python3.12` names a Python; `TORCH=cpu`, `cu126`, `pypi` a build of torch, which otherwise follows the machine.
BIN := .venv/bin
TOOL := @sh tools/python.sh
export PATH := $(PATH):/usr/sbin:/sbin
# Containers often set it; pytest then takes every test file apart again in each session.
export PYTHONDONTWRITEBYTECODE :=
NODE_MODULES := node_modules/.ready

.PHONY: help setup trainer engines demo test test-all test-floor gpu-test gpu-rehearsal lint bench fuzz docs pictures site release-check clean
.DEFAULT_GOAL := help

help: ## Show what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

setup: ## Make the virtual environment with pinned versions
	$(TOOL) tools/environment.py main

trainer: ## Make the environment of the test with a Hugging Face Trainer
	$(TOOL) tools/environment.py trainer

engines: ## Make the environment of the test with Ray
	$(TOOL) tools/environment.py engines

demo: setup ## Compare six splits of a small GPT on two CPU devices (under two minutes)
	$(BIN)/gpurun examples/quickstart.yaml
	@echo 'To have gpurun in this shell: . .venv/bin/activate'

# Files side by side: much of a test is waiting, so that suits two cores. Tests that look at times come last, and
# have the machine to themselves.
PYTEST := @$(BIN)/python -m pytest -q --workers 4
test: setup ## Run the tests, with what they need of the system where it may be installed
	$(TOOL) tools/system_packages.py
	$(PYTEST) -m "not slow"

test-all: export GPURUN_SLOW_TESTS := 1
test-all: trainer engines ## Run all tests, with engines, frameworks and every case in a browser
	$(TOOL) tools/system_packages.py all
	$(PYTEST)
	$(MAKE) gpu-rehearsal

# Only torch is the pinned one in both: other builds for the CPU aren't at every index. With TORCH=pypi it is
# the oldest one, in PyPI's build of 3 GB, and runs a job: many tests look into the pinned torch.
test-floor: ## Run the tests without processes with the oldest version of every dependency, then with the newest
	$(TOOL) tools/environment.py floor
ifeq ($(TORCH),pypi)
	cd "$$(mktemp -d)" && "$(CURDIR)/.venv-floor/bin/gpurun" "$(CURDIR)/tests/data/floor.yaml"
else
	.venv-floor/bin/python -m pytest -q --workers 2 tests/unit
	@rm -f .venv-newest/.ready # newest means today's
	$(TOOL) tools/environment.py newest
	.venv-newest/bin/python -m pytest -q --workers 2 tests/unit
endif

# Linter and type check of the tab's JavaScript. Node itself is a package of the virtual environment.
$(NODE_MODULES): package.json package-lock.json | setup
	@echo "setting up node_modules (once; some seconds)"
	@$(BIN)/npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

gpu-test: setup ## Run the tests that need GPUs, and print one report to attach to an issue (DEVICES=cpu:2 rehearses it)
	@$(BIN)/python -m pytest -o addopts="--strict-markers --import-mode=importlib" -m gpu tests/gpu $(if $(DEVICES),--devices $(DEVICES))

gpu-rehearsal: setup ## Rehearse `python -m benchmarks.gpu`, the checks for a machine with one GPU, on a CPU device
	@$(BIN)/python -m benchmarks.gpu --device cpu:1 --out build/gpu-rehearsal --limit 2160

lint: setup $(NODE_MODULES) ## ruff, ruff format, mypy --strict; of the tab's modules ESLint, tsc
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/node node_modules/eslint/bin/eslint.js --max-warnings 0
	$(BIN)/node node_modules/typescript/bin/tsc

bench: setup ## Run the benchmarks and print their tables (more than an hour)
	$(BIN)/python -m benchmarks

fuzz: setup ## Try what strangers may send: thousands of damaged jobs, traces, runs, messages and requests
	$(BIN)/python -m benchmarks fuzz

docs: setup ## Regenerate what the pages take from the program: references, commands, reports of recorded runs
	$(BIN)/python docs/make_pages.py

pictures: setup ## Make docs/images/ from the recorded runs in docs/runs/ (needs Chromium)
	$(BIN)/python docs/make_pictures.py

site: ## Build build/site from the pages; fails on a dead link
	$(TOOL) tools/environment.py site
	.venv-site/bin/sphinx-build -q -W --keep-going -E -c docs/site -d build/site-cache . build/site
	@echo "build/site/index.html"

release-check: site ## Build sdist and wheel into dist/, and try both in environments of their own
	$(TOOL) tools/environment.py release
	$(TOOL) -m tools.release

clean: ## Remove the virtual environments, node_modules and all caches (not runs/)
	rm -rf .venv .venv-* node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
