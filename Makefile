# Every target works from a fresh clone: it creates .venv first if that is missing or out of date.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Without bytecode files every process of a test would compile torch anew, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE
# One single-threaded test process per core.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

# Files with few but long tests. Started last, they would keep one core busy for minutes beside an idle one.
SLOW_FIRST := $(addprefix tests/,test_wheel.py bench/test_study_killed.py docs/test_commands_in_docs.py \
  training/test_loop.py docs/test_examples.py)

# A second device on any machine: XLA on the CPU, which has its own torch. -O0 halves the time, most of it compilation.
DEVICE_VENV  := .venv-device
DEVICE_TORCH := torch==2.9.0 torch_xla==2.9.0 torchvision==0.24.0
XLA_ON_CPU   := DEVICE=xla PJRT_DEVICE=CPU \
  XLA_FLAGS='--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'

# The lowest versions that pyproject.toml allows, in an environment of their own. LOWEST_EXTRAS are what LOWEST_TESTS
# need; the test tools, and what plugs into them, keep their versions of constraints.txt.
LOWEST        := .venv-lowest
LOWEST_EXTRAS := bench stores tensorboard
LOWEST_TESTS  := ops losses metrics config data models training
LOWEST_TOOLS  := anyio|hypothesis|pytest|pytest-cov|pytest-xdist|pytorch-metric-learning

.PHONY: help setup demo test coverage slow torture lowest device lint check docs constraints clean

help:          ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv and install nearkin for development (about 6 GB, most of it torch)

demo: setup    ## Train, evaluate and report on built-in data (about two minutes on two cores)
	$(BIN)/nearkin demo

test: setup    ## Run the tests (about three minutes on two cores); DEVICE=cuda or mps adds tests/device
	$(PYTEST) -m "not slow"

coverage: setup ## Run the tests and check the line coverage against the floor in pyproject.toml
	$(PYTEST) -m "not slow" --cov=nearkin --cov-report=
	$(BIN)/coverage report --format=total

slow: setup    ## Run the slow tests: kill -9, distributed training, servers, exports
	$(PYTEST) -m "slow" --no-loadscope-reorder $(SLOW_FIRST) tests

torture: setup ## Attack it: kill -9, damaged files and images, hostile requests and archives (about 4 minutes)
	cd tests && OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/python -m torture

lowest: $(LOWEST)/.ready ## Run the tests of the core, data, models and training with the lowest versions allowed
	NUMBA_CACHE_DIR=$(CURDIR)/$(LOWEST)/numba $(subst $(BIN),$(LOWEST)/bin,$(PYTEST)) -m "not slow" $(addprefix tests/,$(LOWEST_TESTS))

device: $(DEVICE_VENV)/.ready ## Run tests/device on a second device, XLA on the CPU (installs 7 GB into .venv-device)
	OMP_NUM_THREADS=1 $(XLA_ON_CPU) $(DEVICE_VENV)/bin/python -m pytest -n logical --maxprocesses 4 --dist worksteal tests/device

lint: setup    ## Check style, format, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: test slow lowest device lint ## Run everything that continuous integration runs

docs: setup    ## Build the documentation into site/, including its generated pages
	$(BIN)/python docs/generate.py --pages
	$(BIN)/python docs/generate_reference.py
	$(BIN)/mkdocs build --strict --quiet

constraints: setup ## Pin the newest versions allowed by pyproject.toml in constraints.txt
	$(BIN)/uv pip compile --upgrade --universal --no-header --no-annotate --all-extras pyproject.toml -o constraints.txt

clean:         ## Remove .venv, .venv-lowest, .venv-device and tool caches (never runs/)
	rm -rf $(VENV) $(LOWEST) $(DEVICE_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# uv installs from its cache in seconds; pip is the fallback.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "nearkin needs Python 3.11 or newer; got $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "Could not create a virtual environment. On Debian and Ubuntu: apt-get install python3-venv"; exit 2; }
	@echo "Installing nearkin for development into $(VENV) (the first time downloads about 3 GB)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv \
	  || echo "uv could not be installed; using pip"
	@if [ -x $(BIN)/uv ]; then \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'; \
	else \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'; \
	fi
	@touch $(READY)
	@echo "Installed. To have the command nearkin in this shell: . $(BIN)/activate"

# Wheels only: on a new Python the lowest version that has one counts.
$(LOWEST)/.ready: $(READY) Makefile
	@test -x $(BIN)/uv || { echo "make lowest needs uv in $(VENV): $(BIN)/python -m pip install uv"; exit 2; }
	@echo "Installing the lowest versions allowed into $(LOWEST) (the first time downloads about 3 GB)"
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	@grep -E '^($(LOWEST_TOOLS))==' constraints.txt | $(BIN)/uv pip compile --quiet --python $(LOWEST)/bin/python \
	  --resolution lowest-direct --only-binary :all: $(addprefix --extra ,$(LOWEST_EXTRAS)) pyproject.toml - \
	  --output-file $(LOWEST)/lowest.txt
	@$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --requirements $(LOWEST)/lowest.txt
	@$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --no-deps --editable .
	@touch $@

$(DEVICE_VENV)/.ready: $(READY) Makefile
	@test -x $(BIN)/uv || { echo "make device needs uv in $(VENV): $(BIN)/python -m pip install uv"; exit 2; }
	@echo "Installing torch with XLA into $(DEVICE_VENV)"
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(DEVICE_VENV)
	@grep -vE '^(torch|triton|nvidia|cuda)' constraints.txt > $(DEVICE_VENV)/constraints.txt
	@$(BIN)/uv pip install --quiet --python $(DEVICE_VENV)/bin/python --constraint $(DEVICE_VENV)/constraints.txt \
	  $(DEVICE_TORCH) --editable '.[images]' scikit-learn pytest pytest-xdist
	@touch $@
