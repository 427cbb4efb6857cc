"""`harness compare`: the curves of two runs, what differs between them, and the verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from step_metrics import metrics

from harness.plan import OptimizerConfig, SftConfig
from harness.settings import to_yaml
from harness.train import StepMetrics

LOSSES = [6.0, 5.0, 4.0, 3.0]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """make(name, steps, settings) writes the folder of a run and returns its path."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, steps: list[StepMetrics], settings: SftConfig | None = None, *, end: str = "") -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(to_yaml(settings or SftConfig(run_dir=name)))
        lines = [json.dumps(asdict(step)).replace("NaN", "null") + "\n" for step in steps]
        (folder / "metrics.jsonl").write_text("".join(lines) + end)
        return name

    return write


def run_of(losses: list[float], **values: object) -> list[StepMetrics]:
    return [metrics(number, loss, **values) for number, loss in enumerate(losses, start=1)]


def test_runs_with_equal_losses_are_the_same_and_are_plotted(harness, make, tmp_path):
    code, printed, _ = harness("compare", make("a", run_of(LOSSES)), make("b", run_of(LOSSES)), "out=both.png")
    assert code == 0
    assert "b compared with a over 4 steps, 1 to 4" in printed
    assert "same: no loss has a relative difference above 5e-07" in printed
    assert "different setting" not in printed
    assert printed.endswith("curves: both.png\n")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_step_beyond_the_tolerance_is_named(harness, make):
    runs = make("a", run_of(LOSSES)), make("b", run_of([6.0, 5.0, 4.04, 3.3]))
    code, printed, _ = harness("compare", *runs)
    assert code == 1
    assert "different: loss first differs at step 3: 4.0 and 4.04, a relative difference of 1.0e-02 with" in printed
    assert harness("compare", *runs, "tolerance.loss=0.05")[0] == 1
    assert harness("compare", *runs, "tolerance.loss=0.11")[0] == 0


def test_a_validation_that_both_made_is_judged_and_the_gradient_norm_is_not(harness, make):
    a = [*run_of([6.0, 5.0]), metrics(3, 4.0, validation_loss=4.5, evaluation_losses={"math": 2.0})]
    b = [*run_of([6.0, 5.0], grad_norm=2.0), metrics(3, 4.0, validation_loss=4.5, evaluation_losses={"math": 2.5})]
    code, printed, _ = harness("compare", make("a", a), make("b", b))
    assert (code, "different: math first differs at step 3: 2.0 and 2.5" in printed) == (1, True)
    only_one = [*run_of([6.0, 5.0], grad_norm=2.0), metrics(3, 4.0)]
    assert harness("compare", "a", make("c", only_one))[0] == 0


def test_a_run_that_is_still_training_is_compared_over_the_common_steps(harness, make):
    a, b = make("a", run_of(LOSSES)), make("b", run_of(LOSSES[:2]), end='{"step": 3, "lo')
    code, printed, _ = harness("compare", a, b)
    assert (code, "over 2 steps, 1 to 2" in printed) == (0, True)


def test_settings_and_data_that_differ_are_listed(harness, make):
    other = SftConfig(run_dir="b", optimizer=OptimizerConfig(lr=0.004))
    b = [metrics(1, 6.0), metrics(2, 5.0, trained_tokens=299)]
    code, printed, _ = harness("compare", make("a", run_of([6.0, 5.0])), make("b", b, other))
    rows = [line.split() for line in printed.splitlines()]
    assert code == 0
    assert ["optimizer.lr", "null", "0.004"] in rows
    assert not any(row[:1] == ["run_dir"] for row in rows)
    assert "data: from step 2 on, steps have different numbers of tokens or packs" in printed


def test_one_of_three_runs_that_differs_is_exit_code_1_and_json_has_no_nan(harness, make):
    runs = [make("a", run_of(LOSSES)), make("b", run_of(LOSSES)), make("c", run_of([6.0, math.nan, 4.0, 3.0]))]
    code, printed, _ = harness("compare", *runs, "--json")
    same, different = json.loads(printed, parse_constant=pytest.fail)["runs"]
    assert (code, same["is_same"], different["is_same"]) == (1, True, False)
    assert (different["curves"][0]["first"], different["curves"][0]["largest"]) == ([2, 5.0, None], None)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (["a"], "one run cannot be compared"),
        (["a", "late"], "no common steps: 1 to 4 and 7 to 7"),
        (["a", "empty"], "the run has not completed a step yet"),
        (["a", "nowhere"], "there is no run in this folder"),
        (["a", "b", "out=missing/x.png"], "the plot cannot be written"),
        (["a", "b", "tolerance.loss=2"], "loss is 2.0"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(harness, make, runs, message):
    make("a", run_of(LOSSES))
    make("b", run_of(LOSSES))
    make("late", [metrics(7, 2.0)])
    make("empty", [])
    code, _, error = harness("compare", *runs)
    assert code == 2
    assert message in error
    assert "fix:" in error
