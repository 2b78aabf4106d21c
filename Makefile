# The two commands:  make train   and   make test.   Both make the virtual environment .venv first if it is missing.
# Parts of `make test` are  make test-npu:  the real torch-npu without CANN or an NPU, and  make test-triton:  the Triton kernels
# interpreted and compiled. Each has environments of its own, since torch-npu, triton and triton-ascend want that.
# Not a part is  make test-cuda:  the tests that need NVIDIA GPUs, with gigabytes of torch for CUDA; without GPUs it fails.
#
#   make train ARGS="--set train.train_iters=20"         arguments go to `mindspeed-cp train`
#   make train CONFIG=my.yaml                            another configuration
#   make test ARGS="tests/data -k packing"               arguments go to pytest, in one process; the other parts are left out
#   make test JOBS=1                                     test files one after the other; JOBS of them run at once
#   make test-quick                                      ruff and the tests below half a second: no other environment, no mypy
#   make test-all                                        the slow tests too, and the full matrix: all sizes, more random examples
#   make slow-tests                                      measures again which tests are slow (tests/slow.json)
#   make test-npu ARGS="-k streams"                      the same for the tests of tests/npu
#   make test-npu QUEUE=2                                under another mode of torch-npu's queue (TASK_QUEUE_ENABLE): 0, 1 or 2 (1)
#   make test-npu LATE=1 SEGMENTS=True                   with late results, with the allocator's expandable segments
#   make test-cuda GPUS=2                                on two GPUs, fewer are an error (1)
#   make test PYTHON=python3.12 VENV=.venv-3.12          another Python (3.10, 3.11 or 3.12), its own environment
#   make test TORCH_INDEX=https://mirror/whl/cpu         another index of CPU builds of torch

CONFIG ?= configs/quickstart.yaml
ARGS ?=
JOBS ?= 2
GPUS ?= 1
QUEUE ?= 1
LATE ?= 0
SEGMENTS ?=
NPU_TESTS ?= tests/npu
PYTHON ?=
VENV ?= .venv
VENV_NPU ?= $(VENV)-npu
# Asked only where pip's own configuration offers no CPU build of torch.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

INSTALLED = $(VENV)/installed
INSTALLED_NPU = $(VENV_NPU)/installed
INSTALLED_TRITON = $(VENV)-triton/installed
INSTALLED_ASCEND = $(VENV)-ascend/installed
INSTALLED_CUDA = $(VENV)-cuda/installed
INSTALLED_TOOLS = $(VENV)-tools/installed
INSTALLED_SITE = $(VENV)-site/installed
RUN = $(VENV)/bin
ENVIRONMENT = @python=$$(requirements/python.sh "$(PYTHON)") && "$$python" requirements/environment.py
ifeq ($(shell uname -s),Linux)
PARTS = $(MAKE) --no-print-directory test-npu test-triton FULL=$(FULL)
MODES = $(MAKE) --no-print-directory test-npu-modes
else
MODES = echo "test-npu-modes is left out"
PARTS = echo "test-npu and test-triton are left out: torch-npu, triton and triton-ascend have wheels for Linux alone"
endif
# Whole files go to JOBS processes, long ones first (tests/conftest.py). One for each of
# two cores: three take as long and more memory. One thread each, as those of torch would take the cores from each other.
SPREAD = $(if $(strip $(ARGS)),,-n $(JOBS) --dist loadfile --no-loadscope-reorder)
THREADS = $(if $(strip $(ARGS)),,OMP_NUM_THREADS=1)
TIMES = $(if $(strip $(TIMES_FOLDER)),--junitxml=$(TIMES_FOLDER)/$(1).xml)

# Bytecode is kept, whatever the environment says: else each of a test run's many processes compiles the package anew.
export PYTHONDONTWRITEBYTECODE =

# test-all sets this: the tests marked `slow` or `thorough` run too, and hypothesis draws more examples.
FULL ?=
# slow-tests sets this: pytest writes there what each test took.
TIMES_FOLDER ?=

# Tests of tests/npu on which the mode of the queue, late results and the allocator bear: operators, streams, HCCL, the engine.
QUEUE_TESTS = $(addprefix tests/npu/test_,$(addsuffix .py,task_queue operators streams syncs late_engine late_edges hccl aten runtime \
	counts table roll agreement bad_input))

.PHONY: help train test test-main test-quick test-all slow-tests test-versions test-npu test-npu-modes test-triton test-cuda lint docs-tables site audit lock format bench environment clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

train: $(INSTALLED) ## train a small GPT on 4 local ranks (configs/quickstart.yaml)
	$(RUN)/mindspeed-cp train $(CONFIG) $(ARGS)

test: $(INSTALLED) ## the linters and the tests, with the parts under torch-npu and Triton
	@$(MAKE) --no-print-directory -j2 lint test-main  # mypy, of one process, takes as long as a third of the tests
	$(if $(strip $(ARGS)),,@$(PARTS))

test-main: $(INSTALLED) ## the tests alone, without these parts
	$(THREADS) $(RUN)/python -m pytest $(SPREAD) $(FULL) $(call TIMES,main) $(ARGS)

test-quick: $(INSTALLED) ## ruff, and the tests that take less than half a second
	$(RUN)/ruff check .
	$(RUN)/ruff format --check --quiet .
	$(THREADS) $(RUN)/python -m pytest $(SPREAD) --quick $(ARGS)

slow-tests: $(INSTALLED) ## measure which tests are slow (tests/slow.json); takes as long as test-all
	$(RUN)/python -m tools.slow_tests $(ARGS)

test-all: export HYPOTHESIS_PROFILE = thorough
test-all: ## the same with the full matrix of sizes and random examples
	@$(MAKE) --no-print-directory test FULL=--thorough
	$(if $(strip $(ARGS)),,@$(MODES))

test-npu: $(INSTALLED_NPU) ## the tests under the real torch-npu, without CANN or an NPU
	$(THREADS) TORCH_DEVICE_BACKEND_AUTOLOAD=0 HOST_CANN_BUILD=$(VENV_NPU)/host_cann \
	TASK_QUEUE_ENABLE=$(QUEUE) HOST_CANN_LATE=$(LATE) $(if $(strip $(SEGMENTS)),PYTORCH_NPU_ALLOC_CONF=expandable_segments:$(SEGMENTS)) \
	$(VENV_NPU)/bin/python -m pytest --timeout-method=thread $(SPREAD) $(FULL) $(call TIMES,npu) $(NPU_TESTS) $(ARGS)

test-npu-modes: ## those that differ under the other modes of torch-npu's queue, with late results, with expandable segments
	@$(MAKE) --no-print-directory test-npu QUEUE=0 NPU_TESTS="$(QUEUE_TESTS)" ARGS=
	@$(MAKE) --no-print-directory test-npu QUEUE=2 NPU_TESTS="$(QUEUE_TESTS)" ARGS=
	@$(MAKE) --no-print-directory test-npu LATE=1 SEGMENTS=True NPU_TESTS="$(QUEUE_TESTS)" ARGS=

test-triton: $(INSTALLED_TRITON) $(INSTALLED_ASCEND) ## Triton kernels: interpreted, and compiled for NPUs and GPUs
	$(THREADS) TRITON_INTERPRET=1 TRITON_ASCEND_PYTHON=$(abspath $(VENV))-ascend/bin/python $(VENV)-triton/bin/python -m pytest $(SPREAD) $(FULL) $(call TIMES,triton) tests/ascend_kernels $(ARGS)

test-cuda: $(INSTALLED_CUDA) ## the tests that need NVIDIA GPUs; fails where there are fewer than GPUS
	$(VENV)-cuda/bin/python -m pytest --require-cuda $(GPUS) -m cuda tests/cuda $(ARGS)

test-versions: $(INSTALLED) ## the tests on older and newer Python, torch, NumPy and Megatron-core (requirements/versions.json)
	$(RUN)/python -m tools.test_versions $(ARGS)

docs-tables: $(INSTALLED) ## write what is computed in the READMEs, docs/ and configs/
	$(RUN)/python -m tools.docs_tables

site: $(INSTALLED_SITE) ## the documentation as a site, in build/site; its search needs: python -m http.server -d build/site
	$(VENV)-site/bin/python -m tools.site

lint: $(INSTALLED) ## ruff, mypy, and the order of imports
	$(RUN)/ruff check .
	$(RUN)/ruff format --check --quiet .
	$(RUN)/mypy  # without --num-workers: on a busy machine its workers are given up after seconds
	$(RUN)/lint-imports --no-logo

audit: $(INSTALLED_TOOLS) ## ask pip-audit for known faults of the pinned packages; needs the network
	@for lock in requirements/lock/*.txt; do echo $$lock; $(VENV)-tools/bin/pip-audit --disable-pip --no-deps --progress-spinner off -r $$lock || exit 1; done

lock: $(INSTALLED_TOOLS) ## write the digests of all pinned packages (requirements/lock)
	$(VENV)-tools/bin/python requirements/lock.py --torch-index "$(TORCH_INDEX)"

format: $(INSTALLED) ## write the sources as ruff formats them
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

bench: $(INSTALLED) ## the engine's speed against its ideal
	$(RUN)/python -m benchmarks.engine $(ARGS)

environment: $(INSTALLED) ## only make the virtual environment

# environment.py takes a lock, so two makes at once are safe, and does nothing if the contents of its inputs have not changed.
$(INSTALLED): $(wildcard requirements/*.* requirements/lock/*) pyproject.toml setup.py
	$(ENVIRONMENT) $(VENV) --torch-index "$(TORCH_INDEX)"

$(INSTALLED_NPU): $(wildcard requirements/*.* requirements/lock/*) pyproject.toml setup.py
	$(ENVIRONMENT) $(VENV_NPU) --requirements npu.txt --torch-index "$(TORCH_INDEX)"

$(INSTALLED_TRITON): $(wildcard requirements/*.* requirements/lock/*) pyproject.toml setup.py
	$(ENVIRONMENT) $(VENV)-triton --requirements triton.txt --torch-index "$(TORCH_INDEX)"

$(INSTALLED_ASCEND): $(wildcard requirements/*.* requirements/lock/*) pyproject.toml setup.py
	$(ENVIRONMENT) $(VENV)-ascend --requirements ascend.txt --bare --torch-index "$(TORCH_INDEX)"

$(INSTALLED_CUDA): $(wildcard requirements/*.* requirements/lock/*) pyproject.toml setup.py
	$(ENVIRONMENT) $(VENV)-cuda --requirements cuda.txt --torch-index "$(TORCH_INDEX)"

$(INSTALLED_TOOLS): $(wildcard requirements/*.* requirements/lock/*)
	$(ENVIRONMENT) $(VENV)-tools --requirements tools.txt --bare --torch-index "$(TORCH_INDEX)"

$(INSTALLED_SITE): $(wildcard requirements/*.* requirements/lock/*)
	$(ENVIRONMENT) $(VENV)-site --requirements site.txt --bare --torch-index "$(TORCH_INDEX)"

clean: ## remove the virtual environments, caches and build results, not runs/
	rm -rf $(VENV) $(VENV_NPU) $(VENV)-triton $(VENV)-ascend $(VENV)-cuda $(VENV)-tools $(VENV)-site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)*' -prune -exec rm -rf {} +
