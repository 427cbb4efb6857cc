"""Services that are told of a run beside TensorBoard: Weights & Biases and MLflow, each by a process of its own.

That process (`harness.train.tracker_process`) follows the run's `metrics.jsonl`, so that training never waits for a
service, and a service that comes back is told what it missed. Its end of a pipe says how the run ended: a word, or
nothing where the run was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.errors import ConfigError

# Package and extra are called alike.
SERVICES = ("wandb", "mlflow")
# At the end of a run, for what is still on its way; less where the run was asked to leave.
PATIENCE_S = {"finished": 20.0, "stopped": 5.0}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse services whose package is missing; raises ConfigError with the extra that has it."""
    for name in names:
        if name not in SERVICES:
            continue
        found = find_spec(name)
        # A folder of that name, which wandb makes where it runs, is found too, and has no file to begin with.
        if found is None or found.origin is None:
            raise ConfigError(
                f"the package {name} is not installed",
                where=f"trainer.trackers, {sys.executable}",
                fix=f"pip install '.[{name}]', or leave {name} out of trainer.trackers",
            )


def shown_values(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics by the names of their curves: `train/loss`, `train/code_loss` of set `code`."""
    named = {f"{name}_loss": loss for name, loss in line["evaluation_losses"].items()}
    values = {**{key: value for key, value in line.items() if key not in ("step", "evaluation_losses")}, **named}
    return {f"train/{key}": value for key, value in values.items() if value is not None}


class Tracker:
    """Tells one service of a run, from its `metrics.jsonl` and the `config.yaml` beside it.

    Nothing raises: what goes wrong is told once, by `news`.
    """

    def __init__(self, name: str, metrics: Path) -> None:
        self._name = name
        self._has_told = False
        self._failed = ""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.train.tracker_process", name, str(metrics.absolute())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Signals that end the run are for the run; and at the end all that a service started can be ended.
                start_new_session=True,
            )
            os.set_blocking(self._process.stdout.fileno(), False)  # type: ignore[union-attr]
        except OSError as error:
            self._failed = f"{name} is not told of this run: {error}"

    def news(self) -> str | None:
        """What there is to say of the service: at most once, that it cannot be told."""
        if self._has_told:
            return None
        told = self._failed or self._said()
        code = None if self._process is None else self._process.poll()
        if not told and code:
            told = f"{self._name} is not told of this run any more: its process ended with code {code}"
        self._has_told = bool(told)
        return told or None

    def end(self, how: str) -> None:
        """Say how the run ended: `finished`, `stopped` (it will go on) or `failed`."""
        if self._process is not None:
            with suppress(OSError):
                self._process.stdin.write(how.encode())  # type: ignore[union-attr]
                self._process.stdin.close()  # type: ignore[union-attr]

    def wait(self, until: float) -> str | None:
        """Wait, after `end`, until the service knows everything, or until time.monotonic() is `until`; gives `news`."""
        if self._process is None:
            return self.news()
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._failed = (
                self._said() or f"{self._name} did not take the end of this run in time; its log.txt has more"
            )
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return self.news()

    def _said(self) -> str:
        with suppress(OSError):
            if self._process is not None and self._process.stdout is not None:
                return (self._process.stdout.read() or b"").decode(errors="replace").strip()
        return ""
