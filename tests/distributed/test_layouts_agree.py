"""Every layout that the settings accept trains as one rank does, or it is refused with the arithmetic."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layout_space import KINDS, LATER, NUM_PACKS, RANKS, Layout, accepted, an_eighth, layouts_of
from small_packs import write_small_packs

from harness.parity.result import REPORT_FILE, read_report

from .conftest import ROOT, forked, run_command

# Largest differences from one rank, relative to what is compared; a gradient also to the norm of the whole gradient.
# Sums in another order give up to 4e-7 of that, and more of a small norm of numbers that cancel.
TOLERANCES = {"step": 1e-6, "gradient": 1e-6, "own": 1e-5}


# Put where Python looks for it: a rank divides its gradients by its own trained tokens, and ranks are averaged.
OWN_TOKENS = """
import importlib.util
import sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "harness.megatron.model.gpt":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), plant(module))
        return spec

def plant(module):
    finalize = module.finalize_model_grads

    def divide_by_own(chunks, tokens, **options):
        for chunk in chunks:
            chunk.scale_gradients(1.0 / int(tokens))
        finalize(chunks, tokens * 0 + 1, **options)

    module.finalize_model_grads = divide_by_own

sys.meta_path.insert(0, Finder())
"""


def train_all(layouts: list[Layout], place: Path) -> list[dict[str, Any]]:
    """Train layouts one after another, each in a new process for every rank; return the results."""
    write_small_packs(place / "data", num_packs=NUM_PACKS)
    results = []
    # One rank first, of every kind, as the reference of the others.
    first = [next(layouts_of(kind)) for kind in dict.fromkeys(layout.kind for layout in layouts)]
    for ranks in RANKS:
        wanted = [*first * (ranks == 1), *(one for one in layouts if one.ranks == ranks and one not in first)]
        if not wanted:
            continue
        file = place / f"{ranks}.pkl"
        file.write_bytes(pickle.dumps([(str(layout), layout.kind, layout.config) for layout in wanted]))
        code, output = run_command([*forked(ranks), "tests.distributed.layout_ranks", str(file)], timeout_s=7000)
        lines = file.with_suffix(".jsonl").read_text().splitlines()
        assert (code, len(lines)) == (0, len(wanted)), output
        results += map(json.loads, lines)
    return results


def differing(results: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong, by layout: an error, or where it differs from one rank."""
    wrong = [f"{one['layout']}: {one['error']}" for one in results if "error" in one]
    for one in results:
        for kind, tolerance in TOLERANCES.items():
            if "error" not in one and one[kind][0] > tolerance:
                wrong.append(f"{one['layout']}: {kind} differs by {one[kind][0]:.2g} in {one[kind][1]}")
    return wrong


def test_an_eighth_of_the_accepted_layouts_trains_as_one_rank_does(tmp_path) -> None:
    assert differing(train_all(an_eighth(accepted(KINDS)), tmp_path)) == []


def test_the_documented_four_steps_show_a_rank_that_divides_by_its_own_tokens(tmp_path) -> None:
    """A loss moves by 1.0e-3 and a gradient norm by 9.1e-3."""
    plant = tmp_path / "plant"
    plant.mkdir()
    (plant / "sitecustomize.py").write_text(OWN_TOKENS)
    cases = json.dumps(["1 parallel=data", "2 parallel=data"])
    settings = [f"folder={tmp_path / 'parity'}", "steps=4", f"layouts={cases}"]
    command = [sys.executable, "-m", "recipes.parity", "check=layouts", *settings]
    code, output = run_command(["env", f"PYTHONPATH={ROOT}:{plant}", *command], timeout_s=3000)
    assert code == 1, output
    cells = {cell.name: cell for cell in read_report(tmp_path / "parity" / REPORT_FILE).cells}
    assert cells["layouts: 2x data"].status == "different"
    failed = [check.name for check in cells["layouts: 2x data"].checks if not check.passed]
    assert failed == ["loss", "validation_loss", "grad_norm"]


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", [*KINDS, *LATER])
def test_every_accepted_layout_trains_as_one_rank_does(kind, tmp_path, report_points: Callable[..., None]) -> None:
    results = train_all(accepted([kind]), tmp_path)
    wrong = differing(results)
    worst = {name: max(one[name][0] for one in results if name in one) for name in TOLERANCES}
    of = f"layouts; differences up to {worst['step']:.1e} of a step's figures, {worst['gradient']:.1e} of gradients"
    report_points("accepted layouts", kind, len(results), of=of, outcome="as on one rank")
    assert wrong == []


@pytest.mark.parametrize("kind", [*KINDS, *LATER])
def test_a_layout_that_is_not_accepted_is_refused_by_name_with_its_numbers(kind) -> None:
    refused = [layout for layout in layouts_of(kind) if layout.refused is not None]
    assert refused
    for layout in refused:
        error = layout.refused
        assert re.search(r"\d|one rank|no experts", error.what), (layout, error)
        assert re.search(r"parallel\b|model\.|loader\.|schedule\.", error.where), (layout, error)
        assert error.fix, layout


def test_parity_names_a_setting_that_differs(tmp_path) -> None:
    smaller = ["trainer.eval_interval=2", "trainer.eval_batches=1", "model.num_layers=4", "model.hidden_size=32"]
    cases = ["1 parallel=data", "2 parallel=tp2_sp", "1 optimizer.weight_decay=0.5"]
    settings = [f"folder={tmp_path}", "steps=3", f"sft_more={json.dumps(smaller)}", f"layouts={json.dumps(cases)}"]
    code, output = run_command([sys.executable, "-m", "recipes.parity", "check=layouts", *settings])
    assert code == 1, output
    assert "layouts: weight_decay=0.5: step 4: loss is" in output
    assert "1 of 2 compared cells are the same: DIFFERENT" in output
    cells = {cell.name: cell for cell in read_report(tmp_path / REPORT_FILE).cells}
    same = cells["layouts: 2x tp2_sp"]
    assert (same.status, same.reference, same.series.step) == ("same", "layouts: data", [1, 2, 3, 4, 5])
    assert {check.name for check in same.checks} >= {"data", "steps", "trained_tokens", "validation_loss"}
    assert cells["layouts: weight_decay=0.5"].first_difference.field == "loss"
