"""Tests notice nearly every small change of the modules that decide what is trained."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mutants.__main__ import MODULES, ROOT, listed, try_in_a_copy, write_mutants

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]
# Of each module; another sample for every commit.
COUNT = 20


def test_19_of_20_mutants_fail_a_test(report_points: Callable[..., None]) -> None:
    pytest.importorskip("mutmut")
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    total: Counter[str] = Counter()
    for module in MODULES:
        counts = try_in_a_copy(module, COUNT, head.stdout.strip())
        print(module, counts)
        report_points("mutants", module, COUNT, of="mutants", outcome=str(counts))
        total.update(counts)
    assert total["survived"] <= 0.05 * (total.total() - total["equal"]), total


@pytest.mark.parametrize("module", sorted({entry["module"] for entry in listed()}))
def test_every_mutant_listed_as_equal_is_one(tmp_path: Path, module: str) -> None:
    """Code that has changed since may have made it another."""
    pytest.importorskip("mutmut")
    (tmp_path / module).parent.mkdir(parents=True)
    shutil.copy(ROOT / module, tmp_path / module)
    mutants = [mutant.as_entry(module) for mutant in write_mutants(tmp_path, module)]
    for entry in listed():
        reason = entry.pop("reason")
        assert entry["module"] != module or entry in mutants, reason
