# Each target does all the set-up it needs: the virtual environment, the dependencies, the extension.
#
#   make test PYTHON=python3.13 VENV=.venv-3.13     another Python, beside the first
#   make test ARGS="-k lock -x"                     arguments for pytest (bench, mutants: for those)

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
CORE := setup.py pyproject.toml $(wildcard _core/*.pyx _core/*.pxi _core/*.pxd _core/*.h)
SANITIZED := build/sanitize

.PHONY: setup bench bench-micro test lint format sanitize wheel mutants peer-suites clean
.DEFAULT_GOAL := setup

setup: $(VENV)/.core

# pip of Python 3.11 knows no --group, so pip itself comes first.
$(VENV)/.deps: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("redbolt needs Python 3.11+: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev --group bench
	@touch $@

$(VENV)/.core: $(VENV)/.deps $(CORE)
	REDBOLT_REQUIRE_CORE=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation --editable .
	@touch $@

bench: setup
	$(BIN)/python -m bench --quick $(ARGS)

bench-micro: setup
	$(BIN)/python -m pytest bench/micro --benchmark-warmup=on --benchmark-disable-gc --benchmark-max-time=0.5 \
		--benchmark-group-by=group --benchmark-sort=name --benchmark-columns=min,median,iqr,rounds $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

mutants: setup
	$(BIN)/python -m tests.mutants $(ARGS)

peer-suites: setup
	$(BIN)/python -m tests.peer_suites $(ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@mkdir -p build
	$(BIN)/cython --warning-errors -I _core --module-name redbolt._core -o build/lint.c _core/core.pyx

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# A second copy of the package, compiled with AddressSanitizer and UndefinedBehaviorSanitizer, takes the place
# of the first by PYTHONPATH. A report ends the process that it is about. What ASan reports goes to files, so that a
# child's report is seen too: any file is a failure. UBSan only writes to standard error, hence --capture=sys.
# The quarantine is small, since some tests measure memory.
sanitize: setup
	rm -rf $(SANITIZED)/reports
	mkdir -p $(SANITIZED)/reports $(SANITIZED)/lib
	find $(SANITIZED)/lib -name '*.py' -delete
	REDBOLT_REQUIRE_CORE=1 REDBOLT_SANITIZE=1 $(BIN)/python setup.py --quiet \
		build --build-lib $(SANITIZED)/lib --build-temp $(SANITIZED)/temp
	@status=0; \
	PYTHONPATH="$(CURDIR)/$(SANITIZED)/lib" PYTHONMALLOC=malloc REDBOLT_SLACK=10 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" \
	ASAN_OPTIONS="detect_leaks=0:quarantine_size_mb=1:thread_local_quarantine_size_kb=64:halt_on_error=1:log_path='$(CURDIR)/$(SANITIZED)/reports/asan'" \
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	$(BIN)/python -m pytest --capture=sys -o timeout=600 $(ARGS) || status=$$?; \
	for report in $(SANITIZED)/reports/*; do \
		if [ -e "$$report" ]; then status=1; echo "== $$report =="; cat "$$report"; fi; \
	done; \
	exit $$status

wheel: setup
	rm -rf dist
	REDBOLT_REQUIRE_CORE=1 $(BIN)/python -m build

clean:
	rm -rf build dist src/*.egg-info src/redbolt/_core.*.so _core/hiredis .venv*/.core $(VENV)/.core
	rm -rf .mypy_cache .pytest_cache .ruff_cache .benchmarks
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
