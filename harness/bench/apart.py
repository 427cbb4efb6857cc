"""Measurements in processes of their own: `python -m harness.bench.apart FILE MODULE:FUNCTION ARGUMENT...`.

Imports are over before a function begins to measure, so that its figures are those of the data alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.bench import load
from harness.errors import HarnessError
from harness.printing import print_text

_LIMIT_S = 1800.0
_WITH_MEGATRON = "harness.bench.gpu"


def measure_apart(
    place: str, *arguments: object, ranks: int = 1, limit_s: float = _LIMIT_S, log: Path | None = None
) -> Any:
    """Call `module:function` in a process of its own, or on the ranks of a job, and return what it returns on rank 0.

    It gets `arguments` as text, and returns what JSON has. Raises HarnessError if it failed, or took longer; the error
    has the last line of the output that names one.
    """
    from harness.parity.running import end_job, last_words, rank_environment, start_job

    environment = rank_environment()
    if ranks == 1 and "OMP_NUM_THREADS" not in os.environ:
        del environment["OMP_NUM_THREADS"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    named = [place, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        made, log = Path(folder, "made.json"), log or Path(folder, "log")
        log.unlink(missing_ok=True)
        command = [sys.executable, *torchrun, "-m", "harness.bench.apart", str(made), *named]
        process = start_job(command, log, environment=environment)
        try:
            code = process.wait(limit_s)
            if not code and made.exists():
                return json.loads(made.read_text())
            reason = last_words(log, code) if code else "it did not return a result"
        except subprocess.TimeoutExpired:
            reason = f"it did not finish within {limit_s:g} s"
        finally:
            end_job(process)
    where = " ".join(["python -m harness.bench.apart FILE", *named])
    raise HarnessError(reason, where=where, fix="run this line alone to see its whole output")


def _call(made: str, place: str, *arguments: str) -> None:
    try:
        result = load(place, uses_megatron=place.startswith(_WITH_MEGATRON))(*arguments)
    except HarnessError as error:  # one line for the log
        print_text(f"{type(error).__name__}: {error.what} (where: {error.where}; fix: {error.fix})", file=sys.stderr)
        sys.exit(1)
    if os.environ.get("RANK", "0") == "0":
        Path(made).write_text(json.dumps(result))


if __name__ == "__main__":
    _call(*sys.argv[1:])
