"""Weights & Biases and MLflow beside TensorBoard, each fed by a process of its own.

That process (`harness.train.tracker_process`) follows the run's `metrics.jsonl`. Training never waits for a service or
fails by one, and a service that comes back gets what it missed. The services' own asynchronous modes offer neither: if
the server is unreachable, `wandb.init` blocks for its whole timeout and raises, `mlflow.start_run` likewise, and steps
whose retries MLflow has used up are dropped.

The process learns from its end of a pipe how the run ended: one word, or nothing if the run was killed.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.train.loop import OWN_VALIDATION

# The package and the extra of each have the same name.
SERVICES = ("wandb", "mlflow")
# Wait at the end of a run for what is still on its way, by status; shorter if the run was asked to leave.
PATIENCE_S = {"finished": 20.0, "stopped": 5.0}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError, with the extra to install, if the package of a service is missing."""
    for name in filter(SERVICES.__contains__, names):
        spec = find_spec(name)
        # A folder of that name, which wandb makes where it runs, has a spec too, but no origin.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"the package {name} is not installed",
                where=f"trainer.trackers, {sys.executable}",
                fix=f"pip install 'megatron-sft-harness[{name}]', or remove {name} from trainer.trackers",
            )


def curves_of(line: Mapping[str, Any]) -> list[tuple[int, dict[str, float]]]:
    """Return the steps that a metrics line has numbers of, with these by curve: its own, and before the first, 0."""
    initial = {
        "validation/loss" if name == OWN_VALIDATION else f"validation/{name}/loss": loss
        for name, loss in line.get("initial_losses", {}).items()
    }
    return [*([(0, initial)] if initial else []), (line["step"], curve_values(line))]


def curve_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a metrics line by curve.

    Curves of training are `train/loss` and so on. Those of validation are a group of their own: `validation/loss`, and
    `validation/code/loss` of the further set `code`; those of a mixture of experts are `experts/load` and so on,
    and `experts/data/code/load` of the tokens from `data/code`.
    """
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
    return {curve: value for curve, value in values.items() if value is not None}


class EventFile:
    """A new event file of TensorBoard in `folder`, written by the thread that trains.

    The writers of TensorBoard and of torch hand each value to a thread of their own, which dies with a traceback where
    the disk refuses, and opens the file again for every value. Here a step is one write, and a refusal an exception.

    Args:
        first_step: TensorBoard hides what earlier files of the folder have of this step and later ones.

    Raises:
        OSError: here and in `add`, the disk refuses.
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
        summary = self._summary(
            value=[self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

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


class Tracker:
    """The process that feeds one service from a run's `metrics.jsonl` and its `config.yaml`.

    Raises:
        OSError: from the constructor, the process cannot be started.
    """

    def __init__(self, name: str, metrics: Path) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.train.tracker_process", name, str(metrics.absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Signals that end the run are not for this process; and at the end its children end with it.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._status, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)

    def problem(self) -> str:
        """Return the one line that the process prints if the service cannot be reached; empty before and after it."""
        return (self._output.read() or b"").decode(errors="replace").strip()

    def end(self, status: str) -> None:
        """Pass on how the run ended: `finished`, `stopped` (to be continued) or `failed`."""
        with suppress(OSError):
            self._status.write(status.encode())
            self._status.close()

    def wait(self, deadline: float) -> str:
        """Wait, after `end`, until the service has everything or time.monotonic() is `deadline`; return `problem`."""
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return self.problem() or f"{self._name} did not finish in time; see its log.txt"
        return self.problem() or f"the process that feeds {self._name} exited with code {code}" * (code != 0)
