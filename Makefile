# `make` lists the targets. Without PYTHON, the targets create and use .venv. PYTHON=python3 uses python3 and installs nothing.

.DEFAULT_GOAL := help
.PHONY: help test test-long sanitize bench bench-ring reference stale ceilings energy traffic compare readme table plots trace site story diff stage export carry drift example example-ring example-generate example-packed lint format clean

ifdef PYTHON
SETUP := packages
SETUP_EXAMPLE := packages
else
PYTHON := .venv/bin/python
SETUP := .venv/installed
SETUP_EXAMPLE := .venv/example
endif

# Without a GPU, Triton interprets kernels on the CPU, unless TRITON_INTERPRET=0 says otherwise.
ifndef TRITON_INTERPRET
export TRITON_INTERPRET := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo 0 || echo 1)
endif

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "make first installs requirements.txt in .venv. With PYTHON=python3, it uses python3 and installs nothing."

# Targets that need a variable depend on this. So `make diff` asks for A and B before it installs anything.
needs-%:
	@: $(if $(strip $($*)),,$(error $*=… is missing, as in: $(EXAMPLE)))

# $(call install,OPTIONS) runs pip, and prints its output only if pip fails.
define install
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check $(1) >.venv/pip.log 2>&1 || { cat .venv/pip.log >&2; exit 1; }
endef

# With PYTHON=…, this target fails with the names of the packages that the interpreter lacks.
PACKAGES := torch triton numpy matplotlib pytest pytest_benchmark hypothesis tabulate tqdm
missing = $(shell $(PYTHON) -c 'import sys; from importlib.util import find_spec as f; print(*[p for p in sys.argv[1:] if not f(p)])' $(PACKAGES))
packages:
	@: $(if $(strip $(missing)),$(error $(PYTHON) lacks $(strip $(missing)); run $(PYTHON) -m pip install --requirement requirements.txt))

# Commands whose output may go to `head` end with this. Exit status 141 (SIGPIPE) is then no failure.
piped = ; status=$$?; [ $$status -eq 141 ] || exit $$status

# The last command creates the target's file, so a failed installation is tried again. All pinned packages have wheels for
# Python 3.11 to 3.14.
.venv/installed: requirements.txt
	@found=; for python in python3 python3.14 python3.13 python3.12 python3.11; do \
		if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then \
			found=$$python; break; fi; done; \
	if [ -z "$$found" ]; then \
		echo "Python 3.11 to 3.14 is needed, and python3 is $$(python3 --version 2>&1). Name an interpreter: make … PYTHON=…" >&2; \
		exit 1; fi; \
	echo "Installing the packages of requirements.txt into .venv. This happens once and takes 1 to 5 minutes." >&2; \
	$$found -m venv .venv
	$(call install,--requirement requirements.txt)
	@touch $@

# This target installs the additional packages of the examples.
.venv/example: examples/requirements.txt .venv/installed
	@echo "Installing the packages of examples/requirements.txt into .venv. This happens once and takes a minute." >&2
	$(call install,--constraint requirements.txt --requirement examples/requirements.txt)
	@touch $@

# $(call run_tests,MARKS) runs pytest, in parallel if pytest-xdist is installed. On a GPU, tests marked `alone` run last in one
# process, because they measure times or fill the memory. Exit status 5 (no tests) is a failure only if both runs return it.
define run_tests
	@spread=; if $(PYTHON) -c 'import xdist' 2>/dev/null; then spread="--numprocesses=auto --dist=worksteal"; fi; \
	if ! $(PYTHON) -c 'from triton.knobs import runtime; exit(runtime.interpret)'; then \
		exec $(PYTHON) -m pytest -m "$(1)" $$spread $(of_stage) $(ARGS); fi; \
	$(PYTHON) -m pytest -m "$(if $(1),$(1) and )not alone" $$spread $(of_stage) $(ARGS); others=$$?; \
	$(PYTHON) -m pytest -m "$(if $(1),$(1) and )alone" $(of_stage) $(ARGS); alone=$$?; \
	case $$others,$$alone in 0,0 | 0,5 | 5,0) ;; *) exit 1 ;; esac
endef

# The tests of STAGE=…: its name is in their ids. A version gets the underscore after it, so that v1 is not v10.
of_stage = $(if $(STAGE),tests/stages tests/interpreter/test_deletions.py -k $(STAGE)$(if $(findstring _,$(STAGE)),,_))
test test-long: export TESTED = $(STAGE)

test: $(SETUP)  ## run the tests, or those of a stage, STAGE=v3; ARGS="…" goes to pytest
	$(call run_tests,not long)

test-long: $(SETUP)  ## run all tests, including the slow tests; STAGE=v3: those of a stage
	$(call run_tests,)

sanitize: $(SETUP)  ## run the stages under compute-sanitizer, on a GPU; ARGS="…" goes to common.measure.sanitize (ARGS=--help)
	$(PYTHON) -m common.measure.sanitize $(addprefix --stage=,$(STAGE)) $(ARGS)

bench: $(SETUP)  ## measure all stages, or STAGE=v3 with its parent and v0, or random shapes, GRID=random SEED=1; ARGS="…" goes to bench.py (ARGS=--help)
	@$(PYTHON) bench.py $(addprefix --stage=,$(STAGE)) $(if $(GRID),$(if $(filter random,$(GRID)),--random$(addprefix =,$(SEED)),--reference=$(GRID))) $(ARGS)

bench-ring: $(SETUP)  ## measure a stage on GPUS=4 GPUs that share a sequence (default 2); ARGS="…" goes to common.measure.scaling
	$(PYTHON) -m common.measure.scaling $(addprefix --gpus=,$(GPUS)) $(addprefix --stage=,$(STAGE)) $(ARGS)

reference: EXAMPLE = make reference GRID=forward-d64 FILE=results/forward-d64-h200.json
reference: needs-GRID needs-FILE $(SETUP)  ## measure one part of results/ on a GPU, GRID=forward-d64, into FILE=…, unless all its rows are current
	$(PYTHON) bench.py --reference "$(GRID)" --json "$(FILE)"

stale: $(SETUP)  ## list the parts of results/ whose rows are missing or measured older code, as commands for a GPU
	@$(PYTHON) bench.py --stale

ceilings: EXAMPLE = make ceilings FILE=results/ceilings-h200.json
ceilings: needs-FILE $(SETUP)  ## measure the rates of a Hopper GPU that predictions use, into FILE=…
	$(PYTHON) -m common.measure.ceilings "$(FILE)"

energy: EXAMPLE = make energy FILE=results/energy-d128-h200.json ARGS="--head-dim 128"
energy: needs-FILE $(SETUP)  ## measure the joules of a call on an NVIDIA GPU, into FILE=…; ARGS="…" goes to common.measure.energy
	$(PYTHON) -m common.measure.energy "$(FILE)" $(ARGS)

traffic: $(SETUP)  ## count the bytes and FLOPs of each stage, without a GPU; ARGS="…" goes to common.show.counts (ARGS=--help)
	@$(PYTHON) -m common.show.counts $(addprefix --stage=,$(STAGE)) $(ARGS)$(piped)

compare: $(SETUP)  ## show the last two saved runs side by side, or A=… and B=…: ids or names of saved runs, or files; STAGE=v3 alone
	@$(PYTHON) -m common.show.compare $(addprefix --stage=,$(STAGE)) $(if $(A),"$(A)") $(if $(B),"$(B)")$(piped)

readme: $(SETUP)  ## rewrite the tables of the documents from results/
	$(PYTHON) -m common.show.documents

table: EXAMPLE = make table FILE=results/forward-d128-h200.json
table: needs-FILE $(SETUP)  ## print the tables of a saved run or a results file: make table FILE=results/forward-d128-h200.json
	@$(PYTHON) -m common.show.documents "$(FILE)"$(piped)

plots: $(SETUP)  ## draw plots/ from results/
	$(PYTHON) -m common.show.plots
	$(PYTHON) -m common.show.traces --stage v2,v3

trace: $(SETUP)  ## draw which tiles a stage reads and writes, STAGE=v2,v3; ARGS="…" goes to common.show.traces (ARGS=--help)
	$(PYTHON) -m common.show.traces $(addprefix --stage=,$(STAGE)) $(ARGS)

site: PACKAGES += jinja2 pygments markdown_it mdit_py_plugins latex2mathml vl_convert
site: $(SETUP)  ## build the site into site/, with a page for each step; open site/index.html
	@$(PYTHON) -m common.site.pages $(addprefix --stage=,$(STAGE)) $(ARGS)

story: $(SETUP)  ## show the trunk and the tracks on one screen; STAGE=v3: a step in full; TRACK=decode: the steps of a track
	@$(PYTHON) -m common.show.story $(addprefix --stage=,$(STAGE)) $(addprefix --track=,$(TRACK))$(piped)

diff: EXAMPLE = make diff A=v3 B=v4
diff: needs-A needs-B $(SETUP)  ## show the code that a stage changes: make diff A=v3 B=v4; GAIN=yes adds its gain, PROSE=yes READMEs, EXACT=yes NOTEs and white space
	@$(PYTHON) -m common.show.story diff "$(A)" "$(B)" $(addprefix --prose=,$(PROSE)) $(addprefix --exact=,$(EXACT)) $(addprefix --gain=,$(GAIN))$(piped)

stage: EXAMPLE = make stage FROM=v3 NAME=v3x_yours
stage: needs-FROM needs-NAME $(SETUP)  ## make an experiment with the kernels of a stage: make stage FROM=v3 NAME=v3x_yours
	$(PYTHON) -m common.show.new_stage -- "$(FROM)" "$(NAME)"

export: EXAMPLE = make export STAGE=newest TO=my_attention
export: needs-STAGE needs-TO $(SETUP)  ## write a stage as a package of its own: make export STAGE=newest TO=my_attention
	@$(PYTHON) -m common.show.export "$(STAGE)" "$(TO)"

carry: EXAMPLE = make carry FROM=v3
carry: $(if $(filter yes,$(CONTINUE) $(ABORT)),,needs-FROM) $(SETUP)  ## carry your edit of a stage to all that descend from it: make carry FROM=v3; SINCE=HEAD~1 if committed; CONTINUE=yes or ABORT=yes after a conflict
	@$(PYTHON) -m common.show.carry $(if $(FROM),"$(FROM)") $(addprefix --since=,$(SINCE)) $(if $(filter yes,$(CONTINUE)),--continue) $(if $(filter yes,$(ABORT)),--abort)

drift: $(SETUP)  ## find functions that differ from the parent's in comments alone
	@$(PYTHON) -m common.show.drift$(piped)

example: $(SETUP_EXAMPLE)  ## train a small Llama with a stage's attention, and one with SDPA: make example STAGE=v5 (ARGS=--help)
	$(PYTHON) -m examples.llama $(addprefix --stage=,$(STAGE)) $(ARGS)

example-ring: $(SETUP_EXAMPLE)  ## train a small Llama on GPUS=4 GPUs that share each sequence (default 2), and one on one GPU: make example-ring STAGE=v5
	$(PYTHON) -m examples.long_llama $(addprefix --gpus=,$(GPUS)) $(addprefix --stage=,$(STAGE)) $(ARGS)

example-generate: $(SETUP_EXAMPLE)  ## generate text in one batch with a K/V cache, and each sequence alone with SDPA
	$(PYTHON) -m examples.generate $(addprefix --stage=,$(STAGE)) $(ARGS)

example-packed: $(SETUP_EXAMPLE)  ## train a small Llama on packed sequences, and one on the padded batch with SDPA
	$(PYTHON) -m examples.packed $(addprefix --stage=,$(STAGE)) $(ARGS)

lint: $(SETUP)  ## check style and formatting
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: $(SETUP)  ## fix style and formatting where ruff can
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean:  ## delete .venv and the caches; saved runs stay in .benchmarks
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
