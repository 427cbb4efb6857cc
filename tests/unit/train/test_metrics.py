"""Metrics of a run are written one line per step, survive a kill, and end in a plot and a report."""

from __future__ import annotations

import json
import math

import pytest
from step_metrics import metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.errors import FormatError
from harness.train.metrics import MetricsWriter, plot_experts, plot_loss, read_metrics, write_report
from harness.train.trackers import curves_of


def write(folder, steps) -> None:
    writer = MetricsWriter(folder)
    for step in steps:
        writer.write(step)
    writer.close()


def test_written_metrics_are_read_back_and_tensorboard_shows_the_same_numbers(tmp_path):
    before = {"validation": 4.0, "code": 3.5}
    last = metrics(2, 2.5, validation_loss=1.5, evaluation_losses={"code": 2.5}, source_losses={"data/a": 2.25})
    steps = [metrics(1, 3.0, initial_losses=before, source_losses={"data/a": 2.0, "data/b": 5.0}), last]
    write(tmp_path, steps)
    assert read_metrics(tmp_path / "metrics.jsonl") == steps
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert shown["train/loss"] == [(1, 3.0), (2, 2.5)]
    # Curves of validation are a group of their own.
    assert {name: shown[name] for name in shown if "valid" in name or "code" in name} == {
        "validation/loss": [(0, 4.0), (2, 1.5)],
        "validation/code/loss": [(0, 3.5), (2, 2.5)],
    }
    assert (shown["train/data/a/loss"], shown["train/data/b/loss"]) == ([(1, 2.0), (2, 2.25)], [(1, 5.0)])
    report = write_report(tmp_path, steps, {}).read_text()
    assert "| validation loss | 4.0000 at step 0, 1.5000 at step 2; perplexity 4.5 |" in report
    assert "| training loss of data/a | 2.0000 at step 1, 2.2500 at step 2 |" in report
    assert "| training loss of data/b | 5.0000 at step 1 |" in report


def test_the_load_of_experts_is_drawn_and_reported_in_training_of_each_source_and_in_each_validation_set(tmp_path):
    experts = [{"load": 1.5, "worst_load": 2.0}, {"load": 1.25, "worst_load": 1.75}]
    loads = {"validation": 1.375, "code": 3.0}
    sources = {"data/code": 1.75, "data/chats": 1.125}
    last = metrics(2, experts=experts[1], evaluation_expert_loads=loads, source_expert_loads=sources)
    steps = [metrics(1, experts=experts[0]), last]
    write(tmp_path, steps)
    assert read_metrics(tmp_path / "metrics.jsonl") == steps
    ((_, curves),) = curves_of(json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1]))
    found = {name: value for name, value in curves.items() if "load" in name}
    of_step = {"experts/load": 1.25, "experts/worst_load": 1.75}
    of_step |= {"experts/data/code/load": 1.75, "experts/data/chats/load": 1.125}
    assert found == {**of_step, "validation/expert_load": 1.375, "validation/code/expert_load": 3.0}

    report = write_report(tmp_path, steps, {}).read_text()
    row = "| busiest expert, relative to the mean | 1.500 at step 1, 1.250 at step 2, 1.750 in the worst layer |"
    assert row in report
    assert "| the same by source, step 2 | data/code 1.750, data/chats 1.125 |" in report
    assert "| the same of validation sets, step 2 | validation 1.375, code 3.000 |" in report
    plot_experts(steps, tmp_path / "experts.png")
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert "experts.png" not in write_report(tmp_path, [metrics(1)], {}).read_text()


def test_numbers_that_are_not_finite_are_still_json_wherever_they_are(tmp_path):
    losses = {"evaluation_losses": {"code": math.nan}, "source_losses": {"a": math.inf}, "mtp_losses": [2.0, math.nan]}
    write(tmp_path, [metrics(1, grad_norm=math.nan, **losses)])
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["grad_norm"] is None
    assert [line[name] for name in losses] == [{"code": None}, {"a": None}, [2.0, None]]
    (read,) = read_metrics(tmp_path / "metrics.jsonl")
    assert all(map(math.isnan, (read.grad_norm, read.evaluation_losses["code"], read.mtp_losses[1])))


@pytest.mark.parametrize(
    "change",
    [
        *({"step": "1"}, {"loss": "a"}, {"fill": []}, {"unknown": 1}, {"tokens": None}, {"experts": []}),
        *({"stragglers": [1]}, None),
    ],
)
def test_a_line_that_is_not_a_step_is_named(tmp_path, change):
    values = {} if change is None else vars(metrics(1)) | change
    (tmp_path / "metrics.jsonl").write_text(json.dumps(values) + "\n")
    with pytest.raises(FormatError, match="line 1 is not a step's metrics"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_the_plot_is_a_png_and_the_report_leads_with_the_result(tmp_path):
    steps = [metrics(1, 3.0), metrics(2, 2.5, validation_loss=2.75)]
    plot_loss(steps, tmp_path / "loss.png", title="sft-001: Qwen3-8B, on data/$x")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot_loss(steps, tmp_path / "untitled.png")
    assert (tmp_path / "loss.png").read_bytes() != (tmp_path / "untitled.png").read_bytes()
    text = write_report(tmp_path, steps, {"dataset": "data/x"}).read_text()
    assert "| training loss | 3.0000 at step 1, 2.5000 at step 2 |" in text
    assert "| validation loss | 2.7500 at step 2; perplexity 15.6 |" in text
    assert "| tokens | 2,000, of them 1,200 trained |" in text
    assert "| tokens per second | 500 |" in text
    assert "| dataset | data/x |" in text
