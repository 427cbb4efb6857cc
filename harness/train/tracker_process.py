"""Tells one service of a run, as a process beside it: `python -m harness.train.tracker_process NAME METRICS`.

Reads the run's `config.yaml` once, and new lines of METRICS, its `metrics.jsonl`, until standard input ends, which says
how the run ended. A folder NAME beside them has `told.json` (the service's run and the last step that it was told, so
that a run that goes on repeats none), `log.txt`, and what the service itself keeps. One line on standard output where
the service cannot be told; it is tried again until the run ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import yaml

from harness.train.trackers import shown_values

# Of runs that no variable (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME) puts elsewhere.
PROJECT = "megatron-sft-harness"
POLL_S = 1.0
# Between tries to reach a service, doubled each time.
RETRY_S, LONGEST_RETRY_S = 10.0, 600.0
# After the run's end, whether or not anybody waits.
LIMIT_S = 60.0
STEPS_AT_ONCE = 40

Steps = list[tuple[int, dict[str, float]]]


class Service(Protocol):
    def tell(self, steps: Steps) -> None: ...

    def finish(self, how: str) -> None: ...


class Told:
    """What a service knows of the run, kept on disk.

    Attributes:
        run: the service's name of the run, None where it has none yet.
        step: the last that it was told, 0 for none.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / "told.json"
        values = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.run: str | None = values.get("run")
        self.step: int = values.get("step", 0)

    def keep(self, *, run: str | None = None, step: int | None = None) -> None:
        self.run = self.run if run is None else run
        self.step = self.step if step is None else step
        written = self._path.with_suffix(".written")
        written.write_text(json.dumps({"run": self.run, "step": self.step}))
        written.replace(self._path)


class NewLines:
    """Steps that a run has written to `path` since they were last asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def take(self, *, after: int) -> Steps:
        """Those behind step `after`; half a line is left for the next time."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = [json.loads(line) for line in whole.splitlines()]
        return [(line["step"], shown_values(line)) for line in lines if line["step"] > after]


class Wandb:
    """A run of Weights & Biases; its own variables (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, ...) say where."""

    def __init__(self, folder: Path, told: Told, settings: dict[str, Any]) -> None:
        import wandb

        if told.run is None:
            told.keep(run=secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=told.run,
            resume="allow",
            dir=str(folder / "wandb"),
            settings=wandb.Settings(console="off"),
        )
        self._run.config.update(settings, allow_val_change=True)

    def tell(self, steps: Steps) -> None:
        for step, values in steps:
            self._run.log(values, step=step)

    def finish(self, how: str) -> None:
        self._run.summary["end"] = how
        if how == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if how == "finished" else 1)


class Mlflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI, or in files below the run's folder."""

    def __init__(self, folder: Path, told: Told, settings: dict[str, Any]) -> None:
        # Newer versions refuse a store of files that is not asked for.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        own = (folder / "mlflow" / "store").as_uri()
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", own))
        if told.run is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
            told.keep(run=self._client.create_run(experiment, run_name=folder.name).info.run_id)
        self._run = told.run
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

    def tell(self, steps: Steps) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run,
            metrics=[self._metric(key, value, now, step) for step, values in steps for key, value in values.items()],
        )

    def finish(self, how: str) -> None:
        self._client.set_tag(self._run, "end", how)
        self._client.set_terminated(self._run, {"finished": "FINISHED", "stopped": "KILLED"}.get(how, "FAILED"))


OPEN: dict[str, Callable[[Path, Told, dict[str, Any]], Service]] = {"wandb": Wandb, "mlflow": Mlflow}


def flatten(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`{"model": {"seed": 1}}` as `{"model.seed": 1}`."""
    flat = {}
    for key, value in settings.items():
        flat.update(flatten(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value})
    return flat


class RunEnd:
    """How the run ended, heard on standard input by a thread: a service may hold the others for minutes.

    Attributes:
        how: None while it goes on; `failed` where it is gone without a word.
    """

    def __init__(self) -> None:
        self.how: str | None = None
        self._heard = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def wait(self, seconds: float) -> str | None:
        self._heard.wait(seconds)
        return self.how

    def _listen(self) -> None:
        # Not until the end of the file: loader workers, which are forks of the run, hold the pipe open.
        self.how = os.read(0, 100).decode() or "failed"
        self._heard.set()
        time.sleep(LIMIT_S)
        os._exit(1)


def follow(name: str, metrics: Path, end: RunEnd, warn: int) -> int:
    """Tell the service `name` of a run until it ends; gives the exit code.

    Args:
        warn: a file descriptor that takes the one warning.
    """
    folder, home = metrics.parent, metrics.parent / name
    told, lines = Told(home), NewLines(metrics)
    service: Service | None = None
    waiting: Steps = []
    next_try, retry_s, has_warned, how = 0.0, RETRY_S, False, None
    while how is None:
        how = end.wait(POLL_S)
        if how is None and time.monotonic() < next_try:
            continue
        try:
            waiting += lines.take(after=told.step)
            if service is None:
                service = OPEN[name](folder, told, yaml.safe_load((folder / "config.yaml").read_text()))
            while waiting:
                now = waiting[:STEPS_AT_ONCE]
                service.tell(now)
                del waiting[: len(now)]
                told.keep(step=now[-1][0])
            if how is not None:
                service.finish(how)
            retry_s = RETRY_S
        except Exception as error:  # services raise many kinds
            said = (str(error).strip().splitlines() or [""])[0]
            with suppress(OSError):  # a disk that is full
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if not has_warned:
                has_warned = True
                told_why = f"{name} cannot be told of this run ({type(error).__name__}: {said[:300]})"
                with suppress(OSError):  # the run is gone
                    os.write(warn, f"{told_why}; training goes on, {home / 'log.txt'} has more\n".encode())
            next_try, retry_s = time.monotonic() + retry_s, min(2 * retry_s, LONGEST_RETRY_S)
            if how is not None:
                return 1
    return 0


def main() -> None:
    name, metrics = sys.argv[1], Path(sys.argv[2])
    # A scheduler that signals every process of a job means the ranks; the pipe tells how they took it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end = RunEnd()
    home = metrics.parent / name
    home.mkdir(exist_ok=True)
    warn = os.dup(1)
    with (home / "log.txt").open("a") as log, (home / "lock").open("a") as lock:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        # The process of the run's last part may still be telling of its end.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        code = follow(name, metrics, end, warn)
        # Not by way of the services' own exits, which may wait for a network that is gone.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
