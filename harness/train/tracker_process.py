"""Feed one service from a run, in a process beside it: `python -m harness.train.tracker_process NAME METRICS`.

Reads the run's `config.yaml` once, and new lines of METRICS, its `metrics.jsonl`, until standard input ends with the
status of the run. A folder NAME beside them has `told.json` (the service's id of the run and the last step sent, so
that a resumed run repeats none), `log.txt`, and files of the service itself. If the service cannot be reached, one line
is printed to standard output, and the process tries again until the run ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import yaml

from harness.printing import print_line, redact
from harness.settings import flatten
from harness.train.local import read_identity
from harness.train.trackers import curves_of

# For runs that no variable (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME) puts elsewhere.
PROJECT = "megatron-sft-harness"
POLL_S = 1.0
# Wait between attempts to reach a service, doubled each time.
RETRY_S, LONGEST_RETRY_S = 10.0, 600.0
# Limit after the run's end, whether or not anybody waits.
LIMIT_S = 60.0
STEPS_PER_CALL = 40

Steps = list[tuple[int, dict[str, float]]]


class Service(Protocol):
    def send(self, steps: Steps) -> None: ...

    def finish(self, status: str) -> None: ...


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
        self.step: int = values.get("step", 0)

    def update(self, *, run: str | None = None, step: int | None = None) -> None:
        self.run = self.run if run is None else run
        self.step = self.step if step is None else step
        written = self._path.with_suffix(".written")
        written.write_text(json.dumps({"run": self.run, "step": self.step, "identity": self._identity}))
        written.replace(self._path)


class NewLines:
    """Steps that a run appended to `path` since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def take(self, *, after: int) -> Steps:
        """Return the steps after step `after`; half a line is left for the next call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = [json.loads(line) for line in whole.splitlines()]
        return [one for line in lines if line["step"] > after for one in curves_of(line)]


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
            settings=wandb.Settings(console="off"),
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
        self._client.log_batch(
            self._run,
            metrics=[self._metric(key, value, now, step) for step, values in steps for key, value in values.items()],
        )

    def finish(self, status: str) -> None:
        self._client.set_tag(self._run, "end", status)
        self._client.set_terminated(self._run, {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))


OPEN: dict[str, Callable[[Path, SentState, dict[str, Any]], Service]] = {"wandb": Wandb, "mlflow": Mlflow}


def read_status(timeout_s: float) -> str | None:
    """Return the status of the run once it has ended, `failed` if it ended without a word; None before."""
    if not select.select([0], [], [], timeout_s)[0]:
        return None
    # Not until the end of the file: loader workers, which are forks of the run, hold the pipe open.
    return os.read(0, 100).decode() or "failed"


def limit() -> None:
    """End this process LIMIT_S after the run has ended; for a thread of its own, because a service may block."""
    select.select([0], [], [])
    time.sleep(LIMIT_S)
    os._exit(1)


def follow(name: str, metrics: Path, warn: int) -> None:
    """Feed the service `name` until the run ends; `warn` is a file descriptor that takes the one warning."""
    folder, home = metrics.parent, metrics.parent / name
    sent, lines = SentState(home), NewLines(metrics)
    service: Service | None = None
    waiting: Steps = []
    next_try, retry_s, has_warned = 0.0, RETRY_S, False
    status: str | None = None
    while status is None:
        status = read_status(POLL_S)
        if status is None and time.monotonic() < next_try:
            continue
        try:
            waiting += lines.take(after=sent.step)
            if service is None:
                service = OPEN[name](folder, sent, yaml.safe_load((folder / "config.yaml").read_text()))
            while waiting:
                now = waiting[:STEPS_PER_CALL]
                service.send(now)
                del waiting[: len(now)]
                sent.update(step=now[-1][0])
            if status is not None:
                service.finish(status)
            retry_s = RETRY_S
        except Exception as error:  # services raise many kinds
            with suppress(OSError):  # the disk is full
                print_line(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if not has_warned:
                has_warned = True
                first_line = (str(error).strip().splitlines() or [""])[0][:300]
                message = f"{name} receives no metrics of this run ({type(error).__name__}: {first_line})"
                with suppress(OSError):  # the run has ended
                    line = redact(f"{message}; training continues, {home / 'log.txt'} contains details\n")
                    os.write(warn, line.encode(errors="replace"))
            next_try, retry_s = time.monotonic() + retry_s, min(2 * retry_s, LONGEST_RETRY_S)


def main() -> None:
    name, metrics = sys.argv[1], Path(sys.argv[2])
    # A scheduler that signals every process of a job means the ranks; the pipe carries how they reacted.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=limit, daemon=True).start()
    home = metrics.parent / name
    home.mkdir(exist_ok=True)
    warn = os.dup(1)
    with (home / "log.txt").open("a") as log, (home / "lock").open("a") as lock:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        # The process of the run's previous part may still be sending its end.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        follow(name, metrics, warn)
        # Without the services' own exit handlers, which may wait for a network that is down.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
