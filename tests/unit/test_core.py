"""Modules that other programs depend on: pure, imported in milliseconds, with numpy and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .test_house import ROOT

CORE = ("errors", "records", "thd", "prep.packing", "schedule", "loader.order", "loader.state")
ALONE = """
import sys
from importlib.abc import MetaPathFinder

class OnlyNumpy(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "numpy", "harness"}:
            raise ImportError(f"{name} is not part of the core")

sys.meta_path.insert(0, OnlyNumpy())
"""
USE = """
import numpy as np
from harness.loader.config import LoaderConfig
from harness.loader.order import EpochOrder
from harness.loader.state import LoaderState
from harness.prep.packing import plan_packs
from harness.records import SequenceView
from harness.schedule import schedule
from harness.thd import build_thd_batch

lengths = np.array([9, 5, 7, 3])
print(plan_packs(lengths, pack_size=12).pack_offsets.tolist())
print(schedule("cost_balanced", lengths, dp_size=2, cp_size=1, max_tokens_per_rank=12).num_microbatches)
print(build_thd_batch([SequenceView(np.arange(4, dtype="i4"), np.ones(4, dtype="u1"))]).cu_seqlens.tolist())
print(EpochOrder.__name__, LoaderState(0).packs_consumed, LoaderConfig().seed)
"""


@pytest.mark.parametrize("module", CORE)
def test_a_core_module_imports_numpy_and_no_other_package(module) -> None:
    program = (
        f"{ALONE}\nimport harness.{module}\nprint(len([name for name in sys.modules if name.startswith('harness')]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Time as modules: each takes about two milliseconds.
    assert int(done.stdout) <= 14


def test_the_core_packs_orders_schedules_and_builds_rows_with_numpy_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE + USE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[0, 2, 4]", "1", "[0, 3]", "EpochOrder 0 0"], done.stderr
