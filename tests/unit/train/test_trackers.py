"""Services are fed by threads of their own; a service that fails is reported once and costs nothing."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from step_metrics import metrics

from harness.errors import ConfigError
from harness.settings import flatten
from harness.train import metrics as metrics_module
from harness.train.checkpoints import begin_attempt
from harness.train.metrics import MetricsWriter, StepMetrics
from harness.train.trackers import SERVICES, SentState, check_trackers, curves_of, mlflow_name

# Stand-in for the package: it appends everything that it receives to a file.
PACKAGE = """
import json
class Settings:
    def __init__(self, **values): pass
class Run:
    def __init__(self, **values):
        self.values, self.summary, self.config = values, {}, self
    def update(self, config, allow_val_change):
        self.note(["start", self.values["id"], self.values["name"], config["model"]["seed"]])
    def note(self, what):
        with open("TOLD", "a") as file: file.write(json.dumps(what) + "\\n")
    def log(self, values, step): self.note([step, values["train/loss"], values.get("validation/loss")])
    def mark_preempting(self): self.note(["preempting"])
    def finish(self, exit_code): self.note([self.summary["end"], exit_code])
def init(**values): return Run(**values)
"""


def write(folder: Path, steps: list[StepMetrics], *, trackers=("wandb",), first_step=1, status="finished") -> list[str]:
    """Return the lines that were printed."""
    lines_printed: list[str] = []
    writer = MetricsWriter(folder, first_step=first_step, trackers=trackers, log=lines_printed.append)
    for step in steps:
        writer.write(step)
    writer.close(status)
    return lines_printed


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Waits for a service at the end of a run that a busy machine does not exceed."""
    for status in metrics_module.PATIENCE_S:
        monkeypatch.setitem(metrics_module.PATIENCE_S, status, 50.0)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "sft-007"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: {seed: 11}\n")
    return folder


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that installs a stand-in for wandb and returns the path of its notes."""
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "packages").mkdir()
    notes = tmp_path / "notes"

    def put(text: str = PACKAGE) -> Path:
        (tmp_path / "packages" / "wandb.py").write_text(text.replace("TOLD", str(notes)))
        return notes

    yield put
    sys.modules.pop("wandb", None)


def lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    for name in SERVICES:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=f"the package {name} is not installed") as error:
            check_trackers(["tensorboard", name])
        assert error.value.fix.startswith(f"pip install 'megatron-sft-harness[{name}]'")
    check_trackers(["tensorboard"])
    check_trackers([])


def test_a_folder_with_the_name_of_a_package_does_not_count(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="the package wandb is not installed"):
        check_trackers(["wandb"])


def test_a_resumed_run_is_the_same_run_and_repeats_no_step(run, package):
    notes = package()
    assert (
        write(run, [metrics(1, 3.0), metrics(2, 2.5, validation_loss=2.75), metrics(3, 2.25)], status="stopped") == []
    )
    # From the checkpoint of step 2: step 3 is trained again.
    assert write(run, [metrics(3, 2.25), metrics(4, 2.0, validation_loss=2.125)], first_step=3) == []
    (_, name, _, _), *_ = received = lines(notes)
    assert received == [
        ["start", name, "sft-007", 11], [1, 3.0, None], [2, 2.5, 2.75], [3, 2.25, None], ["preempting"], ["stopped", 1],
        ["start", name, "sft-007", 11], [4, 2.0, 2.125], ["finished", 0],
    ]  # fmt: skip


def test_a_service_that_fails_is_reported_once_and_the_run_continues(run, package):
    package("raise OSError(28, 'No space left on device')\n")
    (line,) = write(run, [metrics(1, 3.0), metrics(2, 2.5)])
    assert line == (
        "wandb receives no more metrics of this run (OSError: [Errno 28] No space left on device); training continues"
    )
    assert len(lines(run / "metrics.jsonl")) == 2


def test_a_service_that_hangs_delays_the_end_of_a_run_no_longer_than_its_limit(run, package, monkeypatch):
    package(f"{PACKAGE}\nimport threading\ninit = lambda **values: threading.Event().wait()\n")
    monkeypatch.setitem(metrics_module.PATIENCE_S, "finished", 0.5)
    # The package waits for ever: ending at all shows that nothing waits for it.
    assert write(run, [metrics(1, 3.0)]) == ["wandb did not finish in time"]


def test_a_tensorboard_that_cannot_be_written_or_is_missing_is_reported_once(run, monkeypatch):
    (run / "tensorboard").write_text("no folder")
    (line,) = write(run, [metrics(1, 3.0), metrics(2, 2.5)], trackers=["tensorboard"])
    assert line.startswith("tensorboard receives no more metrics of this run")
    assert len(lines(run / "metrics.jsonl")) == 2
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    (line,) = write(run, [metrics(3, 3.0)], trackers=["tensorboard"], first_step=3)
    assert "pip install 'megatron-sft-harness[train]'" in line


def test_a_copied_run_does_not_continue_the_curves_of_the_original(tmp_path):
    original, copy = tmp_path / "a", tmp_path / "b"
    (original / "wandb").mkdir(parents=True)
    begin_attempt(original)
    SentState(original / "wandb").update(run="abc", step=7)
    shutil.copytree(original, copy)
    begin_attempt(copy)
    begin_attempt(original)
    found = [SentState(folder / "wandb") for folder in (original, copy)]
    assert [(state.run, state.step) for state in found] == [("abc", 7), (None, -1)]


def test_names_of_settings_and_of_curves():
    assert flatten({"a": 1, "model": {"seed": 2, "deep": {"x": []}}}) == {"a": 1, "model.seed": 2, "model.deep.x": []}
    line = {"step": 3, "loss": 0.0, "validation_loss": None, "evaluation_losses": {}}
    assert curves_of(line) == [(3, {"train/loss": 0.0})]
    for curve in ("train/loss", "train/data/a_1.b-c/loss"):
        assert mlflow_name(curve) == curve
    assert mlflow_name("train//data/a (2)/loss") == "train/_/data/a _282_29/loss"
    assert mlflow_name("train/s3://bucket/../a/loss") == "train/s3_3a/_/bucket/_../a/loss"
    # Each keeps a curve of its own.
    names = ["a+b", "a_b", "a", "/a", "../a", "./a"]
    assert len({mlflow_name(name) for name in names}) == len(names)


def test_mlflow_itself_keeps_each_step_once(run, monkeypatch):
    client_of = pytest.importorskip("mlflow").MlflowClient
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert (
        write(
            run,
            [
                metrics(1, 3.0, source_losses={"/data/a (2)": 2.0, "../b": 3.0, "s3://c//d": 4.0}),
                metrics(2, 2.5, validation_loss=2.75),
                metrics(3, 2.25),
            ],
            trackers=["mlflow"],
        )
        == []
    )
    (run / "config.yaml").write_text("model: {seed: 12}\n")
    assert write(run, [metrics(3, 2.25), metrics(4, 2.0)], trackers=["mlflow"], first_step=3, status="stopped") == []
    client = client_of(tracking_uri=(run / "mlflow" / "store").as_uri())
    name = SentState(run / "mlflow").run
    kept = client.get_run(name)
    assert (kept.info.run_name, kept.info.status, kept.data.tags["end"]) == ("sft-007", "KILLED", "stopped")
    assert (kept.data.params["model.seed"], kept.data.tags["changed.model.seed"]) == ("11", "12")
    history = client.get_metric_history(name, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 3.0), (2, 2.5), (3, 2.25), (4, 2.0)]
    assert [point.step for point in client.get_metric_history(name, "validation/loss")] == [2]


def test_wandb_itself_keeps_a_resumed_run_under_one_name(run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert write(run, [metrics(1, 3.0), metrics(2, 2.5)], status="stopped") == []
    assert write(run, [metrics(3, 2.25)], first_step=3) == []
    name = SentState(run / "wandb").run
    assert SentState(run / "wandb").step == 3
    parts = sorted((run / "wandb" / "wandb").glob("offline-run-*"))
    assert [part.name.rpartition("-")[2] for part in parts] == [name, name]
    assert all(list(part.glob(f"run-{name}.wandb")) for part in parts)
