# `make sft` runs the main job, `make test` the tests; each installs what it needs into .venv first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
# Packs that a small model trains on a CPU in minutes.
PREPARE ?= data=pack_1k

# Where the environment forbids bytecode files, every process of a test would compile this project again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup setup-ray sft prepare test test-submission test-install test-versions test-integrations test-container test-slurm test-msc lint format bench scoreboard docs docs-serve release clean
.DEFAULT_GOAL := help

help:
	@echo "make sft     prepare a dataset from Python's own documentation and fine-tune a small GPT on it"
	@echo "make test    run the tests of every edit; make test-submission runs those that a change needs to land"
	@echo "make test-install, test-slurm, test-container   run the tests that need the package index, Slurm or podman"
	@echo "make test-msc    run the tests of msc://"
	@echo "make test-integrations   run other trainers, and their newest releases, in environments of their own"
	@echo "make test-versions   run tests with Python 3.12 and Megatron-Core 0.19"
	@echo "make setup   install into $(VENV) only"
	@echo "make lint    ruff, mypy, import-linter, shellcheck, hadolint"
	@echo "make scoreboard   run the conformance checks on released trainers, and write docs/scoreboard"
	@echo "make release   tag the version of CHANGELOG.md, and build and check its archives in dist/"
	@echo "make docs    build the documentation in build/site; make docs-serve serves it on this machine"
	@echo "make bench   run all benchmarks on this machine, and write BENCHMARKS.md"

setup: $(VENV)/installed

# Touched after everything is installed, so that an interrupted installation starts again.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another with make PYTHON=...") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,tokenize,dev]'
	@touch $@

# For engine=ray: its nightly tests, and the one of slurm/prepare.sbatch.
setup-ray: $(VENV)/installed-ray

# Once: to install the package again would take it from tests that run.
$(VENV)/installed-ray: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	@touch $@

prepare: setup
	$(BIN)/python -m harness.recipes.prepare $(PREPARE)

# OMP_NUM_THREADS: one thread a rank, because ranks share the cores of the machine.
sft: prepare
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m harness.recipes.sft $(SFT)

# worksteal: a worker without tests takes some of another's, so that none waits for the last long ones.
test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal $(TESTS)

# What a change that lands has to pass beside the default tests; some of these are nightly too. Modules without any are not
# imported.
test-submission: setup
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'submission and not install' \
	  $(or $(TESTS),$$(grep --recursive --files-with-matches --include='test_*.py' submission tests))

# Builds the wheel and runs the README's quickstart with it in fresh environments, outside this folder. Three minutes; the
# packages come from the index, as those of `make setup` do.
test-install: setup
	$(BIN)/python -m pytest -n 0 -m 'install and not nightly' tests/install

# With Python 3.12 and the Megatron-Core that it gets, in an environment outside this folder that is kept between runs
# (see .ci/versions; VERSIONS_DIR names another place for it). What every change has to pass; the nightly tests run more.
# Skipped by name on a machine that has no Python 3.12 and cannot get it.
VERSIONS ?= tests/distributed/test_checksums.py tests/distributed/test_experts.py tests/distributed/test_golden_losses.py \
	tests/distributed/test_layouts_agree.py::test_losses_by_conversation_and_of_sequences_are_those_of_one_rank_on_layouts_of_two \
	tests/distributed/test_media.py tests/distributed/test_megatron_lm.py tests/distributed/test_scan_calls.py tests/distributed/test_streams.py \
	tests/distributed/test_weights.py \
	tests/unit/bench/test_bench.py::test_a_microbatch_launches_what_the_golden_table_says
test-versions:
	code=0; python=$$(.ci/versions) || code=$$?; \
	if [[ $$code == 3 ]]; then echo "make test-versions: skipped, no Python 3.12 here"; else [[ $$code == 0 ]] && \
	PYTHONPATH=$(CURDIR) $$python -m pytest -n auto --dist worksteal -m 'not nightly' $(VERSIONS); fi

# Megatron-Bridge and torchtitan want other packages than this project: each has an environment outside this folder, which
# is kept between runs (VERSIONS_DIR names another place). The newest releases of others are installed, too. 10 GB and
# half an hour; the nightly tests run them too.
test-integrations: setup
	$(BIN)/python tests/integrations/environments.py
	$(BIN)/python -m pytest -n 0 -m nightly tests/integrations

# msc:// with its client, in an environment over that of `make setup`: Megatron reads every indexed dataset through the
# client once it is there. Without constraints: the client wants an older tzdata.
test-msc: setup
	$(BIN)/python -m venv build/msc
	realpath $(VENV)/lib/python3.*/site-packages > $$(echo build/msc/lib/python3.*/site-packages)/below.pth
	build/msc/bin/python -m pip install --quiet --editable '.[msc]'
	build/msc/bin/python -m pytest -n 0 tests/s3/test_msc.py

# Builds the image on a stand-in for NVIDIA's base image and runs the main job in it. Needs root and the Debian packages
# buildah podman runc mmdebstrap, which are installed, and the environment of `make test-versions`. Some minutes.
test-container: setup
	.ci/need buildah buildah podman runc mmdebstrap
	$(BIN)/python -m pytest -n 0 -m container tests/container

# Starts a Slurm cluster of two nodes on this machine and runs jobs on it. Needs root and the Debian packages slurm-wlm
# munge iproute2, which are installed; twelve minutes or less.
test-slurm: setup-ray
	.ci/need slurmctld slurm-wlm munge iproute2
	$(BIN)/python -m pytest -n 0 -m 'slurm and not nightly' tests/slurm

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck --external-sources $(shell git ls-files "*.sh" "*.sbatch" .ci)
	$(BIN)/hadolint docker/Dockerfile

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m tests.benchmarks all

# Fails on a broken link, anchor or page that the navigation lacks.
# Released trainers in environments of their own answer `harness conformance`: an hour at first, then minutes.
scoreboard: setup
	$(BIN)/python -m tests.scoreboard $(TRAINERS)

docs: setup
	$(BIN)/python -m mkdocs build --strict

docs-serve: setup
	$(BIN)/python -m mkdocs serve

release:
	PYTHON="$(PYTHON)" .ci/release

clean:
	rm -rf $(VENV) build *.egg-info
