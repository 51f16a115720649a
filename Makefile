# Each target makes .venv and installs what it needs; a second run does not install again.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
comma  := ,

# One stamp per set of extras: reinstalled only when the project's own requirements change.
define install
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(1)]'
	@touch $@
endef

$(VENV)/.demo: pyproject.toml constraints.txt
	$(call install,demo)

$(VENV)/.test: pyproject.toml constraints.txt
	$(call install,demo$(comma)test)

$(VENV)/.bench: pyproject.toml constraints.txt
	$(call install,demo$(comma)test$(comma)bench)

.PHONY: demo test full check docs bench chaos clean
demo: $(VENV)/.demo
	$(BIN)/paceline demo

# Tests of real launchers, of campaigns of kills, of ranks that fail and of commands wait much of their time: they run, with
# those of recipes and examples, beside the others, and their account comes last.
BESIDE = tests/launchers tests/tools tests/world tests/cli tests/recipes tests/examples
test: $(VENV)/.test
	@$(BIN)/python -m pytest $(BESIDE) > $(VENV)/beside.log 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest $(BESIDE:%=--ignore %); others=$$?; \
	wait $$beside; found=$$?; echo "$(BESIDE):"; cat $(VENV)/beside.log; \
	test $$others -eq 0 -a $$found -eq 0

# Everything: the checks, all tests with all cases of those that run a sample otherwise (pairs of features, campaigns,
# properties), and those that need a GPU where there is one. Hours on a small machine.
full: check
	$(BIN)/python -m pytest --long
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	$(BIN)/python -m pytest -m gpu --long; else echo "no GPU here: the tests marked gpu were left out"; fi

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.docs.translate --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file mkdocs.zh.yml

# Writes the pages of options, of the Python API and of what goes together anew, in English and in Chinese, and builds all
# pages into site/ and site/zh/.
docs: $(VENV)/.test
	$(BIN)/python -m tools.docs.options
	$(BIN)/python -m tools.docs.api
	$(BIN)/python -m tools.docs.together
	$(BIN)/python -m tools.docs.arguments && $(BIN)/ruff format -q src/paceline/config/arguments.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file mkdocs.zh.yml

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/loop_overhead.py
	$(BIN)/python benchmarks/plan_scale.py
	$(BIN)/python benchmarks/checkpoint_stall.py

# The long run of the campaigns, hours on a small machine: JOBS=16 shares it out, SEED=1 draws other cases.
JOBS ?= $(shell nproc)
SEED ?= 0
chaos: $(VENV)/.test
	PYTHONPATH=. $(BIN)/python -m tools.chaos --long --seed $(SEED) --jobs $(JOBS) --folder chaos-$(SEED)

clean:
	rm -rf $(VENV) site
