"""On every layout a document sees itself alone, and the check that says so catches the field's real bugs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness.config import CONFIGS, compose_config
from harness.parity.processes import free_ports
from harness.plan.settings import SftConfig

from .conftest import launcher, run_command

# What each planted defect has to be told by.
TELLS = {
    "cu_seqlens dropped": r"layers\.\d, forward: changing document 0 changed document\(s\) 1",
    "positions not restarted": r"field position_ids: .* differ",
    "padding attended": r"layers\.\d, forward: changing padding changed document",
    "label crosses a boundary": r"losses: changing document 1 changed document\(s\) 0",
    "mask shifted by one": r"field loss_mask: .* differ",
    "slice off by one chunk": r"field tokens: .* differ",
}


def found_on(ranks: int, layouts: list[str], folder: Path) -> dict[str, dict[str, list[str]]]:
    jobs, out = folder / "jobs.json", folder / "found.jsonl"
    jobs.write_text(json.dumps(list(zip(free_ports(len(layouts)), layouts, strict=True))))
    code, output = run_command([*launcher(ranks), "tests.distributed.isolation_ranks", str(jobs), str(out)])
    assert code == 0, output
    return {line["layout"]: line["found"] for line in map(json.loads, out.read_text().splitlines())}


def check(found: dict[str, dict[str, list[str]]]) -> None:
    for layout, by_defect in found.items():
        assert by_defect.pop("") == [], layout
        assert set(by_defect) == set(TELLS) - (set() if "cp" in layout else {"slice off by one chunk"}), layout
        for defect, findings in by_defect.items():
            assert any(re.search(TELLS[defect], finding) for finding in findings), (layout, defect, findings)


def test_documents_are_isolated_on_two_ranks_and_every_planted_defect_is_caught(tmp_path) -> None:
    layouts = ["tp2_sp", "pp2_vpp2", "cp2"]
    found = found_on(2, layouts, tmp_path)
    assert list(found) == layouts
    check(found)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_documents_are_isolated_on_every_layout_and_every_planted_defect_is_caught(tmp_path) -> None:
    by_ranks: dict[int, list[str]] = {}
    for path in sorted((CONFIGS / "parallel").glob("*.yaml")):
        parallel = compose_config("sft", SftConfig, [f"parallel={path.stem}"]).parallel
        by_ranks.setdefault(parallel.model_ranks, []).append(path.stem)
    assert set(by_ranks) == {1, 2, 4, 8}
    for ranks, layouts in by_ranks.items():
        folder = tmp_path / str(ranks)
        folder.mkdir()
        found = found_on(ranks, layouts, folder)
        assert list(found) == layouts
        check(found)
