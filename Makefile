# Two commands from nothing but Python and make: `make demo` and `make test`.
# CI runs `make lint test`, `make test-oldest` and `make test-core`.
PYTHON ?= python3
VENV   ?= .venv
# What to install: exact versions of everything.
CONSTRAINTS ?= constraints.txt
BIN    := $(VENV)/bin
# The stamp carries the hash of what was installed, so that a second call installs nothing.
HASH   := $(shell $(PYTHON) -c 'import hashlib; print(hashlib.sha256(b"".join(open(f, "rb").read() for f in ("$(CONSTRAINTS)", "pyproject.toml"))).hexdigest()[:16])')
STAMP  := $(VENV)/installed-$(HASH)

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM = false
# Two test workers share two cores; spinning OpenMP threads would starve each other.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0

.PHONY: demo test quick slow-list test-oldest test-core lint bench setup clean

setup: $(STAMP)

$(STAMP): $(CONSTRAINTS) pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "sdo-toolkit needs Python 3.11 or later; $(PYTHON) is %d.%d. Fix: make PYTHON=/path/to/python3.11" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@rm -f $(VENV)/installed-* && touch $@

demo: $(STAMP)
	$(BIN)/sdo demo --out demo --overwrite

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# The inner loop, below two minutes on two cores: all but the tests in tests/slow.txt.
quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# Measure which tests are slow, and write tests/slow.txt anew. What only waits behind a slow one shows in the quick run.
slow-list: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --junitxml build/all.xml && $(BIN)/python tests/slow.py build/all.xml
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --junitxml build/quick.xml -m "not slow" && $(BIN)/python tests/slow.py build/quick.xml

# The lower bounds of pyproject.toml, in an environment of their own.
test-oldest:
	$(MAKE) VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt test

# The built package without extras, from its wheel: planning, embedding by LSA, analysis. What needs torch is skipped.
# The tests see the installed package, not the source beside them: `pythonpath` is empty and -P keeps the folder out.
test-core:
	$(PYTHON) -m venv --clear .venv-core
	.venv-core/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) . pytest hypothesis
	.venv-core/bin/python -P tests/project/installed.py
	OMP_NUM_THREADS=1 .venv-core/bin/python -P -m pytest -o pythonpath= -rs

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .venv-oldest .venv-core build dist *.egg-info
