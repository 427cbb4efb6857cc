"""The global batches of every integration compared with the loader's own, through a resume on other ranks.

    python -m tests.integrations.global_batches FOLDER [NAME | NAME=PYTHON]...

A trainer in another environment is named with its python; without names all are read. The report is written to FOLDER,
beside the data; the exit code is 1 on any difference.
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
from collections.abc import Iterator, Mapping, Sequence
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
from harness.train.digests import content_digest
from tests.integrations.probes import PROBES, ProbeJob, trained_part

CHECK = "integrations"
PROGRAM = Path(__file__).with_name("probes.py")
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


@dataclass(frozen=True)
class IntegrationCase:
    """One integration with one schedule.

    Attributes:
        integration: a key of PROBES.
        schedule: its name.
        python: interpreter of an environment that has the trainer.
    """

    integration: str
    schedule: str
    python: str

    @property
    def name(self) -> str:
        return f"{CHECK}: {self.integration} {self.schedule}"


def parse_integrations(texts: Sequence[str]) -> dict[str, str]:
    """Parse `NAME` and `NAME=PATH`; all integrations for none.

    Returns:
        the interpreter of each integration.

    Raises:
        ConfigError: there is no such integration.
    """
    pythons = {}
    for text in texts or list(INTEGRATIONS):
        name, _, python = text.partition("=")
        if name not in INTEGRATIONS:
            raise ConfigError(
                f"there is no integration {name!r}",
                where="integrations",
                fix=f"one or more of {', '.join(INTEGRATIONS)}, each as NAME or NAME=PATH",
            )
        pythons[name] = python or sys.executable
    return pythons


def compare_integrations(
    pythons: Mapping[str, str], dataset: str, folder: Path, *, steps: int, timeout_s: float
) -> Iterator[CellResult]:
    """Read a dataset through each integration, and yield its comparison with the loader.

    Each is read by BEFORE to the middle, and from its own checkpoint by AFTER to the end. Digests of what a model is
    given, and the positions, are compared with those of one loader on one rank that never stopped. Labels count where
    they are trained: some trainers replace the others.

    Args:
        pythons: interpreter of each integration.
        dataset: path of a dataset.
        folder: for jobs and logs.
        steps: optimizer steps, half of them before the resume.
        timeout_s: time limit of a job.
    """
    references: dict[str, tuple[list[str], list[dict[str, Any]]]] = {}
    for name, python in pythons.items():
        missing = _missing(name, python)
        if missing or name not in PROBES:
            reason = f"{' and '.join(missing)} not installed: {INTEGRATIONS[name].install}"
            if not missing:
                reason = "no probe reads it: see its own tests"
            yield CellResult(f"{CHECK}: {name}", CHECK, {"integration": name}, None, "skipped", "", reason=reason)
            continue
        for schedule in PROBES[name].schedules:
            if schedule not in references:
                references[schedule] = _reference(dataset, schedule, steps=steps)
            case = IntegrationCase(name, schedule, python)
            yield _compare(case, dataset, folder, references[schedule], timeout_s=timeout_s)


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
    case: IntegrationCase,
    dataset: str,
    folder: Path,
    reference: tuple[list[str], list[dict[str, Any]]],
    *,
    timeout_s: float,
) -> CellResult:
    digests, positions = reference
    place = folder / CHECK / f"{case.integration}-{case.schedule}"
    shutil.rmtree(place, ignore_errors=True)
    (place / "trainer").mkdir(parents=True)
    began, reason, difference = time.monotonic(), "", None
    middle = len(digests) // 2
    job = ProbeJob(
        case.integration,
        dataset,
        {},
        _schedule(case.schedule, dataset),
        first_step=0,
        last_step=middle,
        folder=str(place / "trainer"),
    )
    commands = []
    for split, first, last in ((BEFORE, 0, middle), (AFTER, middle, len(digests))):
        job = replace(job, first_step=first, last_step=last, loader=_loader(split.workers))
        command, ranks, reason = _run(case, job, split, place / f"to-{last}", timeout_s)
        commands.append(command)
        difference = None if reason else find_difference(job, split, ranks, digests, positions)
        if reason or difference is not None:
            break
        job = replace(job, position=ranks[0]["position"])
    data = Check("data", difference is None, 0.0, None, "digests are equal or not", difference)
    return CellResult(
        case.name,
        CHECK,
        {"integration": case.integration, "schedule": case.schedule, "ranks": f"{BEFORE.ranks} then {AFTER.ranks}"},
        None,
        "failed" if reason else "same" if data.passed else "different",
        " && ".join(commands),
        checks=[] if reason else [data],
        reason=reason,
        seconds=time.monotonic() - began,
    )


def _run(
    case: IntegrationCase, job: ProbeJob, split: Split, place: Path, timeout_s: float
) -> tuple[str, list[dict[str, Any]], str]:
    place.mkdir()
    listed = place / "job.json"
    values = asdict(job)
    del values["rank"], values["world_size"]
    listed.write_text(json.dumps(values))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={split.ranks}"]
    command = [case.python, *launcher, str(PROGRAM), str(listed)]
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


def _missing(name: str, python: str) -> list[str]:
    beside = PROBES[name].packages if name in PROBES else ()
    if python == sys.executable:
        return missing_packages(name, beside=beside)
    call = f"missing_packages({name!r}, beside={beside!r})"
    code = f"import json; from harness.integrations import missing_packages; print(json.dumps({call}))"
    try:
        done = subprocess.run(
            [python, "-c", code], env=rank_environment(), capture_output=True, text=True, check=True, timeout=120
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"the interpreter of {name} cannot be used: {error}",
            where=f"integrations, {name}={python}",
            fix="name the python of an environment with the trainer and the packages of this project",
        ) from None
    missing: list[str] = json.loads(done.stdout)
    return missing


def main(folder: Path, *named: str, steps: int = 20, timeout_s: float = 900.0) -> None:
    """Compare the integrations of these names, print and write the report, and exit with its code."""
    with exit_on_error():
        dataset = make_dataset(folder.resolve() / "data" / "made") / "train"
        pythons = parse_integrations(named)
        results = list(compare_integrations(pythons, str(dataset), folder, steps=steps, timeout_s=timeout_s))
        created = datetime.now(UTC).isoformat(timespec="seconds")
        report = ParityReport("Parity: integrations", created, command_line(), environment("cpu"), results)
        publish(report, Console(width=200), folder)
        sys.exit(0 if report.verdict == "same" else 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
