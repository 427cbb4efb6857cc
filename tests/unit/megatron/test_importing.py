"""Importing the package changes nothing in the process; one explicit call does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.samples.warm_python import warm_python

IMPORT_ALL = """
import gc, importlib, pkgutil, sys, warnings
warnings.resetwarnings()
gc.unfreeze()
import torch, torch.utils.tensorboard, megatron.core  # what these change themselves is not ours
import megatron.core.models.gpt, megatron.core.datasets.gpt_dataset, megatron.core.dist_checkpointing

def state():
    return list(warnings.filters), gc.isenabled(), gc.get_freeze_count(), torch.compile

before = state()
import harness.megatron
names = [module.name for module in pkgutil.walk_packages(harness.megatron.__path__, "harness.megatron.")]
for name in names:
    importlib.import_module(name)
assert len(names) > 25, names
assert state() == before, (before, state())
"""

PREPARE = """
import gc, sys, warnings
from harness.megatron import prepare_process
import harness.recipes.sft, harness.recipes.pretrain

assert not {"torch", "megatron.core"} & set(sys.modules)
assert gc.get_freeze_count() == 0
prepare_process()
import torch

compile = torch.compile
assert gc.isenabled()
assert gc.get_freeze_count() > 0
assert compile.__module__ == "torch", compile
if torch.version.cuda is None:
    assert "torch._dynamo" not in sys.modules  # the compiler
filters = len(warnings.filters)
prepare_process()
assert len(warnings.filters) == filters
assert torch.compile is compile
"""


RECIPES = """
import os, sys
from harness.errors import ConfigError
from harness.plan import ParallelConfig, PretrainConfig, SftConfig
import harness.recipes.sft, harness.recipes.pretrain

name = "CUDA_DEVICE_MAX_CONNECTIONS"
assert "torch" not in sys.modules
for recipe, config in ((harness.recipes.sft, SftConfig), (harness.recipes.pretrain, PretrainConfig)):
    for parallel, given, value in (({}, None, "32"), ({"tensor_parallel_size": 2}, None, "1"), ({}, "8", "8")):
        os.environ.pop(name, None) if given is None else os.environ.update({name: given})
        try:
            recipe.main(config(parallel=ParallelConfig(**parallel, ranks=2)))
        except ConfigError as error:  # there is one rank
            assert "planned for 2 ranks" in str(error), error
        assert os.environ[name] == value, (parallel, os.environ[name])
"""


def run(program: str, python: str = sys.executable) -> None:
    done = subprocess.run([python, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.submission
def test_importing_every_module_leaves_filters_garbage_collection_and_the_compiler_alone() -> None:
    run(IMPORT_ALL, warm_python())


@pytest.mark.skipif(torch.version.cuda is not None, reason="a PyTorch for GPUs keeps its compiler")
def test_a_prepared_process_starts_without_the_compiler_and_is_as_before_a_second_time() -> None:
    run(PREPARE)


def test_a_recipe_sets_the_connections_to_the_gpu_for_its_layout_unless_they_are_set(tmp_path) -> None:
    run(f"import os; os.chdir({str(tmp_path)!r})\n{RECIPES}")
