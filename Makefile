# Everything is set up in .venv from constraints.txt; a second run reuses it.
PYTHON ?= python3
VENV := .venv
# Tests run at once; each worker has eight simulated devices.
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell cat constraints.txt pyproject.toml | cksum | cut -d' ' -f1)
WILD_VENV := .venv-wild
WILD_STAMP := $(WILD_VENV)/.setup-$(shell cat constraints.txt tests/wild/requirements.txt | cksum | cut -d' ' -f1)
XLA_VENV := .venv-torch-xla
XLA_STAMP := $(XLA_VENV)/.setup-$(shell cat constraints-torch-xla.txt tests/torch_xla/cuda_stubs.py | cksum | cut -d' ' -f1)

# Sources are compiled to bytecode once, not by each process that a test starts.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-torch-xla test-versions test-exhaustive fuzz lint format bench bench-check fire-drill hostile compat-table docs stock-outcomes clean

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "xlatrain needs Python 3.11 or later, but $(PYTHON) is $$($(PYTHON) --version); try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q --no-build-isolation -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.setup-*
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

# The fast tests run first and those marked slow last (tests/conftest.py).
test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(PYTEST_ARGS)

# After a test run: what stock came to in it is kept for all clones, in tests/stock_outcomes (tests/stock_runs.py).
stock-outcomes: setup
	$(BIN)/python -m tests.stock_runs

# Random scripts under stock Lightning and here: what differs, made as small as it gets.
FUZZ_COUNT ?= 1000
fuzz: setup
	$(BIN)/python -m tests.fuzz --count $(FUZZ_COUNT) --shrink $(FUZZ_ARGS)
	$(BIN)/python -m tests.fuzz --count $(FUZZ_COUNT) --loops --shrink $(FUZZ_ARGS)
	$(BIN)/python -m tests.fuzz --count $(FUZZ_COUNT) --hooks --shrink $(FUZZ_ARGS)

# The torch-xla path, in an environment of its own (.venv-torch-xla, constraints-torch-xla.txt), on four XLA CPU devices.
test-torch-xla: $(XLA_STAMP)
	XLA_FLAGS= PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 $(XLA_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup tests/torch_xla $(PYTEST_ARGS)

$(XLA_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "torch_xla 2.9 is built for Python up to 3.13, but $(PYTHON) is $$($(PYTHON) --version); try: make PYTHON=python3.13 test-torch-xla"; exit 1; }
	test -x $(XLA_VENV)/bin/python || $(PYTHON) -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python -m pip install -q --no-deps -r constraints-torch-xla.txt
	$(XLA_VENV)/bin/python tests/torch_xla/cuda_stubs.py "$$($(XLA_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
	$(XLA_VENV)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	@rm -f $(XLA_VENV)/.setup-*
	@touch $@

# The bridge, the engine, init, what rewrites jaxprs and the basics of parity with the other versions of torch and JAX that
# are supported, each in an environment of its own (.venv-versions, 1.3 GB each for torch). JAX 0.11 needs a python3.12 or
# later on the PATH.
test-versions: setup
	$(BIN)/python -m tests.versions --jobs $(JOBS)

# PyTorch's whole op database through the bridge, in five dtypes: about as long as all other tests together.
test-exhaustive: setup
	$(BIN)/python -m pytest -n $(JOBS) -m exhaustive $(PYTEST_ARGS)

# Models of other people's libraries under stock Lightning and here, in an environment of their own; writes docs/wild.md.
test-wild: $(WILD_STAMP)
	$(WILD_VENV)/bin/python tests/wild $(PROGRAMS)

$(WILD_STAMP):
	test -x $(WILD_VENV)/bin/python || $(PYTHON) -m venv $(WILD_VENV)
	grep -v '^setuptools==' constraints.txt > $(WILD_VENV)/constraints.txt  # deeptab wants an older one
	$(WILD_VENV)/bin/python -m pip install -q -c constraints.txt setuptools
	$(WILD_VENV)/bin/python -m pip install -q --no-build-isolation -c constraints.txt -e '.[dev]'
	$(WILD_VENV)/bin/python -m pip install -q -c $(WILD_VENV)/constraints.txt -r tests/wild/requirements.txt
	@rm -f $(WILD_VENV)/.setup-*
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks

# Nineteen models beside eager torch and inductor; fails where a ratio is a tenth worse than the figures that are kept.
KEPT ?= benchmarks/results/2026-11-29_0350_models.json
bench-check: setup
	$(BIN)/python -m benchmarks models --steps 12 --check $(KEPT)

# A training run of two processes, killed fifty times at random moments, ends with the weights of the undisturbed one.
fire-drill: setup
	$(BIN)/python -m tests.multiprocess.drill --kills 50

# Attacks and accidents, the long form of tests/hostile: malicious files, damages, messages, writers, and kills of four processes.
hostile: setup
	$(BIN)/python -m tests.hostile

# Every public name of stock Lightning against what is here; says what docs/compat_reasons.toml does not explain.
compat-table: setup
	$(BIN)/python -m tools.compat_table

# The documentation as a site, in build/docs; a broken link or name is an error. Nothing is fetched.
docs: setup
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo build/docs/index.html

clean:
	rm -rf $(VENV) $(XLA_VENV) $(WILD_VENV) .venv-versions demo_output build *.egg-info
