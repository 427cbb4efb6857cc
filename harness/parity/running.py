"""Run the cells of a matrix in separate processes, concurrently if there are enough cores; keep finished cells."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from glob import glob
from pathlib import Path

import xxhash
from rich.console import Console

import harness
from harness.errors import ConfigError, FormatError, installed_versions, os_errors_as
from harness.launch.local import end_with_parent
from harness.launch.preflight.probe import code_digest
from harness.parity.cells import Cell
from harness.printing import indented, one_line, redact
from harness.settings import CONFIGS, load
from harness.storage import Marker

_ROOT = Path(harness.__file__).resolve().parent.parent
_DONE = "cell.json"
# Packages of this interpreter whose versions can change losses.
PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy", "pyarrow")
_POLL_S, _MEASURE_S = 0.25, 1.0
# Below the ports that Linux assigns to outgoing connections.
_PORTS = range(20000, 32768)
# Variables of a launcher, with which a run that is started inside a job would become part of the job.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
# An error of the harness, or the last line of a traceback, which torch prefixes with the rank.
_ERROR = re.compile(r"(?:\[?rank ?\d+\]?: ?)?([\w.]*(?:Error|Exception)\b.*)")


@dataclass(frozen=True)
class Finished:
    """Outcome of a cell.

    Attributes:
        reason: reason of its failure; empty if it completed all steps.
        seconds: wall time; of cells that share processes, the first one includes the startup.
        peak_memory_bytes: peak memory of the fullest rank; None if it ended before a measurement.
    """

    fingerprint: str
    reason: str
    seconds: float
    peak_memory_bytes: int | None
    was_kept: bool = False


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    *,
    slots: int,
    timeout_s: float,
    watch: Callable[[dict[str, Finished]], None],
    fresh: bool = False,
) -> dict[str, Finished]:
    """Run all cells that are not finished yet; return the outcome of every cell by name.

    Args:
        folder: contains the runs as `cells/<name>/run`; runs of an earlier attempt are kept if their settings, data and
            code are unchanged. Raises ConfigError if another process uses it.
        slots: number of ranks that run at the same time; a cell with more ranks runs alone.
        watch: called a few times per second with the outcomes so far.
        fresh: also run finished cells again.
    """
    with _lock(folder):
        if fresh:
            shutil.rmtree(folder / "cells", ignore_errors=True)
        prints = fingerprints(cells)
        kept = {cell.name: _read_finished(folder, cell, prints[cell.name]) for cell in cells}
        finished = {name: outcome for name, outcome in kept.items() if outcome is not None}
        batches = [[cell for cell in batch if cell.name not in finished] for batch in _batches(cells)]
        waiting = list(filter(None, batches))
        running: list[CellBatch] = []
        try:
            while waiting or running:
                for batch in list(waiting):
                    starts = [cell.start for cell in batch if cell.start is not None]
                    taken = sum(other.ranks for other in running)
                    if any(name not in finished for name in starts):
                        continue
                    failed = next((name for name in starts if finished[name].reason), None)
                    if failed is None and running and taken + batch[0].case.ranks > slots:
                        continue
                    waiting.remove(batch)
                    if failed is None:
                        running.append(CellBatch(folder, batch))
                        continue
                    reason = f"{failed}: {finished[failed].reason}"
                    finished |= {cell.name: Finished("", reason, 0.0, None) for cell in batch}
                for job in list(running):
                    if job.update(prints, finished, timeout_s):
                        running.remove(job)
                        # Cells that were to follow a failed one in the same processes come next.
                        left = [cell for cell in job.cells if cell.name not in finished]
                        waiting[:0] = [left] if left else []
                watch(finished)
                time.sleep(_POLL_S if running else 0)
        finally:
            for job in running:
                end_job(job.process)
        return finished


def fingerprints(cells: Sequence[Cell]) -> dict[str, str]:
    """Return, by name, a digest of a cell's settings, interpreter, code, packages, dataset files and start cell."""
    code = [code_digest(), installed_versions(PACKAGES)]
    data: dict[str, str] = {}
    digests: dict[str, str] = {}
    for cell in cells:  # the cell that others start from comes first
        if cell.dataset not in data:
            # Replaced files are detected by name, size and time. A dataset at a URI counts as unchanged.
            path = Path(cell.dataset)
            # A dataset can be specified by a pattern, or by the common prefix of its files' names.
            named = {path, *map(Path, glob(f"{cell.dataset}*", recursive=True))}  # noqa: PTH207 - not below a folder
            files: Iterable[Path] = path.rglob("*") if path.is_dir() else named
            found = sorted(file for file in files if file.is_file())
            stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in found]
            data[cell.dataset] = str(xxhash.xxh3_128_hexdigest(json.dumps(stats).encode()))
        values = asdict(cell) | {"plan": None, "is_reported": None}
        text = json.dumps([values, code, data[cell.dataset], digests.get(cell.start or "")], sort_keys=True)
        digests[cell.name] = str(xxhash.xxh3_128_hexdigest(text.encode()))
    return digests


def _batches(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield the cells that run alone, then groups with one check, program, rank count and interpreter."""
    shared: dict[tuple[str, str, int, str], list[Cell]] = {}
    for cell in cells:
        if cell.plan.shares_processes and cell.is_reported:
            key = cell.check.split()[0], cell.plan.program, cell.case.ranks, cell.python
            shared.setdefault(key, []).append(cell)
        else:
            yield [cell]
    yield from shared.values()


def last_words(log: Path, code: int | None) -> str:
    """Return the error that a failed run printed, or the end of its log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    for at, line in enumerate(lines):
        if match := _ERROR.match(line):
            error = [match[1].strip(), *(more.strip() for more in lines[at + 1 : at + 3] if more.startswith("  "))]
            return f"{redact('; '.join(error))} (log: {log})"
    ending = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return f"{ending}: {redact(' '.join(lines[-1:]).strip()) or 'no output'} (log: {log})"


def _read_finished(folder: Path, cell: Cell, fingerprint: str) -> Finished | None:
    """Return the outcome of an earlier attempt if it completed with the current settings, data and code."""
    done = cell.folder(folder) / _DONE
    with suppress(OSError, FormatError):
        finished = replace(load(Finished, done.read_bytes(), where=done), was_kept=True)
        is_whole = finished.fingerprint == fingerprint and not finished.reason
        return finished if is_whole and cell.steps_made(folder) == cell.steps else None
    return None


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    marker = Marker(folder / ".lock")
    try:
        marker.acquire()
    except FormatError:
        what = f"another parity run is using this folder: {marker.holder}"
        raise ConfigError(what, where=str(folder), fix="wait for it, or choose another folder") from None
    try:
        yield
    finally:
        marker.release(remove=True)


class CellBatch:
    """Cells with the same number of ranks that run one after another in the same processes; usually one cell."""

    def __init__(self, folder: Path, cells: Sequence[Cell]) -> None:
        self.cells, self.ranks, self._folder = cells, cells[0].case.ranks, folder
        self._log = cells[0].log_file(folder)
        self._began = self._measured = time.monotonic()
        self._measuring_s, self._peak_bytes = 0.0, 0
        runs = []
        for port, cell in zip(free_ports(len(cells)), cells, strict=True):
            shutil.rmtree(cell.folder(folder), ignore_errors=True)
            cell.folder(folder).mkdir(parents=True)
            start = cell.start_folder(folder)
            runs.append([port, cell.overrides, str(cell.run_folder(folder)), start and str(start)])
        listed = cells[0].folder(folder) / "runs.json"
        listed.write_text(json.dumps({"program": cells[0].plan.program, "runs": runs}))
        command = [*cells[0].launcher, "-m", "harness.recipes.sft_runs", str(listed)]
        fix = "set `versions` to the Python of a virtual environment"
        what = f"the interpreter of {cells[0].name} cannot be started"
        with os_errors_as(ConfigError, what, where=cells[0].python, fix=fix):
            self.process = start_job(command, self._log)

    def update(self, prints: dict[str, str], finished: dict[str, Finished], timeout_s: float) -> bool:
        """Add the outcomes of cells that have ended to `finished`; return True if the processes have ended."""
        now = time.monotonic()
        # The kernel walks every page for a measurement, so it gets at most a twentieth of the time.
        if now - self._measured >= max(_MEASURE_S, 20 * self._measuring_s):
            self._measure()
        code, late = self.process.poll(), now - self._began > timeout_s
        if late:
            end_job(self.process)
        over = late or code is not None
        left = [cell for cell in self.cells if cell.name not in finished]
        for cell, following in zip(left, [*left[1:], None], strict=True):
            # A run has ended when the next run of its processes has begun, and the last run when they exit with 0.
            ended = code == 0 if following is None else over and not late
            ended |= following is not None and following.steps_made(self._folder) > 0
            done = ended and cell.steps_made(self._folder) == cell.steps
            if not done and not over:
                break
            reason = "" if done else f"ended after {timeout_s:g} s" if late else last_words(self._log, code)
            outcome = Finished(prints[cell.name], reason, now - self._began, self._peak_bytes or None)
            self._began, self._peak_bytes = now, 0
            finished[cell.name] = outcome
            if reason:
                break
            (cell.folder(self._folder) / _DONE).write_text(json.dumps(asdict(outcome)))
        return over

    def _measure(self) -> None:
        """Measure the memory of the fullest rank with its workers; pages that processes share count once."""
        import psutil

        self._measured = time.monotonic()
        with suppress(psutil.Error, OSError):
            top = psutil.Process(self.process.pid)
            for rank in [top] if self.ranks == 1 else top.children():
                total = 0
                for process in [rank, *rank.children(recursive=True)]:
                    with suppress(psutil.Error, OSError, AttributeError):
                        total += int(process.memory_full_info().pss)
                self._peak_bytes = max(self._peak_bytes, total)
        self._measuring_s = time.monotonic() - self._measured


def rank_environment() -> dict[str, str]:
    """Return the environment of a job's processes: this checkout's code, one thread, and no launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    # Every interpreter runs the code of this checkout. If this package is installed, each interpreter uses its own,
    # because the folder of the installed package contains other packages too.
    is_checkout = CONFIGS.parent == _ROOT
    paths = [str(_ROOT)] * is_checkout + list(filter(None, [os.environ.get("PYTHONPATH")]))
    # One thread per rank: more would compete for the cores, and sum in a different order on another machine.
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": os.pathsep.join(paths)}


def start_job(
    command: Sequence[str], log: Path, *, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program or a launcher of ranks with its output appended to a log; it ends if this process is killed."""
    with log.open("a") as file:
        return subprocess.Popen(
            command,
            env=environment or rank_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            # No process is left that could disturb a second attempt. Safe here: this process has no other threads.
            preexec_fn=end_with_parent(),  # noqa: PLW1509
        )


def end_job(process: subprocess.Popen[bytes]) -> None:
    """Kill a job and all processes that it started; torchrun puts its ranks into separate sessions."""
    import psutil

    with suppress(psutil.Error):
        top = psutil.Process(process.pid)
        for one in [top, *top.children(recursive=True)]:
            with suppress(psutil.Error):
                one.kill()
    process.wait()


def free_ports(count: int) -> list[int]:
    """Return free ports for the rendezvous of ranks, which the kernel does not assign to outgoing connections."""
    with ExitStack() as stack:
        ports: list[int] = []
        # Not from the shared generator: programs with the same seed would choose the same ports.
        candidates = iter(random.SystemRandom().sample(_PORTS, len(_PORTS)))
        while len(ports) < count:
            listener = stack.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("127.0.0.1", port := next(candidates)))
                ports.append(port)
        return ports


def log_cells(console: Console) -> Callable[[dict[str, Finished]], None]:
    """Return a function that takes the outcomes so far, and prints a line for each new one."""
    printed: set[str] = set()

    def log(finished: dict[str, Finished]) -> None:
        for name in [name for name in finished if name not in printed]:
            outcome = finished[name]
            printed.add(name)
            took = "reused" if outcome.was_kept else f"{outcome.seconds:.0f} s"
            console.print(indented(f"{one_line(name)}: {outcome.reason or took}"), soft_wrap=True)

    return log
