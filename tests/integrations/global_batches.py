"""The global batches of integrations compared with the loader's own, through a resume on other ranks.

    python -m tests.integrations.global_batches FOLDER [NAME]...

Without names all are read that have a probe; the other trainers have tests of their own in this folder. The report is
written to FOLDER, beside the data; the exit code is 1 on any difference.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from harness.recipes.parity import make_dataset
from rich.console import Console

from harness.errors import ConfigError, exit_on_error
from harness.formats import open_dataset
from harness.integrations import INTEGRATIONS, RankStream, missing_packages
from harness.loader import LoaderConfig
from harness.parity import ParityReport, command_line
from harness.parity.assemble import environment
from harness.parity.pages import publish
from harness.parity.result import CellResult, Check, Difference
from harness.parity.running import last_words, rank_environment
from harness.schedule import ScheduleConfig
from tests.integrations.probes import PROBES, ProbeJob, content_digest, trained_part

CHECK = "integrations"
PROGRAM = Path(__file__).with_name("probes.py")
SCHEDULES = ("as_packed", "dp_balanced")
# Packs of a global batch: 40 or 160 packs leave a ragged end of an epoch.
_BATCH_SIZE = 12


@dataclass(frozen=True)
class Split:
    """Ranks of a job, and loader workers of each."""

    ranks: int
    workers: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks with {self.workers} workers"


BEFORE, AFTER = Split(2, 1), Split(3, 0)


def compare_integrations(
    names: Sequence[str], dataset: str, folder: Path, *, steps: int, timeout_s: float
) -> Iterator[CellResult]:
    """Read a dataset through each integration, and yield its comparison with the loader.

    Each is read by BEFORE to the middle, and from its own checkpoint by AFTER to the end. Digests of what a model is
    given, and the positions, are compared with those of one loader on one rank that never stopped. Labels count where
    they are trained: some trainers replace the others.

    Args:
        names: keys of PROBES.
        dataset: path of a dataset.
        folder: for jobs and logs.
        steps: optimizer steps, half of them before the resume.
        timeout_s: time limit of a job.
    """
    references = {schedule: _reference(dataset, schedule, steps=steps) for schedule in SCHEDULES}
    for name in names:
        if missing := missing_packages(name):
            reason = f"{' and '.join(missing)} not installed: {INTEGRATIONS[name].install}"
            yield CellResult(f"{CHECK}: {name}", CHECK, {"integration": name}, None, "skipped", "", reason=reason)
            continue
        for schedule in SCHEDULES:
            yield _compare(name, schedule, dataset, folder, references[schedule], timeout_s=timeout_s)


def _loader(workers: int) -> dict[str, Any]:
    return {"global_batch_size": _BATCH_SIZE, "seed": 5, "block_packs": 4, "num_workers": workers}


def _schedule(name: str, dataset: str) -> dict[str, Any]:
    # The largest pack fits a row, and dp_balanced makes several rows of a global batch.
    return {"name": name, "max_tokens_per_rank": open_dataset(dataset).pack_size}


def _reference(dataset: str, schedule: str, *, steps: int) -> tuple[list[str], list[dict[str, Any]]]:
    config = ScheduleConfig(**_schedule(schedule, dataset))
    digests, positions = [], []
    with RankStream(dataset, LoaderConfig(**_loader(0)), schedule=config) as stream:
        for batch in islice(stream, steps):
            digests.append(content_digest([trained_part(row) for row in batch.rows]))
            positions.append(asdict(batch.state))
    return digests, positions


def _compare(
    name: str,
    schedule: str,
    dataset: str,
    folder: Path,
    reference: tuple[list[str], list[dict[str, Any]]],
    *,
    timeout_s: float,
) -> CellResult:
    digests, positions = reference
    place = folder / CHECK / f"{name}-{schedule}"
    shutil.rmtree(place, ignore_errors=True)
    (place / "trainer").mkdir(parents=True)
    began, reason, difference = time.monotonic(), "", None
    middle = len(digests) // 2
    settings = _schedule(schedule, dataset)
    job = ProbeJob(name, dataset, {}, settings, first_step=0, last_step=middle, folder=str(place / "trainer"))
    commands = []
    for split, first, last in ((BEFORE, 0, middle), (AFTER, middle, len(digests))):
        job = replace(job, first_step=first, last_step=last, loader=_loader(split.workers))
        command, ranks, reason = _run(job, split, place / f"to-{last}", timeout_s)
        commands.append(command)
        difference = None if reason else find_difference(job, split, ranks, digests, positions)
        if reason or difference is not None:
            break
        job = replace(job, position=ranks[0]["position"])
    data = Check("data", difference is None, 0.0, None, "digests are equal or not", difference)
    return CellResult(
        f"{CHECK}: {name} {schedule}",
        CHECK,
        {"integration": name, "schedule": schedule, "ranks": f"{BEFORE.ranks} then {AFTER.ranks}"},
        None,
        "failed" if reason else "same" if data.passed else "different",
        " && ".join(commands),
        checks=[] if reason else [data],
        reason=reason,
        seconds=time.monotonic() - began,
    )


def _run(job: ProbeJob, split: Split, place: Path, timeout_s: float) -> tuple[str, list[dict[str, Any]], str]:
    place.mkdir()
    listed = place / "job.json"
    values = asdict(job)
    del values["rank"], values["world_size"]
    listed.write_text(json.dumps(values))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={split.ranks}"]
    command = [sys.executable, *launcher, str(PROGRAM), str(listed)]
    with (place / "log.txt").open("w") as log:
        process = subprocess.Popen(command, env=rank_environment(), stdout=log, stderr=log, start_new_session=True)
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.terminate()  # the launcher ends its ranks, which are in sessions of their own
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code != 0:
        words = f"ended after {timeout_s:g} s" if code is None else last_words(place / "log.txt", code)
        return shlex.join(command), [], f"{split}: {words}"
    ranks = [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(split.ranks)]
    return shlex.join(command), ranks, ""


def find_difference(
    job: ProbeJob, split: Split, ranks: list[dict[str, Any]], digests: list[str], positions: list[dict[str, Any]]
) -> Difference | None:
    for rank, record in enumerate(ranks):
        if len(record["steps"]) != job.num_steps:
            what = f"{split}: rank {rank} made {len(record['steps'])} steps, not {job.num_steps}"
            return Difference(what, rank=rank, field="steps", expected=job.num_steps, found=len(record["steps"]))
    for index in range(job.num_steps):
        step = job.first_step + index + 1
        tables = [np.asarray(table, np.uint64) for record in ranks for table in record["steps"][index]]
        found, expected = content_digest(tables), digests[step - 1]
        if found != expected:
            what = f"{split}: the global batch of step {step} is {found}, not {expected}"
            return Difference(what, step=step, field="tokens", expected=expected, found=found)
    for rank, record in enumerate(ranks):
        wanted = positions[job.last_step - 1]
        if record["position"] != wanted:
            what = f"{split}: rank {rank} is at {record['position']}, not {wanted}"
            return Difference(what, step=job.last_step, rank=rank, field="position")
    return None


def main(folder: Path, *named: str, steps: int = 20, timeout_s: float = 900.0) -> None:
    """Compare the integrations of these names, print and write the report, and exit with its code."""
    with exit_on_error():
        dataset = make_dataset(folder.resolve() / "data" / "made") / "train"
        if unknown := set(named) - set(PROBES):
            fix = f"one or more of {', '.join(PROBES)}"
            raise ConfigError(f"no probe reads {' and '.join(sorted(unknown))}", where="NAME", fix=fix)
        results = list(
            compare_integrations(named or list(PROBES), str(dataset), folder, steps=steps, timeout_s=timeout_s)
        )
        created = datetime.now(UTC).isoformat(timespec="seconds")
        report = ParityReport("Parity: integrations", created, command_line(), environment("cpu"), results)
        publish(report, Console(width=200), folder)
        sys.exit(0 if report.verdict == "same" else 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
