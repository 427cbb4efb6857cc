"""Verification of a run's folder: its settings, the metrics of each step, checkpoints, and exported models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from harness.errors import CheckpointError, ConfigError, FormatError, Problem
from harness.settings import from_plain
from harness.storage import read_checksums
from harness.storage.checksums import CHECKSUMS_FILE, find_damage, list_size_problems
from harness.train.checkpoints import CHECKPOINTS, RUN_FILE, list_checkpoints, read_checkpoint, read_identity
from harness.train.digests import DIGESTS_FILE, from_json
from harness.train.folder import SAMPLES_FILE, SETTINGS_FILE, check_settings, read_settings
from harness.train.lines import MISREAD
from harness.train.metrics import METRICS_FILE, StepMetrics

T = TypeVar("T")


@dataclass(frozen=True)
class _Answer:
    step: int
    prompt: str
    answer: str
    tokens: list[int]


def find_run_check(path: str) -> Callable[..., list[Problem]] | None:
    """Return the function that verifies a run's folder, a checkpoint, or an exported model; None for any other path."""
    folder = Path(path)
    if (folder / CHECKPOINTS).is_dir() or ((folder / METRICS_FILE).is_file() and (folder / SETTINGS_FILE).is_file()):
        return verify_run
    if (folder / RUN_FILE).is_file() or (
        folder.parent.name == CHECKPOINTS and folder in list_checkpoints(folder.parent)
    ):
        return verify_checkpoint
    return verify_folder if (folder / CHECKSUMS_FILE).is_file() else None


def verify_run(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """List all problems of a run's folder: settings, metrics, identity, checkpoints, and models exported into it."""
    folder = Path(path)
    checkpoints = list_checkpoints(folder / CHECKPOINTS)
    exports = sorted(place.parent for place in folder.glob(f"*/{CHECKSUMS_FILE}"))
    parts: list[Callable[[], list[Problem]]] = [
        lambda: list(_settings_problems(folder, checkpoints)),
        lambda: list(_step_problems(folder, checkpoints)),
        *(lambda place=place: verify_checkpoint(place) for place in checkpoints),
        *(lambda place=place: verify_folder(place) for place in exports),
    ]
    problems = []
    for number, part in enumerate(parts, start=1):
        problems += part()
        if progress is not None:
            progress(number, len(parts))
    return problems


def verify_checkpoint(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """List all problems of a checkpoint."""
    folder = Path(path)
    if problems := verify_folder(folder, progress=progress):
        return problems
    try:
        step = read_checkpoint(folder)[0].step
    except (CheckpointError, ConfigError) as error:
        return [Problem(error.what, error.where, error.fix)]
    if folder.name.startswith("step-") and folder.name != f"step-{step:08d}":
        return [Problem(f"the folder {folder.name} contains step {step}", str(folder))]
    return []


def verify_folder(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """List all problems of the files that `checksums.json` lists, and the files that it does not list."""
    folder = Path(path)
    try:
        files = read_checksums(folder)
    except (OSError, FormatError) as error:
        return [Problem(str(getattr(error, "what", error)), str(folder / CHECKSUMS_FILE))]
    if files is None:
        return []
    problems = list_size_problems(folder, files)
    damaged = {problem.where for problem in problems}
    for number, stored in enumerate(files, start=1):
        if str(folder / stored.path) not in damaged:
            problems += find_damage(folder, stored)
        if progress is not None:
            progress(number, len(files))
    listed = {stored.path for stored in files} | {CHECKSUMS_FILE}
    there = {str(place.relative_to(folder)) for place in folder.rglob("*") if place.is_file()}
    for name in sorted(there - listed):
        problems.append(Problem(f"the file {name} is not in {CHECKSUMS_FILE}", str(folder / name)))
    return problems


def _settings_problems(folder: Path, checkpoints: list[Path]) -> Iterator[Problem]:
    """Yield the problems of the run's identity and of its settings, also in its newest checkpoint."""
    try:
        read_identity(folder)
    except CheckpointError as error:
        yield Problem(error.what, error.where)
    path = folder / SETTINGS_FILE
    if not path.exists():
        yield Problem("the run's settings are missing", str(path))
        return
    try:
        known = [read_settings(path)]
    except FormatError as error:
        yield Problem(error.what, error.where)
        return
    for earlier in folder.glob("config.before-*.yaml"):
        with suppress(FormatError):
            known.append(read_settings(earlier))
    for checkpoint in checkpoints[-1:]:
        with suppress(OSError, FormatError, *MISREAD):  # `verify_checkpoint` has these
            written = json.loads((checkpoint / RUN_FILE).read_bytes()).get("settings")
            if written is not None and check_settings(written, where=checkpoint) not in known:
                yield Problem(f"the run's settings differ from those of {checkpoint.name}", str(path))


def _step_problems(folder: Path, checkpoints: list[Path]) -> Iterator[Problem]:
    """Yield the problems of the files that have lines of steps: metrics, digests, and answers to sample prompts."""
    path, digests_path = folder / METRICS_FILE, folder / DIGESTS_FILE
    metrics, problems = _read_steps(path, partial(from_plain, StepMetrics), "metrics")
    digests, damaged = _read_steps(digests_path, from_json, "digests")
    answers, others = _read_steps(folder / SAMPLES_FILE, partial(from_plain, _Answer, lenient=True), "sample answers")
    yield from (*problems, *damaged, *others)
    if not path.is_file():
        yield Problem("the run's metrics are missing", str(path))
    if problems or not metrics:
        return
    yield from _gaps(metrics, "metrics", first=1)
    by_step, last = {made.step: made for _, made in metrics}, metrics[-1][1].step
    for where, made in metrics:
        if any(isinstance(value, float) and not math.isfinite(value) for value in _numbers_of(vars(made))):
            yield Problem(f"step {made.step} has a number that is not finite", where)
    newest = max((int(place.name[5:]) for place in checkpoints if place.name[5:].isdecimal()), default=0)
    if newest > last:
        yield Problem(f"the metrics end at step {last}, but there is a checkpoint of step {newest}", str(path))
    if digests and not damaged:
        yield from _gaps(digests, "digests", first=digests[0][1].step)
        if digests[-1][1].step < last:
            what = f"the digests end at step {digests[-1][1].step}, but the metrics at step {last}"
            yield Problem(what, str(digests_path))
    for where, found in digests:
        yield from (Problem(f"step {found.step}: {disagreement}", where) for disagreement in found.disagreements)
        tokens, other = sum(int(row.lengths.sum()) for row in found.rows), by_step.get(found.step)
        if other is not None and (other.epoch, other.tokens) != (found.epoch, tokens):
            trained = f"epoch {found.epoch} and {tokens:,} tokens in its digests"
            recorded = f"epoch {other.epoch} and {other.tokens:,} tokens in the metrics"
            yield Problem(f"step {found.step} has {trained}, but {recorded}", where)
    for where, step in [(where, one.step) for where, one in digests] + [(where, one.step) for where, one in answers]:
        if step not in by_step:
            yield Problem(f"there are no metrics of step {step}", where)


def _read_steps(path: Path, parse: Callable[[Any], T], kind: str) -> tuple[list[tuple[str, T]], list[Problem]]:
    """Return the records of a file with their places, none for one that was not written, and what is damaged."""
    records, problems = [], []
    try:
        # Text that is not UTF-8 has replacements, which are no JSON or other text.
        lines = path.read_bytes().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [Problem(f"the run's {kind} cannot be read: {error.strerror}", str(path))]
    for number, line in enumerate(lines[: -1 if not lines[-1] else None], start=1):
        try:
            records.append((f"{path}, line {number}", parse(json.loads(line))))
        except MISREAD as error:
            fix = "resuming the run removes an incomplete last line" if number == len(lines) else ""
            problems.append(Problem(f"not a record of a step's {kind}: {error}", f"{path}, line {number}", fix))
    return records, problems


def _gaps(records: Sequence[tuple[str, Any]], kind: str, *, first: int) -> Iterator[Problem]:
    expected = first
    for where, record in records:
        if record.step != expected:
            yield Problem(f"the {kind} of step {expected - 1} are followed by those of step {record.step}", where)
        expected = record.step + 1


def _numbers_of(value: Any) -> Iterator[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    yield from [value] if inner is None else (number for one in inner for number in _numbers_of(one))
