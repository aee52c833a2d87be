# Two commands from nothing but Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The stamp carries the hash of what was installed, so that a second call installs nothing.
HASH   := $(shell $(PYTHON) -c 'import hashlib; print(hashlib.sha256(b"".join(open(f, "rb").read() for f in ("constraints.txt", "pyproject.toml"))).hexdigest()[:16])')
STAMP  := $(VENV)/installed-$(HASH)

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM = false
# Two test workers share two cores; spinning OpenMP threads would starve each other.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0

.PHONY: demo test lint bench setup clean

setup: $(STAMP)

$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "sdo-toolkit needs Python 3.11 or later; $(PYTHON) is %d.%d. Mend: make PYTHON=/path/to/python3.11" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/installed-* && touch $@

demo: $(STAMP)
	$(BIN)/sdo demo --out demo --overwrite

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info
