"""A trainer as a command that reads the data of a check and prints one line of JSON per step; and a rank of checks.

`python -m harness.conformance.command SETTINGS` runs checks on any target in this process, one rank of a job. It needs
numpy, PyTorch and the trainer, and nothing else of this project's requirements. Each verdict is a line of JSON in
`verdicts-RANK.jsonl` in the job's folder, written when it is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.conformance.kit import ERROR, FAIL, judge
from harness.conformance.target import Layout, NotSupported, Step, Tokens, load_target
from harness.errors import ConfigError, HarnessError

_PLACES = ("model", "data", "steps", "eval_data", "save", "load", "batch_size", *asdict(Layout()))
_LIMIT_S = 600


class CommandTarget:
    """A target that runs a command for each step, epoch or evaluation.

    The placeholders `{model}` and `{data}` are required. `{steps}` is a number, or 0 for the rest of an epoch; `{save}`
    and `{load}` are checkpoint folders, and `{eval_data}` is a file like `{data}`; these are empty if not needed.
    `{batch_size}` is the number of rows per microbatch and rank; checks of one step train all `{data}` in it. Each
    field of `Layout` has a placeholder with its name. On standard output, each JSON object with `step` is read: `loss`,
    `grad_norm`, `rows` of all ranks (lines with the same step are joined) and `eval_loss`.

    Raises:
        ConfigError: the command contains an unknown placeholder, or lacks a required one.
    """

    name, version = "command", ""
    starts_ranks = True

    def __init__(self, command: str) -> None:
        places = set(re.findall(r"\{(\w+)\}", command))
        if unknown := sorted(places - set(_PLACES)):
            fix = f"use some of {', '.join(f'{{{name}}}' for name in _PLACES)}"
            raise ConfigError(f"unknown placeholder {{{unknown[0]}}} in the command", where="--command", fix=fix)
        if missing := sorted({"model", "data"} - places):
            raise ConfigError(f"the command does not contain {{{missing[0]}}}", where="--command", fix="add it")
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"cannot parse command: {error}", where="--command", fix="close the quotes") from error
        self._places, self._load = places, ""

    def build(self, model_folder: Path, data: Path, layout: Layout) -> Step:
        self._require(*layout.changed())
        self._values = {"model": str(model_folder), "data": str(data), "batch_size": "1", **asdict(layout)}
        self._load = ""

        def step(batch: Sequence[Tokens]) -> tuple[float, float | None]:
            if layout.learning_rate:
                raise NotSupported("each run of a command trains one step from the initial weights")
            tokens = sum(len(one["input_ids"]) for one in batch)
            rows = -(-tokens // layout.pack_size) if layout.pack_size else len(batch)
            size = -(-rows // (layout.dp_size * layout.microbatches))
            self._require(*["batch_size"] * (size > 1))
            line = self._run(steps="1", batch_size=str(size))[0]
            if "loss" not in line:
                raise RuntimeError(f"the first line with `step` has no `loss`: {line}")
            return line["loss"], line.get("grad_norm")

        return step

    def evaluate(self, batch: Sequence[Tokens]) -> float:
        self._require("eval_data")
        lines = self._run(steps="1", eval_data=self._values["data"])
        losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
        if not losses:
            raise NotSupported("no line contains eval_loss")
        return float(losses[-1])

    def rows(self, steps: int | None) -> list[list[Tokens]]:
        self._require("steps", *(["load"] if self._load else []))
        folder = tempfile.mkdtemp(dir=Path(self._values["data"]).parent) if "save" in self._places else ""
        saved = {"save": f"{folder}/saved"} if folder else {}
        lines = self._run(steps=str(steps or 0), load=self._load, **saved)
        if any("rows" not in line for line in lines):
            raise NotSupported("some lines do not contain rows")
        self._saved = saved.get("save", "")
        by_step: dict[int, list[Tokens]] = {}
        for line in lines:
            by_step.setdefault(line["step"], []).extend(line["rows"])
        return [rows for _, rows in sorted(by_step.items())]

    def save(self, folder: Path) -> None:
        self._require("save", "load")
        Path(self._saved).rename(folder)

    def load(self, folder: Path) -> None:
        self._load = str(folder)
        self._run(steps="1", load=self._load)

    def _require(self, *places: str) -> None:
        if missing := [f"{{{name}}}" for name in places if name not in self._places]:
            raise NotSupported(f"the command does not contain {' or '.join(missing)}")

    def _run(self, **values: str) -> list[dict[str, Any]]:
        """Run the command to its end; return the JSON objects that it prints."""
        texts = dict.fromkeys(_PLACES, "") | {name: str(value) for name, value in (self._values | values).items()}
        words = [re.sub(r"\{(\w+)\}", lambda match: texts[match[1]], word) for word in self._words]
        done = subprocess.run(words, capture_output=True, errors="replace", timeout=_LIMIT_S, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["nothing on standard error"])[-1]
            raise RuntimeError(f"the command exited with code {done.returncode}: {reason}")
        lines = []
        for line in done.stdout.splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # other lines of the trainer
                lines.append(json.loads(line))
        lines = [line for line in lines if isinstance(line, dict) and "step" in line]
        if not lines and not values.get("load"):  # after a resume at its end, an epoch may have no step
            raise RuntimeError("the command printed no JSON object with `step`")
        return lines


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["folder"])
    try:
        target = CommandTarget(settings["command"]) if settings["command"] else load_target(settings["target"])
    except HarnessError as error:
        (folder / "refused.json").write_text(json.dumps([error.what, error.where, error.fix]))
        sys.exit(2)
    versions = {name: str(getattr(target, name, "")) for name in ("name", "version")}
    (folder / "target.json").write_text(json.dumps(versions))
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    (folder / f"group-{rank}.txt").write_text(str(os.getpgrp()))
    code = 0
    for name in settings["checks"]:
        began = time.monotonic()
        outcome, text = judge(target, name, folder / name, rank=rank, ranks=ranks)
        line = {"check": name, "outcome": outcome, "text": text, "seconds": round(time.monotonic() - began, 1)}
        with (folder / f"verdicts-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if ranks > 1 and outcome in (ERROR, FAIL):
            code = 1  # others may wait for this rank; the job is started again for the checks that are left
            break
    # Trainers leave threads and process groups that may wait for each other.
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
