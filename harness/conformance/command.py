"""Run checks on a target in this process, one rank of a job: `python -m harness.conformance.worker SETTINGS`.

It needs numpy, PyTorch and the trainer, and nothing else of this project's requirements. Each verdict is a line of
JSON in `verdicts-RANK.jsonl` in the job's folder, written when it is known.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from harness.conformance.command import CommandTarget
from harness.conformance.kit import ERROR, FAIL, judge
from harness.conformance.target import load_target
from harness.errors import HarnessError


def run_checks(target: Any, names: list[str], folder: Path) -> int:
    """Run checks one after another as this rank of the job, with files below `folder`; return the exit code."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for name in names:
        began = time.monotonic()
        outcome, text = judge(target, name, folder / name, rank=rank, ranks=ranks)
        line = {"check": name, "outcome": outcome, "text": text, "seconds": round(time.monotonic() - began, 1)}
        with (folder / f"verdicts-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if ranks > 1 and outcome in (ERROR, FAIL):
            return 1  # others may wait for this rank; the job is started again for the checks that are left
    return 0


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
    (folder / f"group-{os.environ.get('RANK', '0')}.txt").write_text(str(os.getpgrp()))
    code = run_checks(target, settings["checks"], folder)
    # Trainers leave threads and process groups that may wait for each other.
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
