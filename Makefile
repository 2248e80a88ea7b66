# Needs Python 3.11 to 3.13 and nothing else. 3.14 has no pkgutil.find_loader, which mmengine 0.10.7
# calls.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUICKSTART := $(wildcard configs/image_classification/aft-conv-quickstart_*_digits.py)
WORK_DIR := work_dirs/quickstart
# Where the compiled mmcv is kept: building it takes minutes.
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/aft_mm

.PHONY: quickstart downstream docs linkcheck test lint licenses release-weights clean

# Every lock is complete, so that pip has nothing to choose.
PIN := $(BIN)/python -m pip install --no-deps --require-hashes

$(VENV)/installed: requirements/lock.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(PIN) -r requirements/lock.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# What only development needs.
$(VENV)/development: $(VENV)/installed requirements/dev.txt
	$(PIN) -r requirements/dev.txt
	touch $@

# One thread: the operations of so small a model are shorter than waiting for a second one.
quickstart: export OMP_NUM_THREADS := 1
quickstart: $(VENV)/installed
	$(BIN)/python tools/train.py $(QUICKSTART) --work-dir $(WORK_DIR)
	checkpoint=$$(cat $(WORK_DIR)/last_checkpoint) && \
	$(BIN)/python tools/test.py $(QUICKSTART) $$checkpoint \
		--work-dir $(WORK_DIR)/test --out $(WORK_DIR)/metrics.json && \
	$(BIN)/python tools/analysis_tools/plot_position_bias.py $(QUICKSTART) $$checkpoint \
		--out $(WORK_DIR)/position_bias.png
	@echo
	@$(BIN)/python -c "import json; metrics = json.load(open('$(WORK_DIR)/metrics.json')); \
		print('accuracy:       %.2f %% of the held-back fifth' % metrics['accuracy/top1'])"
	@echo "checkpoint:     $$(cat $(WORK_DIR)/last_checkpoint)"
	@echo "log:            $$(ls -td $(WORK_DIR)/2*/ | head -n 1)"
	@echo "position bias:  $(WORK_DIR)/position_bias.png"

# mmdet and mmseg, with the compiled mmcv that they import: the files of mmcv-lite and the operators,
# installed over it, so that no moment is without mmcv.
downstream: $(VENV)/downstream

$(VENV)/downstream: $(VENV)/installed requirements/downstream.txt requirements/build_mmcv.sh \
		requirements/mmcv.txt
	$(PIN) -r requirements/downstream.txt
	wheel=$$(requirements/build_mmcv.sh $(BIN)/python '$(CACHE)') && \
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall "$$wheel"
	$(BIN)/python -c "import mmcv.ops, mmdet.models, mmseg.models; \
		print('mmcv', mmcv.__version__, 'with operators, mmdet', mmdet.__version__, 'mmseg', mmseg.__version__)"
	touch $@

# The site. A warning is an error: links inside of the project that lead nowhere are warnings.
SPHINX := $(BIN)/sphinx-build -W --keep-going -q -c docs -d docs/_build/doctrees

docs: $(VENV)/docs
	$(SPHINX) -b html . docs/_build/html
	@echo "site:  docs/_build/html/index.html"

# Links to other places, which needs the network.
linkcheck: $(VENV)/docs
	$(SPHINX) -b linkcheck . docs/_build/linkcheck

$(VENV)/docs: $(VENV)/installed requirements/docs.txt
	$(PIN) -r requirements/docs.txt
	touch $@

test: $(VENV)/development
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

# Release files of the runs in RUNS, with a list of their hashes, in the new folder RELEASE.
RUNS ?= $(WORK_DIR)
RELEASE ?= release
release-weights: $(VENV)/installed
	$(BIN)/python tools/model_converters/release_weights.py $(RUNS) --out $(RELEASE)

lint: $(VENV)/development
	$(BIN)/ruff check .
	$(BIN)/mypy

# What every installed dependency states as its licence.
licenses: $(VENV)/development
	@$(BIN)/python requirements/licenses.py requirements/lock.txt requirements/dev.txt \
		requirements/downstream.txt requirements/mmcv.txt

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .ruff_cache .mypy_cache
