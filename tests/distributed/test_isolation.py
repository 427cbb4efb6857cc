"""On every layout a document sees only itself, and the isolation check catches bugs that other trainers had."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from parity_reports import read_report

from harness.config import CONFIGS, compose_config
from harness.parity.result import REPORT_FILE
from harness.plan.settings import SftConfig
from tests.samples.warm_python import warm_python

from .conftest import run_command, run_jobs
from .test_layouts_agree import plant_fault

# Findings that each planted defect must cause.
FINDINGS = {
    "cu_seqlens dropped": r"layers\.\d, forward: changing document 0 changed document\(s\) 1",
    "positions not restarted": r"field position_ids: .* differ",
    "padding attended": r"layers\.\d, forward: changing padding changed document",
    "label crosses a boundary": r"losses: changing document 1 changed document\(s\) 0",
    "mask shifted by one": r"field loss_mask: .* differ",
    "slice off by one chunk": r"field tokens: .* differ",
}


def findings_on(ranks: int, layouts: list[str], folder: Path) -> dict[str, dict[str, list[str]]]:
    out = folder / "found.jsonl"
    run_jobs(ranks, "isolation_ranks", folder, [[layout] for layout in layouts], out)
    return {line["layout"]: line["found"] for line in map(json.loads, out.read_text().splitlines())}


def check(found: dict[str, dict[str, list[str]]]) -> None:
    for layout, by_defect in found.items():
        assert by_defect.pop("") == [], layout
        assert set(by_defect) == set(FINDINGS) - (set() if "cp" in layout else {"slice off by one chunk"}), layout
        for defect, findings in by_defect.items():
            assert any(re.search(FINDINGS[defect], finding) for finding in findings), (layout, defect, findings)


@pytest.mark.submission
def test_documents_are_isolated_on_two_ranks_and_every_planted_defect_is_caught(tmp_path) -> None:
    layouts = ["tp2_sp", "pp2_vpp2 parallel.pipeline_layout=E|t*2|t|tL", "cp2"]
    found = findings_on(2, layouts, tmp_path)
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
        found = findings_on(ranks, layouts, folder)
        assert list(found) == layouts
        check(found)


# The last token of each row's first document gets a label of the second one.
LEAK = """
def plant(module):
    build = module.build_thd_batch

    def leaky(*arguments, **options):
        row = build(*arguments, **options)
        labels, mask = row.labels.copy(), row.loss_mask.copy()
        last = int(row.cu_seqlens[1]) - 1
        labels[last], mask[last] = row.tokens[int(row.cu_seqlens_padded[1])], 1.0
        return module.replace(row, labels=labels, loss_mask=mask)

    module.build_thd_batch = leaky
"""


@pytest.mark.nightly
def test_the_matrix_reports_isolation_on_one_rank_and_two(tmp_path) -> None:
    code, output = run_command(
        [sys.executable, "-m", "harness.recipes.parity", "check=isolation", f"folder={tmp_path}"]
    )
    assert code == 0, output
    report = read_report(tmp_path / REPORT_FILE)
    assert report.verdict == "same"
    assert {cell.axes["ranks"] for cell in report.cells} == {"1", "2"}
    assert all([check.name for check in cell.checks] == ["isolation"] for cell in report.cells)


@pytest.mark.submission
def test_a_planted_leak_is_a_difference_in_the_report_and_exit_code_1(tmp_path) -> None:
    settings = ["check=isolation", f"folder={tmp_path / 'parity'}", 'isolation=["1 parallel=data"]']
    plant = plant_fault(tmp_path / "plant", "harness.thd", LEAK)
    code, output = run_command(["env", plant, warm_python(), "-m", "harness.recipes.parity", *settings])
    assert code == 1, output
    (cell,) = read_report(tmp_path / "parity" / REPORT_FILE).cells
    assert cell.status == "different"
    assert "field labels" in cell.first_difference.message
    assert (
        "losses: changing document 1 changed document(s) 0"
        in (tmp_path / "parity" / "cells" / "isolation__data" / "run" / "isolation.jsonl").read_text()
    )


@pytest.mark.submission
def test_a_model_with_biases_of_experts_is_shown_isolated(tmp_path) -> None:
    cell = "1 parallel=data model.num_experts=4 model.expert_ffn_hidden_size=48 model.router_score=sigmoid"
    settings = ["check=isolation", f"folder={tmp_path}", f'isolation=["{cell} model.expert_bias=true"]']
    code, output = run_command([warm_python(), "-m", "harness.recipes.parity", *settings])
    assert code == 0, output


def test_a_folder_that_cannot_be_made_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    code, output = run_command([warm_python(), "-m", "harness.recipes.isolation", f"run_dir={tmp_path / 'file'}"])
    assert code == 2, output
    assert "the folder cannot be used: File exists" in output
