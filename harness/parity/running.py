"""Runs the cells of a matrix, side by side where there are cores; a cell that is finished is not run again."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

import harness
from harness.errors import ConfigError, FormatError
from harness.parity.cells import Cell
from harness.parity.processes import Batch, log_file, run_folder
from harness.storage import Marker
from harness.train import METRICS_FILE, whole_lines

_DONE = "cell.json"
_POLL_S, _MEASURE_S = 0.25, 1.0
# What the harness says of itself, or the last line of a traceback, which torch prefixes with the rank.
_ERROR = re.compile(r"(?:\[?rank ?\d+\]?: ?)?([\w.]*(?:Error|Exception)\b.*)")


@dataclass(frozen=True)
class Finished:
    """What is known of a cell that ran.

    Attributes:
        fingerprint: of all that it depended on.
        reason: why it failed, empty where it made every step.
        seconds: wall time; of cells that share processes, the first one's includes the start.
        peak_memory_bytes: None where it was over before it was measured.
        was_kept: it ran in an earlier try.
    """

    fingerprint: str
    reason: str
    seconds: float
    peak_memory_bytes: int | None
    was_kept: bool = False


@dataclass
class Progress:
    """What a watcher is told: steps made by each running cell, and what is finished."""

    steps: dict[str, int]
    finished: dict[str, Finished]


def run_cells(
    cells: Sequence[Cell], folder: Path, *, slots: int, timeout_s: float, watch: Callable[[Progress], None]
) -> dict[str, Finished]:
    """Run all of `cells` that are not finished already.

    Args:
        folder: keeps the runs as `cells/<name>/run`; those of another try whose settings, data and code are today's
            are kept.
        slots: ranks that run at one time; a cell of more runs alone.
        timeout_s: that a cell may take.
        watch: called a few times a second.

    Returns:
        by name, one for every cell.

    Raises:
        ConfigError: another process works in `folder`.
    """
    with _locked(folder):
        known = {cell.name: cell for cell in cells}
        prints = fingerprints(cells)
        progress = Progress({}, {})
        for cell in cells:
            kept = _read_finished(folder, cell, prints[cell.name])
            if kept is not None:
                progress.finished[cell.name] = kept
        waiting = [batch for batch in _batches(cells) if any(cell.name not in progress.finished for cell in batch)]
        waiting = [[cell for cell in batch if cell.name not in progress.finished] for batch in waiting]
        running: list[Batch] = []
        try:
            while waiting or running:
                _start_what_fits(waiting, running, folder, slots, known, progress)
                for batch in list(running):
                    if _look_at(batch, folder, prints, progress, timeout_s):
                        running.remove(batch)
                        rest = [cell for cell in batch.cells if cell.name not in progress.finished]
                        if rest:  # those behind one that failed in the same processes
                            waiting.insert(0, rest)
                watch(progress)
                time.sleep(_POLL_S if running else 0)
        finally:
            for batch in running:
                batch.end()
        return progress.finished


def fingerprints(cells: Sequence[Cell]) -> dict[str, str]:
    """By name, a digest of what a cell depends on: settings, interpreter, the code, its dataset's files, its start."""
    code = _files_digest(Path(harness.__file__).parent.parent, ("harness/**/*.py", "recipes/*.py", "configs/**/*.yaml"))
    data: dict[str, str] = {}
    found: dict[str, str] = {}
    for cell in cells:  # what a cell starts from comes before it
        if cell.dataset not in data:
            data[cell.dataset] = _stat_digest(cell.dataset)
        settled = asdict(cell) | {"plan": None, "is_told": None}
        told = json.dumps([settled, code, data[cell.dataset], found.get(cell.start or "")], sort_keys=True)
        found[cell.name] = str(xxhash.xxh3_128_hexdigest(told.encode()))
    return found


def _files_digest(root: Path, patterns: Sequence[str]) -> str:
    total = xxhash.xxh3_128()
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        total.update(path.read_bytes())
    return str(total.hexdigest())


def _stat_digest(dataset: str) -> str:
    """Of names, sizes and times: enough to see that a file was replaced. Datasets behind a URI count as unchanged."""
    path = Path(dataset)
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    told = [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in files if one.exists()]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(told).encode()))


def _batches(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    shared: dict[tuple[str, int, str, bool], list[Cell]] = {}
    for cell in cells:
        if cell.plan.shares_processes and cell.is_told:
            shared.setdefault((cell.check, cell.case.ranks, cell.python, cell.is_told), []).append(cell)
    for cell in cells:
        if not cell.plan.shares_processes or not cell.is_told:
            yield [cell]
    yield from shared.values()


def _start_what_fits(
    waiting: list[list[Cell]],
    running: list[Batch],
    folder: Path,
    slots: int,
    known: dict[str, Cell],
    progress: Progress,
) -> None:
    for cells in list(waiting):
        starts = {cell.start: known[cell.start] for cell in cells if cell.start}
        if any(name not in progress.finished for name in starts):
            continue
        failed = next((name for name in starts if progress.finished[name].reason), None)
        if failed is not None:
            waiting.remove(cells)
            for cell in cells:
                progress.finished[cell.name] = Finished("", f"{failed}: {progress.finished[failed].reason}", 0.0, None)
            continue
        taken = sum(batch.ranks for batch in running)
        if running and taken + cells[0].case.ranks > slots:
            continue
        waiting.remove(cells)
        for cell in cells:
            shutil.rmtree(run_folder(folder, cell).parent, ignore_errors=True)
            run_folder(folder, cell).parent.mkdir(parents=True)
            progress.steps[cell.name] = 0
        running.append(Batch(folder, cells, starts))


def _look_at(batch: Batch, folder: Path, prints: dict[str, str], progress: Progress, timeout_s: float) -> bool:
    """Note what the batch has done; whether it is over."""
    now = time.monotonic()
    # The kernel walks every page for it: a twentieth of the time at most.
    if now - batch.measured >= max(_MEASURE_S, 20 * batch.measuring_s):
        batch.measure()
    code = batch.poll()
    late = now - batch.began > timeout_s
    if late:
        batch.end()
    over = late or code is not None
    open_cells = [cell for cell in batch.cells if cell.name not in progress.finished]
    for place, cell in enumerate(open_cells):
        made = batch.steps_made(cell)
        progress.steps[cell.name] = made
        follows = place + 1 < len(open_cells)
        # A run is over when the next one of its processes has begun; the last one when these end well.
        done = made == cell.steps and (
            batch.steps_made(open_cells[place + 1]) > 0 or (over and not late) if follows else code == 0
        )
        reason = ""
        if not done and over:
            reason = f"ended after {timeout_s:g} s" if late else _last_words(log_file(folder, batch.cells[0]), code)
        if not done and not over:
            break
        finished = Finished(prints[cell.name], reason, now - batch.began, batch.peak_memory_bytes or None)
        batch.began, batch.peak_memory_bytes = now, 0
        progress.finished[cell.name] = finished
        progress.steps.pop(cell.name, None)
        if reason:
            break
        (run_folder(folder, cell).parent / _DONE).write_text(json.dumps(asdict(finished)))
    return over


def _last_words(log: Path, code: int | None) -> str:
    """What a run said when it failed: the harness's own error, or the end of its log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    for at, line in enumerate(lines):
        if said := _ERROR.match(line):
            told = [said[1].strip(), *(one.strip() for one in lines[at + 1 : at + 3] if one.startswith("  "))]
            return "; ".join(told) + f" (log: {log})"
    ending = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return f"{ending}: {' '.join(lines[-1:]).strip() or 'nothing was said'} (log: {log})"


def _read_finished(folder: Path, cell: Cell, fingerprint: str) -> Finished | None:
    """The cell of an earlier try, where it ran to its end on what is there today."""
    run = run_folder(folder, cell)
    try:
        values = json.loads((run.parent / _DONE).read_text())
        found = Finished(**{**values, "was_kept": True})
        made = sum(1 for _ in whole_lines(run / METRICS_FILE))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.fingerprint == fingerprint and not found.reason and made == cell.steps else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    running = Marker(folder / ".lock")
    try:
        running.acquire()
    except FormatError:
        raise ConfigError(
            "another parity run works in this folder", where=str(folder), fix="wait for it, or name another folder"
        ) from None
    try:
        yield
    finally:
        running.release(remove=True)


def default_slots() -> int:
    """Ranks that this machine runs side by side: its cores."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
