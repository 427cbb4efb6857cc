"""Runs are the same only where every step is, and what differs is named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.errors import ConfigError
from harness.report.metrics import StepMetrics
from harness.report.parity.compare import Case, Tolerances, compare, parse_case, render


def step(number: int, **changed: object) -> StepMetrics:
    plain = StepMetrics(
        step=number,
        epoch=0,
        loss=4.0,
        validation_loss=5.0 if number == 2 else None,
        learning_rate=1e-3,
        grad_norm=2.0,
        tokens=100,
        trained_tokens=80,
        tokens_per_s=1.0,
        fill=0.9,
        num_microbatches=2,
        step_s=1.0,
        data_wait_s=0.0,
        imbalance_tokens=1.0,
        imbalance_cost=1.0,
        packs_consumed=4 * number,
    )
    return replace(plain, **changed)


EXPECTED = [step(1), step(2), step(3)]


def test_what_may_differ_between_layouts_is_no_difference() -> None:
    found = [step(1), step(2, num_microbatches=1, fill=0.1, step_s=9.0), step(3, loss=4.0 * (1 + 9e-6))]
    agreement = compare(EXPECTED, found, Tolerances())
    assert agreement.agrees
    assert agreement.steps == 3
    assert agreement.largest["loss"] == pytest.approx(9e-6)
    assert agreement.largest["grad_norm"] == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loss": 4.00005}, r"loss differs by 1\.2e-05 at step 2 \(at most 1e-05\)"),
        ({"loss": math.nan}, "loss differs by inf at step 2"),
        ({"validation_loss": None}, "validation_loss differs by inf at step 2"),
        ({"grad_norm": 2.001}, r"grad_norm differs by 5\.0e-04 at step 2 \(at most 0\.0001\)"),
        ({"trained_tokens": 79}, "step 2: trained_tokens is 79, not 80"),
        ({"packs_consumed": 9}, "step 2: packs_consumed is 9, not 8"),
    ],
)
def test_a_step_that_differs_is_named_with_its_numbers(changed, said) -> None:
    agreement = compare(EXPECTED, [step(1), step(2, **changed), step(3)], Tolerances())
    assert not agreement.agrees
    with pytest.raises(AssertionError, match=said):
        raise AssertionError("; ".join(agreement.problems))


@pytest.mark.parametrize("found", [[], EXPECTED[:2], EXPECTED[1:]])
def test_a_run_that_did_not_make_every_step_does_not_agree(found) -> None:
    assert not compare(EXPECTED, found, Tolerances()).agrees


def test_the_table_says_which_case_differs_and_counts_the_rest() -> None:
    good, bad = compare(EXPECTED, EXPECTED, Tolerances()), compare(EXPECTED, EXPECTED[:1], Tolerances())
    table = render({"2x tp2": good, "4x pp4": bad})
    assert table.splitlines()[1].split() == ["2x", "tp2", "3", "0.0e+00", "0.0e+00", "0.0e+00", "same"]
    assert table.splitlines()[2].endswith("DIFFERENT")
    assert "4x pp4: 1 of 3 steps were made" in table
    assert table.splitlines()[-1].startswith("1 of 2 cases")


def test_a_case_is_ranks_and_settings() -> None:
    case = parse_case("4 parallel=tp2_pp2 loader.num_workers=2")
    assert case == Case(4, ("parallel=tp2_pp2", "loader.num_workers=2"))
    assert case.name == "4x tp2_pp2 loader.num_workers=2"
    for text in ("", "tp2", "0 parallel=tp2", "4 tp2"):
        with pytest.raises(ConfigError, match="is not a case"):
            parse_case(text)
