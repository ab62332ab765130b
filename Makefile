# Two commands: `make demo` and `make test`. Each sets up what it needs and is safe to repeat.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRAINER := .venv-trainer
NODE_MODULES := node_modules/.ready
SITE := .venv-site

.PHONY: help setup trainer demo test gpu-test lint bench fuzz docs pictures site clean
.DEFAULT_GOAL := help

help: ## Show what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY) ## Make the virtual environment with pinned versions

# An editable install by path: setuptools' import hook would cost every command 20 ms. pip compiles all packages but
# editable ones, and where PYTHONDONTWRITEBYTECODE is set (many containers) nothing else would: 60 ms.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--config-settings editable_mode=compat -e ".[dev]"
	@$(BIN)/python -m compileall -q launcher workloads src/gpurun # it follows no links
	@touch $@

trainer: $(TRAINER)/.ready ## Make the environment of the test with a Hugging Face Trainer

# It sees the packages of the first one, torch among them, by a path file, and adds its own.
$(TRAINER)/.ready: tests/trainer-requirements.txt $(READY)
	@echo "setting up $(TRAINER) (once)"
	@test -x $(TRAINER)/bin/python || $(PYTHON) -m venv $(TRAINER)
	@site='import site; print(site.getsitepackages()[0])'; \
		$(BIN)/python -c "$$site" > "$$($(TRAINER)/bin/python -c "$$site")/parent.pth"
	@$(TRAINER)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

demo: $(READY) ## Compare six splits of a small GPT on two CPU devices (under two minutes)
	$(BIN)/gpurun examples/quickstart.yaml

# Three files at a time, the short tests last: much of a test is waiting, so that suits two cores. Then those that
# look at times, which have the machine to themselves.
test: $(READY) $(TRAINER)/.ready ## Run all tests
	@$(BIN)/python -m pytest -m "not alone" -n 3 --dist loadfile --no-loadscope-reorder; most=$$?; \
		$(BIN)/python -m pytest -m alone && exit $$most

# Linter and type check of the tab's JavaScript. Node itself is a package of the virtual environment.
$(NODE_MODULES): package.json package-lock.json $(READY)
	@echo "setting up node_modules (once; some seconds)"
	@$(BIN)/npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

gpu-test: $(READY) ## Run the tests that need GPUs, and print one report to attach to an issue
	@$(BIN)/python -m pytest -m gpu tests/gpu

lint: $(READY) $(NODE_MODULES) ## ruff, ruff format, mypy --strict; of the tab's modules ESLint, tsc
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/node node_modules/eslint/bin/eslint.js --max-warnings 0
	$(BIN)/node node_modules/typescript/bin/tsc

bench: $(READY) ## Run the benchmarks and print their tables (some minutes)
	$(BIN)/python -m benchmarks

fuzz: $(READY) ## Try what strangers may send: thousands of damaged jobs, traces, runs, messages and requests
	$(BIN)/python -m benchmarks fuzz

docs: $(READY) ## Write anew what the pages take from the program: references, commands, reports of recorded runs
	$(BIN)/python docs/make_pages.py

pictures: $(READY) ## Make docs/images/ from the recorded runs in docs/runs/ (needs Chromium)
	$(BIN)/python docs/make_pictures.py

# An environment of its own: the site needs neither torch nor gpurun.
$(SITE)/.ready: docs/site/requirements.txt
	@echo "setting up $(SITE) (once)"
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

site: $(SITE)/.ready ## Build build/site from the pages; fails on a dead link
	$(SITE)/bin/sphinx-build -q -W --keep-going -E -c docs/site -d build/site-cache . build/site
	@echo "build/site/index.html"

clean: ## Remove the virtual environments, node_modules and all caches (not runs/)
	rm -rf $(VENV) $(TRAINER) $(SITE) node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
