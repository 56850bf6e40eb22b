# Works on a fresh machine with Python 3.10+ and pip; everything goes to .venv (and .venv-frameworks).
#
#   make demo                        train a small CNN through creel and through torch, and compare
#   make demo DATA=/path/to/images   the same on your own folder (one subfolder per class)
#   make demo-cluster                train over emulated hosts whose memories are one (Linux, as root)
#   make test                        all tests
#   make bench                       every benchmark, one after the other;
#                                    ends with those that lack something (DLIO: benchmarks/dlio.py);
#                                    BENCH="cost_per_batch paced" some of them, ARGS="--rounds 3" goes to each
#   make stress                      2,500 random programs against torch, 160 killed daemons, random tests 20 times (an hour)
#   make frameworks                  the tests with frameworks and libraries that take or make a loader
#   make floors                      a short set of tests with the oldest releases that creel permits
#                                    (Python 3.10 to 3.12; torch 2.4 may bring gigabytes of CUDA)
#   make floors-short                the same with the torch of .venv and fewer tests, as CI runs it
#   make lint                        format, lint, strict types
#   make check                       the same and unit tests
#   make site                        the pages of docs/ as a site, in build/site; a broken link is an error

PYTHON ?= python3
VENV   ?= .venv
DATA   ?=
DEMO   ?=
ARGS   ?=
BENCH  ?= $(filter-out measure workloads two_commits,$(basename $(notdir $(wildcard benchmarks/*.py))))

BIN   := $(VENV)/bin
# Four files of tests at a time on two cores, as most tests wait for something; tests/conftest.py
# says in which order. ARGS=-n0 runs one after the other (pdb needs that).
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.creel-stamp
# The frameworks have an environment of their own: each sees what it brings, and nothing of ours.
WITH_FRAMEWORKS := $(VENV)-frameworks
FRAMEWORKS_STAMP := $(WITH_FRAMEWORKS)/.creel-stamp
WITH_FLOORS := $(VENV)-floors
WITH_SITE := $(VENV)-site
SITE_STAMP := $(WITH_SITE)/.creel-stamp
# What touches torch, pyarrow, zmq, msgspec, click and rich most: 1,400 tests.
FLOORS_TESTS := tests/parity/test_parity.py tests/system/line/test_dataloader.py $(patsubst %,tests/unit/*/test_%.py, \
    cli cli_shown collating config datasets doctor manifest messages packing page peer_wire records remote \
    samplers saved_orders slots stats torch_random)
FLOORS_SHORT := $(patsubst %,tests/unit/*/test_%.py,cli cli_shown config doctor manifest messages packing page peer_wire records remote slots)
export DATA
# An installed creel has been compiled; else each of the many processes here would do so anew (0.2 s).
unexport PYTHONDONTWRITEBYTECODE
LINKS := cache daemon loader policies

.PHONY: help setup demo demo-cluster test bench stress frameworks floors floors-short lint check site clean
help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

# One pip call for everything, so that the constraint on torch holds for all of it; a new pip first,
# because Python 3.10's own knows no dependency groups.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "creel needs Python 3.10 or newer: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@for part in $(LINKS); do test -e src/creel/$$part/__init__.py || \
	    { echo "src/creel/$$part is no link to $$part/: this copy lost its symbolic links; use git clone"; exit 1; }; done
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing creel and what its tests need into $(VENV) (once)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check 'pip>=25.1'
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt \
	    -e '.[torch,http,prometheus]' --group dev --group demo
	@touch $@

$(FRAMEWORKS_STAMP): pyproject.toml constraints.txt
	@test -x $(WITH_FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(WITH_FRAMEWORKS)
	@echo "installing the frameworks into $(WITH_FRAMEWORKS) (once)"
	@$(WITH_FRAMEWORKS)/bin/python -m pip install -q --disable-pip-version-check 'pip>=25.1'
	@PYTHONWARNINGS=ignore $(WITH_FRAMEWORKS)/bin/python -m pip install -q --disable-pip-version-check \
	    -c constraints.txt -e '.[torch]' --group frameworks
	@touch $@

# mkdocs needs nothing of creel, and creel nothing of it.
$(SITE_STAMP): pyproject.toml
	@test -x $(WITH_SITE)/bin/python || $(PYTHON) -m venv $(WITH_SITE)
	@$(WITH_SITE)/bin/python -m pip install -q --disable-pip-version-check 'pip>=25.1'
	@$(WITH_SITE)/bin/python -m pip install -q --disable-pip-version-check --group docs
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo/demo.py $${DATA:+--data "$$DATA"} $(if $(filter short,$(DEMO)),--short) $(ARGS)

demo-cluster: $(STAMP)
	@$(BIN)/python examples/demo/demo_cluster.py $${DATA:+--data "$$DATA"} $(ARGS)

test: $(STAMP)
	@$(PYTEST) $(ARGS)

bench: $(STAMP)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --group bench
	@skipped=; for one in $(BENCH); do echo "== benchmarks/$$one.py"; $(BIN)/python benchmarks/$$one.py $(ARGS) \
	    || { [ $$? = 77 ] && skipped="$$skipped $$one"; } || exit 1; done; echo "skipped:$${skipped:- none}"

# ARGS goes to the first: "--first 1000" for other programs than the first thousand.
stress: $(STAMP)
	@cd tests && "$(abspath $(VENV))/bin/python" -m stress.random_programs --count 1000 $(ARGS)
	@cd tests && "$(abspath $(VENV))/bin/python" -m stress.random_programs --wrapped --count 1000
	@cd tests && "$(abspath $(VENV))/bin/python" -m stress.rehearsal_programs --count 500
	@$(BIN)/python examples/continual.py --check
	@$(BIN)/python examples/gray_scott.py --check
	@cd tests && "$(abspath $(VENV))/bin/python" -m stress.chaos --kills 160
	@SEEDS=20 $(PYTEST) -q tests/unit tests/sim tests/parity $(patsubst %,tests/system/%.py, \
	    data/test_listed_files storage/test_decoded_changes storage/test_store_requests)

# FRAMEWORKS=required: one that cannot be imported is an error here, elsewhere its tests are skipped.
frameworks: $(FRAMEWORKS_STAMP)
	@FRAMEWORKS=required $(WITH_FRAMEWORKS)/bin/python -m pytest -n 2 tests/compat $(ARGS)

floors:
	@test -x $(WITH_FLOORS)/bin/python || $(PYTHON) -m venv $(WITH_FLOORS)
	@PYTHONWARNINGS=ignore $(WITH_FLOORS)/bin/python -m pip install -q --disable-pip-version-check \
	    -c constraints-floors.txt '.[all]' pytest pytest-timeout pytest-xdist hypothesis h5py
	@$(WITH_FLOORS)/bin/python -m pytest -n 2 -q $(FLOORS_TESTS) $(ARGS)

# What is not in the list comes from $(VENV), whose packages are behind the others on the path.
floors-short: $(STAMP)
	@test -x $(WITH_FLOORS)-short/bin/python || $(BIN)/python -m venv --without-pip $(WITH_FLOORS)-short
	@$(BIN)/python -m pip --python $(WITH_FLOORS)-short/bin/python install -q --disable-pip-version-check \
	    --no-deps $$(grep -v '^#\|^torch' constraints-floors.txt)
	@purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	    $(BIN)/python -c "$$purelib" > "$$($(WITH_FLOORS)-short/bin/python -c "$$purelib")/behind.pth"
	@PYTHONPATH=src $(WITH_FLOORS)-short/bin/python -m pytest -n 2 -q $(FLOORS_SHORT) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests
	$(BIN)/mypy benchmarks examples scripts

check: lint
	$(PYTEST) -q tests/unit tests/test_layout.py

# The variable keeps a notice of another product out of the log.
site: $(SITE_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(WITH_SITE)/bin/python -m mkdocs build --strict $(ARGS)

clean:
	rm -rf $(VENV) $(WITH_FRAMEWORKS) $(WITH_FLOORS) $(WITH_FLOORS)-short $(WITH_SITE) .demo build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
