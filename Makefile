# The workflow of this repository; `make help` lists it.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
ENGINE ?=
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
GPU_PYTHON ?= $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help setup proto fmt lint type fresh test test-slow evidence demo bench gpu-check up down clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: ## Make .venv with everything in it (ENGINE=transformers where pip finds no CPU build of torch)
	@$(PYTHON) scripts/setup_env.py $(if $(ENGINE),--engine $(ENGINE)) --venv $(VENV)

proto: setup ## Generate protos/gen from the .proto files
	$(BIN)/buf format --write --path protos/opentinkerapi
	$(BIN)/python scripts/gen_protos.py
	$(BIN)/python -m opentinkerapi.runtime.retries

fmt: setup ## Format the code and sort its imports
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

lint: setup ## Style, formats, dependency rules, protos, compose file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code --path protos/opentinkerapi

type: setup ## mypy --strict
	$(BIN)/mypy

fresh: setup ## Fail if the generated code is not what the protos say
	$(BIN)/python scripts/gen_protos.py --check

test: lint type fresh ## All checks and the fast tests
	$(PYTEST) -m "not slow"

test-slow: setup ## The tests that take long or need a model
	$(PYTEST) -m slow

evidence: setup ## Measure one claim, e.g. CASE=demo; writes docs/evidence/
	@test -n "$(CASE)" || { $(BIN)/python scripts/evidence.py --list; exit 2; }
	$(BIN)/python scripts/evidence.py $(CASE)

demo: setup ## Train SmolLM2-135M-Instruct to add and subtract, on this machine (ARGS="--seed 1")
	$(BIN)/opentinker demo $(ARGS)

bench: setup ## Run one benchmark, e.g. BENCH=overhead ARGS="--pairs 3"; prints JSON lines
	@test -n "$(BENCH)" || { $(BIN)/python -m benchmarks --list; exit 2; }
	@$(BIN)/python -m benchmarks $(BENCH) $(ARGS)

gpu-check: ## Try this machine's GPU in at most 8 minutes; prints one JSON object (see README; ARGS="--model random")
	@$(GPU_PYTHON) scripts/gpu_check.py $(ARGS)

up: setup ## Start the embedded stack; it stays up
	$(BIN)/opentinker up

down: ## Stop it
	$(BIN)/opentinker down

clean: ## Remove caches and builds; keeps .venv and runs/
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
