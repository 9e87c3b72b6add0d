# Everything a newcomer or a build server types. Each target that runs something prepares .venv first.
# Needed beforehand: make, Python 3.11 to 3.13 with its venv module, and a package index that pip can reach.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# Another interpreter: make setup PYTHON=/usr/bin/python3.12; it makes .venv anew if another one made it.
# PYTHON of the environment is asked only when .venv is not ready.
PYTHON ?=
# More arguments for what a target runs: make test ARGS="tests/unit -x", make run ARGS="--data-dir ./other"
ARGS ?=
# make sim SEED=7 COUNT=100
SEED ?= 1
COUNT ?= 1
# make demo LOG=/var/log/dpkg.log SPEED=1000: so many times faster than it was written, or more, for a minute at most
LOG ?=
SPEED ?= 1000
# make demo-cluster S3=1
S3 ?=
# Only `make lock` needs uv; only the proto lint needs buf, and it is left out where there is none.
UV ?= uv
BUF ?= buf

PY := .venv/bin/python
PROTOS_PY := build/protos-venv/bin/python
PIP_INSTALL := -m pip --disable-pip-version-check install --quiet --require-hashes --only-binary :all:
SOURCES := broker clients/python postdate_api benchmarks examples tests tools

.PHONY: help setup run test test-fast test-deep test-packaging check check-format check-lint check-types check-imports check-protos \
        demo demo-cluster audit bench bench-peers sim image-test docs descriptors protos generated format lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

# The stamp holds the folder it was made for: an environment does not survive being moved or copied.
ifneq ($(shell test -x $(PY) && cat .venv/.ready 2>/dev/null),$(CURDIR))
.PHONY: .venv/.ready
else ifeq ($(origin PYTHON),command line)
.PHONY: .venv/.ready
endif
.venv/.ready: requirements-dev.txt pyproject.toml tools/setup.sh
	@PYTHON='$(PYTHON)' sh tools/setup.sh

setup: .venv/.ready ## prepare .venv from the lock file
	@:

run: setup ## run the broker on 127.0.0.1:7650 (gRPC) and 127.0.0.1:7680 (HTTP), data in ./data
	@exec .venv/bin/postdate-broker serve $(ARGS)

test: setup ## run the tests of a change
	@PYTHON=$(PY) tools/test.sh change $(ARGS)

test-fast: setup ## run tests of units and models, while you write
	@PYTHON=$(PY) tools/test.sh fast $(ARGS)

test-deep: setup ## run all tests, with everything that is searched at night (hours)
	@PYTHON=$(PY) tools/test.sh deep $(ARGS)

test-packaging: setup ## run the tests of the wheel, documents, Spark, pages in a browser and other languages
	@PYTHON=$(PY) tools/test.sh packaging $(ARGS)

check: check-format check-lint check-types check-imports check-protos ## format, lint, types, import contracts, protos

check-format: setup
	@$(PY) -m ruff format --check $(SOURCES)

check-lint: setup
	@$(PY) -m ruff check $(SOURCES)

check-types: setup
	@$(PY) -m mypy
	@$(PY) tools/check_sdk_types.py

check-imports: setup
	@.venv/bin/lint-imports --no-logo --cache-dir build/import-linter
	@$(PY) -m pytest tests/architecture/test_imports.py

check-protos: build/protos-venv/.ready
	@$(PROTOS_PY) tools/generate_protos.py --check
	@if command -v $(BUF) >/dev/null; then \
	    $(BUF) lint && $(BUF) format --diff --exit-code --exclude-path third_party \
	        && echo "Proto lint and format pass."; \
	else echo "Proto lint and format left out: buf is not installed."; fi

demo: setup ## replay a real log within a minute through a broker in build/demo-data and show how late messages were
	@$(PY) tools/demo.py --speed $(SPEED) $(LOG)

demo-cluster: setup ## run a cluster of three nodes, kill its owner three times, count what is lost; S3=1: with versitygw
	@$(PY) tools/demo_cluster.py $(if $(S3),--s3)

audit: setup ## audit what the last demo left, on Spark; the report goes to build/audit
	@test -d build/demo-data || { echo "audit: run make demo first, or audit a backup: postdate-broker audit FOLDER" >&2; exit 1; }
	@.venv/bin/postdate-broker audit build/demo-data --report build/audit $(ARGS)

bench: setup ## measure throughput, latency, recovery and memory, and write docs/benchmarks.md (an hour and a half)
	@$(PY) -m benchmarks $(ARGS)

bench-peers: setup ## measure the same beside other servers, and write docs/benchmarks-peers.md (hours)
	@$(PY) -m benchmarks.peers $(ARGS)

sim: setup ## run the simulation: SEED=n, and COUNT=m seeds from there
	@$(PY) -m tests.sim --seed $(SEED) --count $(COUNT) $(ARGS)

image-test: setup ## carry out deploy/Dockerfile in a bootstrapped Debian and try both images (root; several minutes)
	@$(PY) -m tools.replay_dockerfile $(ARGS)

# Without --quiet: it would swallow the warnings that --strict counts.
docs: setup ## build the documents as a site in build/site
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

descriptors: build/protos-venv/.ready ## write the API's descriptor set to dist/postdate.binpb
	@mkdir -p dist
	@$(PROTOS_PY) tools/generate_protos.py --descriptors dist/postdate.binpb

protos: build/protos-venv/.ready ## regenerate the stubs and docs/api.md from the protos
	@$(PROTOS_PY) tools/generate_protos.py

generated: setup ## regenerate postdate.sync, the SDK's policies, dashboards, pages of commands and settings, table of rights
	@$(PY) -m tools.policies
	@$(PY) tools/generate_sync.py
	@$(PY) -m tools.dashboards
	@$(PY) -m tools.cli_reference > docs/cli-reference.md
	@$(PY) -m tools.configuration > docs/configuration.md
	@$(PY) -m tools.access_table

# The generator wants another protobuf than the broker, so it has an environment of its own.
ifneq ($(shell test -x $(PROTOS_PY) && cat build/protos-venv/.ready 2>/dev/null),$(CURDIR))
.PHONY: build/protos-venv/.ready
endif
build/protos-venv/.ready: requirements-protos.txt | setup
	@rm -rf build/protos-venv
	@$(PY) -m venv build/protos-venv
	@$(PROTOS_PY) $(PIP_INSTALL) -r requirements-protos.txt
	@echo '$(CURDIR)' > $@

format: setup ## format the code, sort imports, fix what can be fixed
	@$(PY) -m ruff check --fix $(SOURCES)
	@$(PY) -m ruff format $(SOURCES)
	@if command -v $(BUF) >/dev/null; then $(BUF) format --write --exclude-path third_party; fi

# Universal, so that one file serves every platform; without any index host, so that every index serves it.
# What is pinned stays pinned unless it must move: ARGS="--upgrade" or ARGS="--upgrade-package aiohttp".
COMPILE = env -u UV_FIND_LINKS $(UV) pip compile --quiet --no-config --universal --fork-strategy fewest \
    --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
    --custom-compile-command 'make lock' $(ARGS)
lock: ## pin the dependencies anew (needs uv)
	@command -v $(UV) >/dev/null || { echo "lock: uv not found; install it (pip install uv) or name it: UV=..." >&2; exit 1; }
	@$(COMPILE) pyproject.toml --extra broker --extra cli --extra cluster --extra spans --group build --output-file requirements.txt
	@$(COMPILE) pyproject.toml --extra broker --extra cli --extra cluster --extra spark --extra java --extra otel --extra redis --extra postgres --extra spans --group dev --constraint requirements.txt --output-file requirements-dev.txt
	@$(COMPILE) pyproject.toml --extra broker --extra cli --extra cluster --extra spans --extra spark --group build --constraint requirements-dev.txt --output-file requirements-jobs.txt
	@$(COMPILE) --group protos --output-file requirements-protos.txt

clean: ## remove what was built and installed; ./data stays
	@rm -rf .venv build dist clients/python/*.egg-info .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find $(SOURCES) postdate_api -name __pycache__ -type d -prune -exec rm -rf {} +
