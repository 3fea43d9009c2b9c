# Every target sets up what it needs in .venv: Python 3.11 or newer and make are enough.
.DEFAULT_GOAL := help
.PHONY: help book test long browser lint bench results verify lock clean
unexport PYTHONPATH

PYTHON ?= python3# the interpreter that .venv is made with
SET ?= standard# the book's parameter set: smoke (seconds a page), standard, paper (hours)
BOOK ?=# more options for book/build.py, such as --set homogeneous.loads=[0.9]
BENCH ?=# options for book/bench.py, such as --quick

venv := .venv/bin/python
ready := .venv/ready

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

book: $(ready) ## Run the notebooks and render the book to _build/html (SET=smoke is quick)
	$(venv) book/build.py --params $(SET) $(BOOK)

test: $(ready) ## Run the tests that take a few minutes in all
	$(venv) -m pytest

long: $(ready) ## Run the long tests
	$(venv) -m pytest -m long

browser: $(ready) ## Run the tests of the rendered pages, where Chromium is found
	$(venv) -m pytest -m browser tests/test_browser.py

lint: $(ready) ## Check style, formatting and types
	$(venv) -m ruff check .
	$(venv) -m ruff format --check .
	$(venv) -m mypy

bench: $(ready) ## Measure speed and memory, for the book's page on them (12 minutes)
	$(venv) book/bench.py $(BENCH)

results: $(ready) ## Run a set (SET=paper takes an hour) and keep the pages' tables in book/results
	$(venv) book/build.py --keep --params $(SET) $(BOOK)

verify: $(ready) ## Run the standard set and compare its tables with those kept in book/results
	$(venv) book/build.py --verify

lock: ## Pin anew every dependency in requirements.lock (needs uv)
	uv pip compile pyproject.toml --all-extras --universal --only-binary :all: --upgrade \
	  --generate-hashes --no-annotate --no-header --no-emit-index-url --quiet -o requirements.lock

clean: ## Remove .venv, _build and every cache
	rm -rf .venv _build .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find qdq tests book -name __pycache__ -type d -prune -exec rm -rf {} +

$(ready): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] \
	  + "; name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(venv) -m pip install --quiet --require-hashes --only-binary :all: -r requirements.lock
	$(venv) -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@
