# The two commands:  make train   and   make test.   Both make the virtual environment .venv first if it is missing.
#
#   make train ARGS="--set train.train_iters=20"         arguments go to `mindspeed-cp train`
#   make train CONFIG=my.yaml                            another configuration
#   make test ARGS="tests/data -k packing"               arguments go to pytest
#   make test PYTHON=python3.12 VENV=.venv-3.12          another Python (3.10, 3.11 or 3.12), its own environment
#   make test TORCH_INDEX=https://mirror/whl/cpu         another index of CPU builds of torch

CONFIG ?= configs/quickstart.yaml
ARGS ?=
PYTHON ?=
VENV ?= .venv
# Asked only where pip's own configuration offers no CPU build of torch.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

INSTALLED = $(VENV)/installed
RUN = $(VENV)/bin

.PHONY: help train test lint format bench environment clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

train: $(INSTALLED) ## train a small GPT on 4 local ranks (configs/quickstart.yaml)
	$(RUN)/mindspeed-cp train $(CONFIG) $(ARGS)

test: lint ## ruff, mypy and all tests
	$(RUN)/python -m pytest $(ARGS)

lint: $(INSTALLED) ## ruff and mypy
	$(RUN)/ruff check .
	$(RUN)/mypy

format: $(INSTALLED) ## write the sources as ruff formats them
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

bench: $(INSTALLED) ## the engine's speed against its ideal
	$(RUN)/python -m benchmarks.engine $(ARGS)

environment: $(INSTALLED) ## only make the virtual environment

# environment.py takes a lock, so two makes at once are safe, and does nothing if the contents of its inputs have not changed.
$(INSTALLED): $(wildcard requirements/*) pyproject.toml setup.py
	@python=$$(requirements/python.sh "$(PYTHON)") && "$$python" requirements/environment.py $(VENV) --torch-index "$(TORCH_INDEX)"

clean: ## remove the virtual environment, caches and build results, not runs/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
