"""Runs are the same only if every step is, and the first difference is named with its numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from step_metrics import metrics

from harness.errors import ConfigError
from harness.parity.cells import CheckPlan, RunCase, parse_case, plan_check
from harness.parity.compare import IDENTICAL, Tolerances, compare_runs, on_device
from harness.parity.locate import Recorded
from harness.parity.result import Check
from harness.train.metrics import StepMetrics


def step(number: int, **changed: object) -> StepMetrics:
    plain = {"loss": 4.0, "validation_loss": 5.0 if number == 2 else None, "grad_norm": 2.0, "tokens": 100}
    return metrics(number, **{**plain, "trained_tokens": 80, "packs_consumed": 4 * number, **changed})


EXPECTED = [step(1), step(2), step(3)]


def run(steps: list[StepMetrics]) -> Recorded:
    return Recorded(steps, list, lambda step, row, index: {})


def checks(found: list[StepMetrics], tolerances: Tolerances | None = None) -> dict[str, Check]:
    """Of the metrics alone; those of the data have tests of their own."""
    made = compare_runs(run(EXPECTED), run(found), tolerances or Tolerances())
    return {check.name: check for check in made}


def messages_of(found: list[StepMetrics], tolerances: Tolerances | None = None) -> list[str]:
    made = checks(found, tolerances)
    assert not made.pop("data").passed  # nothing was recorded, which is never agreement
    return [check.difference.message for check in made.values() if check.difference is not None]


def test_routers_that_counted_other_tokens_or_gave_other_losses_are_named() -> None:
    experts = {"routed_tokens": 100, "shared_tokens": 0, "bias_tokens": 100, "load": 1.5, "aux_loss": 1.1}

    def named(**changed: float) -> str | None:
        found = run([step(1, experts=experts), step(2, experts=experts | changed)])
        made = compare_runs(run([step(1, experts=experts), step(2, experts=experts)]), found, Tolerances(0.05))
        difference = next(check for check in made if check.name == "experts").difference
        return None if difference is None else difference.message

    assert named() is None
    assert named(aux_loss=1.1 * 1.04) is None
    assert named(routed_tokens=101) == "step 2: routed_tokens of the experts is 101, not 100"
    assert named(bias_tokens=99, load=9.0) == "step 2: bias_tokens of the experts is 99, not 100"
    assert named(load=1.6) == (
        "step 2: load of the experts is 1.6, not 1.5 (relative difference 6.7e-02, at most 0.05)"
    )
    dense = compare_runs(run(EXPECTED), run(EXPECTED), Tolerances())
    assert "experts" not in [check.name for check in dense]


def test_differences_within_tolerance_are_no_difference() -> None:
    found = [step(1), step(2, num_microbatches=1, fill=0.1, step_s=9.0), step(3, loss=4.0 * (1 + 4e-7))]
    assert messages_of(found) == []
    assert checks(found)["loss"].largest == pytest.approx(4e-7)
    assert checks(found)["grad_norm"].largest == 0


def test_the_same_layout_has_no_tolerance_on_a_cpu_and_a_default_one_on_a_gpu() -> None:
    found = [step(1), step(2), step(3, loss=math.nextafter(4.0, 5))]
    (message,) = messages_of(found, IDENTICAL)
    assert "step 3: loss is 4.000000000000001, not 4.0 (relative difference 2.2e-16, expected bit-identical)" in message
    assert messages_of(found, on_device(IDENTICAL, "cuda")) == []
    assert on_device(IDENTICAL, "cpu") == IDENTICAL
    assert "atomically" in on_device(IDENTICAL, "cuda").reason
    assert on_device(Tolerances(), "cuda") == on_device(IDENTICAL, "cuda")
    assert on_device(Tolerances(1e-9), "cuda") == Tolerances(1e-9)
    found = [step(1), step(2), step(3, loss=4.0 * (1 + 3.5e-8))]
    across = on_device(IDENTICAL, "cpu", num_ranks=2)
    assert messages_of(found, across) == []
    assert (across.loss, across.grad_norm) == (5e-7, 2e-6)
    assert "order in which their parts arrive" in across.reason
    assert on_device(Tolerances(0.0, 0.0), "cpu", num_ranks=2) == Tolerances(0.0, 0.0)  # of settings


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": 4.00005}, "step 2: loss is 4.00005, not 4.0 (relative difference 1.2e-05, at most 5e-07)"),
        ({"loss": math.nan}, "step 2: loss is nan, not 4.0 (relative difference inf, at most 5e-07)"),
        ({"validation_loss": None}, "step 2: validation_loss is missing, not 5.0"),
        ({"grad_norm": 2.001}, "step 2: grad_norm is 2.001, not 2.0 (relative difference 5.0e-04, at most 2e-06)"),
        ({"trained_tokens": 79}, "step 2: trained_tokens is 79, not 80"),
        ({"packs_consumed": 9}, "step 2: packs_consumed is 9, not 8"),
    ],
)
def test_a_step_that_differs_is_named_with_its_numbers(changed, message) -> None:
    (first,) = messages_of([step(1), step(2, **changed), step(3)])
    assert first.startswith(message)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "0 of 3 steps were completed, step 1 is missing"),
        (EXPECTED[:2], "2 of 3 steps were completed, step 3 is missing"),
        ([EXPECTED[0], EXPECTED[2]], "2 of 3 steps were completed, step 2 is missing"),
        ([*EXPECTED, step(4)], "4 of 3 steps were completed, step 4 is extra"),
    ],
)
def test_a_run_that_did_not_make_every_step_does_not_agree(found, message) -> None:
    assert messages_of(found)[0] == message


def test_a_case_is_ranks_and_settings() -> None:
    case = parse_case("4 parallel=tp2_pp2 loader.num_workers=2")
    assert case == RunCase(4, ("parallel=tp2_pp2", "loader.num_workers=2"))
    assert case.name == "4x tp2_pp2 num_workers=2"
    assert case.axes == {"ranks": "4", "layout": "tp2_pp2", "num_workers": "2"}
    case = parse_case("1 format=parquet loader.num_workers=2")
    assert (case.name, case.value_of("format")) == ("parquet num_workers=2", "parquet")
    assert case.settings == ("loader.num_workers=2",)
    for text in ("", "tp2", "0 parallel=tp2", "4 tp2", "\u00b2 parallel=tp2"):
        with pytest.raises(ConfigError, match="is not a valid case"):
            parse_case(text)


def cells(cases: list[str], *, max_ranks: int = 8, from_checkpoint: bool = False):
    return plan_check(
        "layouts",
        cases,
        CheckPlan(Tolerances(), from_checkpoint=from_checkpoint),
        settings=["trainer.device=cpu"],
        datasets={"": "made", "npy": "old"},
        pythons={"": "python"},
        steps=5,
        steps_before=2,
        max_ranks=max_ranks,
    )


def test_the_first_case_is_the_reference_and_a_check_from_a_checkpoint_has_a_run_that_makes_it() -> None:
    one, two = cells(["1 format=npy", "2 parallel=data"])
    assert (one.name, one.reference, one.dataset) == ("layouts: npy", None, "old")
    assert (two.name, two.reference, two.dataset) == ("layouts: 2x data", "layouts: npy", "made")
    assert two.settings == ("data.path=made", "trainer.device=cpu", "optimizer.decay_steps=5", "parallel=data")
    start, one, two = cells(["1 format=npy", "2 parallel=data"], from_checkpoint=True)
    assert (start.steps, one.steps, start.is_reported, one.is_reported) == (2, 7, False, True)
    assert (start.start, one.start, two.start) == (None, start.name, start.name)


@pytest.mark.parametrize(
    ("cases", "what"),
    [
        (["1 parallel=data"], "1 cases to run"),
        (["1 parallel=data", "4 parallel=tp2"], "1 cases to run"),
        (["1 parallel=data", "1 parallel=data"], "two cases are named"),
        (["1 parallel=data", "1 model.x=[1,2]", "1 model.x=[1;2]"], "two cases are named"),
        (["1 parallel=data", "1 " + " ".join(f"model.x{number}=1" for number in range(60))], "has at most 255"),
        (["1 parallel=data", "1 format=parquet"], "refers to 'parquet', which is not among npy"),
        (["1 parallel=data", "1 version=new"], "refers to 'new', which is not among none"),
    ],
)
def test_a_matrix_that_cannot_be_compared_is_refused(cases, what) -> None:
    with pytest.raises(ConfigError, match=what):
        cells(cases, max_ranks=2)


class Counted(int):
    """A number that counts how often it is compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other


def test_missing_steps_of_a_long_run_are_found_without_comparing_all_with_all() -> None:
    steps = [replace(step(1), step=Counted(number)) for number in range(1, 2001)]
    made = compare_runs(run(steps), run(steps[:1000]), Tolerances())

    (difference,) = [check.difference for check in made if check.name == "steps"]
    assert difference is not None
    assert difference.message == "1000 of 2000 steps were completed, step 1001 is missing"
    assert Counted.compared < 20 * len(steps)


def test_every_validation_set_is_compared() -> None:
    found = [step(1), step(2, evaluation_losses={"math": 3.0, "code": 2.0}), step(3)]
    other = [step(1), step(2, evaluation_losses={"math": 3.1, "code": 2.0}), step(3)]

    def named(expected: list[StepMetrics], found: list[StepMetrics]) -> str | None:
        made = compare_runs(run(expected), run(found), Tolerances())
        difference = next(check for check in made if check.name == "validation_loss").difference
        return None if difference is None else difference.message

    assert named(found, found) is None
    assert str(named(found, other)).startswith("step 2: math is 3.1, not 3.0 (relative difference 3.3e-02")
    assert named(EXPECTED, found) == "step 2: math is 3.0, not missing (relative difference inf, at most 5e-07)"
