"""Weights & Biases and MLflow beside TensorBoard, each fed by a thread of its own.

Training never waits for a service or fails by one. A service that cannot be reached is reported once, and receives no
more of this part of the run; `metrics.jsonl` has everything. A folder NAME in that of the run has `told.json`, the
service's id of the run and the last step sent, so that a resumed run continues its curves and repeats no step.
"""

from __future__ import annotations

import io
import json
import os
import queue
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from harness.errors import ConfigError
from harness.printing import redact
from harness.settings import flatten
from harness.storage import write_atomically
from harness.train.checkpoints import read_identity
from harness.train.loop import OWN_VALIDATION

# The package and the extra of each have the same name.
SERVICES = ("wandb", "mlflow")
# For runs that no variable (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME) puts elsewhere.
PROJECT = "megatron-sft-harness"
# Wait at the end of a run for what is still on its way, by status; shorter if the run was asked to leave.
PATIENCE_S = {"finished": 20.0, "stopped": 5.0}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError, with the extra to install, if the package of a service is missing."""
    for name in filter(SERVICES.__contains__, names):
        spec = find_spec(name)
        # A folder of that name, which wandb makes where it runs, has a spec too, but no origin.
        if spec is None or spec.origin is None:
            what = f"the package {name} is not installed"
            fix = f"pip install 'megatron-sft-harness[{name}]', or remove {name} from trainer.trackers"
            raise ConfigError(what, where=f"trainer.trackers, {sys.executable}", fix=fix)


def curves_of(line: Mapping[str, Any]) -> list[tuple[int, dict[str, float]]]:
    """Return the steps that a metrics line has numbers of, with these by curve: before the first, 0, and its own, last.

    Curves of training are `train/loss` and so on. Those of validation are a group of their own: `validation/loss`, and
    `validation/code/loss` of the further set `code`; those of a mixture of experts are `experts/load` and so on,
    and `experts/data/code/load` of the tokens from `data/code`.
    """
    initial = {
        "validation/loss" if name == OWN_VALIDATION else f"validation/{name}/loss": loss
        for name, loss in line.get("initial_losses", {}).items()
    }
    loads = line.get("evaluation_expert_loads", {})
    plain = {name: value for name, value in line.items() if isinstance(value, int | float)}
    values = {f"train/{key}": plain[key] for key in plain if key not in ("step", "validation_loss", "mtp_tokens")}
    values |= {"validation/loss": line["validation_loss"]}
    values |= {f"validation/{name}/loss": loss for name, loss in line["evaluation_losses"].items()}
    values |= {f"train/{name}/loss": loss for name, loss in line.get("source_losses", {}).items()}
    values |= {f"train/mtp_loss_{number}": loss for number, loss in enumerate(line.get("mtp_losses", ()), start=1)}
    values |= {f"experts/{name}": value for name, value in line.get("experts", {}).items()}
    values |= {f"experts/{name}/load": load for name, load in line.get("source_expert_loads", {}).items()}
    values |= {f"validation/{name}/expert_load": load for name, load in loads.items() if name != OWN_VALIDATION}
    values |= {"validation/expert_load": loads.get(OWN_VALIDATION)}
    values |= {"train/slowest_rank_compute_s": max(times)} if (times := line.get("rank_compute_s")) else {}
    own = {curve: value for curve, value in values.items() if value is not None}
    return [*([(0, initial)] if initial else []), (line["step"], own)]


class EventFile:
    """A new event file of TensorBoard in `folder`, written by the thread that trains.

    The writers of TensorBoard and of torch hand each value to a thread of their own, which dies with a traceback where
    the disk refuses, and opens the file again for every value. Here a step is one write, and a refusal an OSError.
    TensorBoard hides what earlier files of the folder have of `first_step` and later ones.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._records = Event, Summary, RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = (folder / name).open("xb", buffering=0)
        self._write(
            Event(wall_time=time.time(), step=first_step, file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=first_step, session_log=SessionLog(status=SessionLog.START)),
        )

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Append the values of a step by the names of their curves."""
        points = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=points)))

    def close(self) -> None:
        self._file.close()

    def _write(self, *events: Any) -> None:
        block = io.BytesIO()
        records = self._records(block)
        for event in events:
            records.write(event.SerializeToString())
        rest = block.getbuffer()
        while rest:
            rest = rest[self._file.write(rest) :]


Steps = list[tuple[int, dict[str, float]]]


class SentState:
    """The service's knowledge of the run, kept on disk."""

    def __init__(self, home: Path) -> None:
        self._path = home / "told.json"
        values = json.loads(self._path.read_text()) if self._path.exists() else {}
        identity = read_identity(home.parent)
        self._identity = None if identity is None else identity.run
        if values.get("identity", self._identity) != self._identity:
            values = {}  # of a run of which this folder is a copy: its curves are not this run's
        self.run: str | None = values.get("run")
        self.step: int = values.get("step", -1)  # 0 is before the first

    def update(self, *, run: str | None = None, step: int | None = None) -> None:
        self.run = self.run if run is None else run
        self.step = self.step if step is None else step
        values = {"run": self.run, "step": self.step, "identity": self._identity}
        write_atomically(self._path, json.dumps(values).encode())


class Wandb:
    """A run of Weights & Biases, configured by its own variables (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, ...)."""

    def __init__(self, folder: Path, sent: SentState, settings: dict[str, Any]) -> None:
        import wandb

        if sent.run is None:
            sent.update(run=secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=sent.run,
            resume="allow",
            dir=str(folder / "wandb"),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.config.update(settings, allow_val_change=True)

    def send(self, steps: Steps) -> None:
        for step, values in steps:
            self._run.log(values, step=step)

    def finish(self, status: str) -> None:
        self._run.summary["end"] = status
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)


class Mlflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI, or in files below the run's folder."""

    def __init__(self, folder: Path, sent: SentState, settings: dict[str, Any]) -> None:
        # Newer versions refuse a store of files unless it is asked for.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        store = (folder / "mlflow" / "store").as_uri()
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", store))
        if sent.run is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            existing = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
            sent.update(run=self._client.create_run(experiment, run_name=folder.name).info.run_id)
        self._run = sent.run
        self._client.update_run(self._run, status="RUNNING")
        known = self._client.get_run(self._run).data.params
        # Longer values are refused.
        flat = {key: str(value)[:500] for key, value in flatten(settings).items()}
        new = [Param(key, value) for key, value in flat.items() if key not in known]
        for first in range(0, len(new), 100):
            self._client.log_batch(self._run, params=new[first : first + 100])
        for key, value in flat.items():
            if known.get(key, value) != value:  # a parameter cannot be changed
                self._client.set_tag(self._run, f"changed.{key}", value)

    def send(self, steps: Steps) -> None:
        now = int(time.time() * 1000)
        points = [(mlflow_name(curve), value, now, step) for step, values in steps for curve, value in values.items()]
        self._client.log_batch(self._run, metrics=[self._metric(*point) for point in points])

    def finish(self, status: str) -> None:
        self._client.set_tag(self._run, "end", status)
        self._client.set_terminated(self._run, {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))


def mlflow_name(curve: str) -> str:
    """Return the name of a curve as MLflow takes it, which refuses those of most paths of a blend's sources."""
    # What it refuses is named by its number: two sources keep curves of their own.
    parts = (re.sub(r"[^\w. -]", lambda found: f"_{ord(found[0]):x}", part) for part in curve.split("/"))
    return "/".join(part if part.strip(".") else f"_{part}" for part in parts)


class Tracker:
    """Feeds one service with the steps of the run in `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._waiting: queue.SimpleQueue[Steps | str] = queue.SimpleQueue()
        self._problem = ""
        self._thread = threading.Thread(target=self._feed, name=f"{name} of {folder}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread left
            self._problem = f"{name} receives no metrics of this run ({error}); training continues"

    def send(self, steps: Steps | str) -> None:
        """Pass on steps, and at last how the run ended: `finished` or `stopped` (to be continued)."""
        self._waiting.put(steps)

    def problem(self) -> str:
        """Return why the service receives nothing more, once; empty before and after it."""
        found, self._problem = self._problem, ""
        return found

    def wait(self, deadline: float) -> str:
        """Wait until the service has everything, at most until time.monotonic() is `deadline`; return `problem`."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return f"{self._name} did not finish in time" if self._thread.is_alive() else self.problem()

    def _feed(self) -> None:
        try:
            (self._folder / self._name).mkdir(exist_ok=True)
            sent = SentState(self._folder / self._name)
            settings = yaml.safe_load((self._folder / "config.yaml").read_text())
            service = (Wandb if self._name == "wandb" else Mlflow)(self._folder, sent, settings)
            while not isinstance(steps := self._waiting.get(), str):
                if new := [(step, values) for step, values in steps if step > sent.step]:
                    service.send(new)
                    sent.update(step=new[-1][0])
            service.finish(steps)
        except Exception as error:  # services raise many kinds
            why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
            self._problem = redact(f"{self._name} receives no more metrics of this run ({why}); training continues")
