# `make help` lists the targets. Each one sets up what it needs by itself.

.DEFAULT_GOAL := help
.PHONY: help setup lock audit demo test lowest wheel dist check lint types imports web format docs site bench spark-versions soak clean

BIN := .venv/bin
# Many tests wait for processes and clocks, so that two of them keep a core busy.
WORKERS := $(shell expr 2 \* `nproc`)

# Every worker, and every command that a test starts, would else compile each module again.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Make .venv and look for Java; does nothing the second time
	@scripts/setup

lock: ## Write requirements/*.lock: the newest versions of all packages that fit, with their hashes
	@scripts/lock

audit: ## Look for known vulnerabilities of the locked packages; needs the network
	@scripts/lock audit

demo: setup ## See it work: one document, a failover, and a table that is right again
	@scripts/demo

test: setup ## Run the tests
	@$(BIN)/python scripts/run-tests

lowest: ## Test with the oldest versions of libraries that are allowed, in .lowest
	@scripts/test-lowest

wheel: setup ## Build the package and try it in an empty environment; needs the network
	@$(BIN)/python scripts/check-wheel

dist: setup ## Build the wheel and the source archive, into dist/
	@rm -rf dist
	$(BIN)/python -m hatchling build

check: setup ## All that CI runs: lint, types, imports, the page, tests
	@$(MAKE) --no-print-directory --output-sync --jobs 4 lint types imports web
	@$(MAKE) --no-print-directory test

lint: setup ## Look for faults and for unformatted code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## Check types, strictly
	$(BIN)/mypy

imports: setup ## Check that imports point one way
	$(BIN)/lint-imports

# Built beside what is shipped, so that a check changes nothing. `cd web && npm run build` writes what is shipped.
web: setup ## Check the types of the dashboard's page, build it, and compare it with what is shipped
	@scripts/check-page

format: setup ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## Write the parts of the documentation that are made from the code
	@scripts/make-reference

site: setup ## Build the documentation as a site with search, into site/
	@scripts/make-site

# The sizes on the page about operating follow from the figures.
bench: setup ## Measure, and write docs/internals/performance.md
	$(BIN)/python -m bench
	@scripts/make-reference

spark-versions: setup ## Run the tests that show what works with which PySpark, and write the table of the guide
	@$(BIN)/python scripts/spark-versions
	@scripts/make-reference

soak: setup ## Run the tests that take minutes
	$(BIN)/python -m pytest -m soak -n 2 --dist worksteal --timeout 3600 -o faulthandler_timeout=4000
	$(BIN)/python -m pytest -n $(WORKERS) tests/property --hypothesis-profile soak

clean: ## Remove .venv, caches and builds
	rm -rf .venv .lowest .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage .spark-versions build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
