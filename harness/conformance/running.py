"""Run the checks on a trainer in processes of its own environment, and collect the verdicts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.conformance.kit import CHECKS, ERROR, FAIL, NOT_SUPPORTED, PASS, ConformanceCheck
from harness.errors import ConfigError

# A rank that fails ends others, whose errors say less.
_WORST_FIRST = (FAIL, ERROR, NOT_SUPPORTED, PASS)
_LOG_LINES = 3
_PATIENCE_S = 20.0
# Imports of a trainer on a busy machine.
_START_S = 900.0


@dataclass(frozen=True)
class ConformanceVerdict:
    """The answer of a trainer to one check.

    Attributes:
        outcome: PASS, FAIL, NOT SUPPORTED, or ERROR where the trainer raised or ended.
        text: what was seen, with figures.
    """

    check: str
    outcome: str
    text: str
    seconds: float = 0.0


@dataclass(frozen=True)
class TargetProcess:
    """A trainer, its interpreter, and the folder for logs and files.

    Attributes:
        target: `FILE.py[:CLASS]` or `MODULE:CLASS`; empty for `command`.
        command: see `CommandTarget`.
        python: the interpreter of the trainer's environment, which needs numpy and PyTorch.
        limit_s: the longest that one check may take.
    """

    target: str
    folder: Path
    command: str = ""
    python: str = sys.executable
    limit_s: float = 300.0

    def run(self, names: Sequence[str], report: Callable[[ConformanceVerdict], None]) -> list[ConformanceVerdict]:
        """Run checks, and report each verdict; a process that dies or hangs fails one check and is started again.

        Raise ConfigError if the target cannot be loaded, or there is no such check.
        """
        if unknown := [name for name in names if name not in CHECKS]:
            fix = f"choose from {', '.join(CHECKS)}"
            raise ConfigError(f"there is no check {unknown[0]!r}", where="--checks", fix=fix)
        wanted = {*names, *(CHECKS[name].after for name in names)}
        names = [name for name in CHECKS if name in wanted]
        verdicts: list[ConformanceVerdict] = []
        jobs = {name: _job_of(CHECKS[name]) for name in names}
        for job in sorted(set(jobs.values())):
            # A command starts its own ranks.
            ranks = 1 if self.command else -job[1]
            left = [name for name in names if jobs[name] == job]
            while left:
                place = self.folder / f"job-{len(list(self.folder.glob('job-*'))):02d}"
                new = self._run_job(left, ranks, place, report)
                left = left[len(new) :]
                verdicts += new
        return sorted(verdicts, key=lambda verdict: list(CHECKS).index(verdict.check))

    def versions(self) -> dict[str, str]:
        """Return `name` and `version` of the target after a run, by its own words."""
        found = sorted(self.folder.glob("job-*/target.json"))
        values: dict[str, str] = json.loads(found[-1].read_text()) if found else {}
        return values

    def _run_job(
        self, names: list[str], ranks: int, folder: Path, report: Callable[[ConformanceVerdict], None]
    ) -> list[ConformanceVerdict]:
        # Of the packages beside this one, the trainer must not get any.
        (folder / "path").mkdir(parents=True)
        (folder / "path/harness").symlink_to(Path(__file__).parents[1])
        settings = {"target": self.target, "command": self.command, "checks": names, "folder": str(folder.resolve())}
        (folder / "settings.json").write_text(json.dumps(settings))
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        module = ["-m", "harness.conformance.command", str((folder / "settings.json").resolve())]
        path = os.pathsep.join(filter(None, (str(folder.resolve() / "path"), os.environ.get("PYTHONPATH"))))
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": path}
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                [self.python, *launch, *module], env=environment, stdout=log, stderr=log, start_new_session=True
            )
            code, reported = self._wait(process, folder, ranks, report)
        if (refused := folder / "refused.json").exists():
            what, where, fix = json.loads(refused.read_text())
            raise ConfigError(what, where=where, fix=fix)
        verdicts = _joined(folder, ranks, is_over=True)
        if ranks > 1:  # the others may have begun a check after the one that ended the job, which is run again
            last = next((number for number, one in enumerate(verdicts) if one.outcome in (ERROR, FAIL)), len(verdicts))
            verdicts = verdicts[: last + 1]
        # A job of several ranks ends itself after an error or a failure.
        if not verdicts or (len(verdicts) < len(names) and verdicts[-1].outcome not in (ERROR, FAIL)):
            words = " | ".join((folder / "log.txt").read_text(errors="replace").strip().splitlines()[-_LOG_LINES:])
            is_loaded = (folder / "target.json").exists()
            limit_s = self.limit_s if is_loaded else _START_S
            how = f"no answer within {limit_s:.0f} s" if code is None else f"the process exited with code {code}"
            if not is_loaded:
                fix = "load it with that Python; --dir FOLDER keeps the log"
                raise ConfigError(f"the target did not start: {how}: {words[-400:]}", where=self.python, fix=fix)
            verdicts.append(ConformanceVerdict(names[len(verdicts)], ERROR, f"{how}: {words[-400:]}"))
        for verdict in verdicts[reported:]:
            report(verdict)
        return verdicts

    def _wait(
        self, process: subprocess.Popen[bytes], folder: Path, ranks: int, report: Callable[[ConformanceVerdict], None]
    ) -> tuple[int | None, int]:
        """Wait for the end of a job, None if a check takes too long; return also the number of reported verdicts."""
        done, began, limit_s = 0, time.monotonic(), _START_S
        try:
            while process.poll() is None:
                if limit_s != self.limit_s and (folder / "target.json").exists():
                    began, limit_s = time.monotonic(), self.limit_s
                verdicts = _joined(folder, ranks)
                for verdict in verdicts[done:]:
                    report(verdict)
                if len(verdicts) > done:
                    done, began = len(verdicts), time.monotonic()
                elif time.monotonic() - began > limit_s:
                    return None, done
                time.sleep(0.2)
            return process.returncode, done
        finally:
            # torchrun ends its ranks, which are in sessions of their own, where trainers leave processes.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
            for group in (process.pid, *(int(file.read_text() or process.pid) for file in folder.glob("group-*.txt"))):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            process.wait()


def _job_of(asked: ConformanceCheck) -> tuple[bool, int]:
    """Return the place of a check's job: two ranks come first, and last where they continue what one has saved."""
    return bool(asked.after) and asked.ranks > CHECKS[asked.after].ranks, -asked.ranks


def _joined(folder: Path, ranks: int, *, is_over: bool = False) -> list[ConformanceVerdict]:
    """Return the worst and earliest verdict of all ranks on each check; once a job is over, errors of missing ones."""
    by_check: dict[str, list[ConformanceVerdict]] = {}
    for file in sorted(folder.glob("verdicts-*.jsonl"), key=lambda file: file.stat().st_mtime_ns):
        for line in file.read_text().splitlines():
            verdict = ConformanceVerdict(**json.loads(line))
            by_check.setdefault(verdict.check, []).append(verdict)
    if is_over:
        for name in [name for name, given in by_check.items() if len(given) < ranks]:
            by_check[name].append(ConformanceVerdict(name, ERROR, "a rank exited without a result"))
    joined = [given for given in by_check.values() if len(given) >= ranks or is_over]
    return [min(given, key=lambda verdict: _WORST_FIRST.index(verdict.outcome)) for given in joined]
