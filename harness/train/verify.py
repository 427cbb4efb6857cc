"""Verification of a run's folder: its settings, the metrics of each step, checkpoints, and exported models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import CheckpointError, ConfigError, FormatError, Problem
from harness.settings import find_odd, from_plain, load
from harness.storage import StoredFile, read_checksums
from harness.storage.checksums import CHECKSUMS_FILE, list_hash_problems, list_size_problems
from harness.train.checkpoints import CHECKPOINTS, RUN_FILE, list_checkpoints, read_checkpoint
from harness.train.digests import DIGESTS_FILE, from_json
from harness.train.folder import SAMPLES_FILE, SETTINGS_FILE, check_settings, read_settings
from harness.train.lines import MISREAD, StepLine, read_sound_lines
from harness.train.local import own_local_record, read_disk, read_identity
from harness.train.metrics import METRICS_FILE, StepMetrics


@dataclass(frozen=True)
class _Answer:
    step: int
    prompt: str
    answer: str
    tokens: list[int]


# Null where a step had no validation; elsewhere null is a number that was not finite.
_OPTIONAL = "validation_loss"


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
    """List all problems of a run's folder: settings, metrics, checkpoints, and models exported into it.

    Of checkpoints on the nodes' own disks, the files on the disk of this node are checked.

    Args:
        progress: called with parts checked and parts in total.
    """
    folder = Path(path)
    checkpoints = list_checkpoints(folder / CHECKPOINTS)
    exports = sorted(place.parent for place in folder.glob(f"*/{CHECKSUMS_FILE}"))
    parts: list[Callable[[], list[Problem]]] = [
        lambda: list(_settings_problems(folder, checkpoints)),
        lambda: list(_metrics_problems(folder / METRICS_FILE, checkpoints)),
        lambda: list(_digests_problems(folder)),
        lambda: list(_samples_problems(folder)),
        lambda: list(_local_problems(folder)),
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
            problems += _hash_problems(folder, stored)
        if progress is not None:
            progress(number, len(files))
    listed = {stored.path for stored in files} | {CHECKSUMS_FILE}
    there = sorted(str(place.relative_to(folder)) for place in folder.rglob("*") if place.is_file())
    return problems + [
        Problem(f"the file {name} is not in {CHECKSUMS_FILE}", str(folder / name))
        for name in there
        if name not in listed
    ]


def _local_problems(run: Path) -> Iterator[Problem]:
    try:
        read_identity(run)
        record = own_local_record(run)
    except CheckpointError as error:
        yield Problem(error.what, error.where)
        return
    if record is None:
        return
    folder = record.folder(record.root)
    for name, part in read_disk(record, record.root).items():
        if not part.manifest:
            yield Problem(f"{CHECKSUMS_FILE} or {RUN_FILE} of the local checkpoint is damaged", str(folder / name))
        for stored in part.files:
            if stored.path in part.sizes:  # the others are on other nodes
                yield from list_size_problems(folder / name, [stored]) or _hash_problems(folder / name, stored)


def _hash_problems(folder: Path, stored: StoredFile) -> list[Problem]:
    try:
        return list_hash_problems(folder, [stored])
    except OSError as error:
        return [Problem(f"the file {stored.path} cannot be read: {error.strerror}", str(folder / stored.path))]


def _settings_problems(folder: Path, checkpoints: list[Path]) -> Iterator[Problem]:
    path = folder / SETTINGS_FILE
    try:
        settings = read_settings(path)
    except (OSError, ValueError) as error:
        yield Problem(f"the run's settings {_why(error)}", str(path))
        return
    known = [settings]
    for earlier in folder.glob("config.before-*.yaml"):
        with suppress(OSError, ValueError):
            known.append(read_settings(earlier))
    for checkpoint in checkpoints[-1:]:
        with suppress(OSError, *MISREAD):  # `verify_checkpoint` has these
            written = json.loads((checkpoint / RUN_FILE).read_bytes()).get("settings")
            if written is not None and check_settings(written) not in known:
                yield Problem(f"the run's settings differ from those of {checkpoint.name}", str(path))


def _metrics_problems(path: Path, checkpoints: list[Path]) -> Iterator[Problem]:
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        yield Problem(f"the run's metrics {_why(error)}", str(path))
        return
    step = 0
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        where = f"{path}, line {number}"
        if not line.endswith("\n"):
            yield Problem("the last line is incomplete; resuming the run removes it", where)
            break
        try:
            values: dict[str, Any] = json.loads(line)
            found = from_plain(StepLine, values, lenient=True).step
        except (ValueError, RecursionError) as error:
            yield Problem(f"not a record of a step's metrics: {error}", where)
            step += 1
            continue
        if found != step + 1:
            kind = "repeats" if found <= step else "skips to"
            yield Problem(f"step {step} is followed by step {found}: the line {kind} it", where)
        step = found
        checked = {name: value for name, value in values.items() if name != "stragglers"}
        odd = [name for name, value in checked.items() if not _is_number(value) and (name, value) != (_OPTIONAL, None)]
        if odd:
            yield Problem(f"step {step} has no finite {', '.join(odd)}", where)
        elif wrong := find_odd({name: value for name, value in checked.items() if value is not None}, StepMetrics):
            yield Problem(f"not a record of a step's metrics: {wrong}", where)
    newest = max((int(place.name[5:]) for place in checkpoints if place.name[5:].isdecimal()), default=0)
    if newest > step:
        yield Problem(f"the metrics end at step {step}, but there is a checkpoint of step {newest}", str(path))


def _why(error: OSError | ValueError) -> str:
    """Return the end of a sentence about a file; a plain ValueError, of `read_settings`, has one."""
    if isinstance(error, FileNotFoundError):
        return "are missing"
    return str(error) if type(error) is ValueError else f"cannot be read: {error}"


def _metrics_of_steps(folder: Path) -> dict[int, StepLine]:
    with suppress(OSError):
        return {line.step: line for line in read_sound_lines(folder / METRICS_FILE)}
    return {}


def _digests_problems(folder: Path) -> Iterator[Problem]:
    path = folder / DIGESTS_FILE
    metrics, last = _metrics_of_steps(folder), None
    for where, line in _lines(path, "digests"):
        try:
            step = from_json(json.loads(line))
        except MISREAD as error:
            yield Problem(f"not a record of a step's digests: {error}", where)
            last = None if last is None else last + 1
            continue
        if last is not None and step.step != last + 1:
            yield Problem(f"digests of step {last} are followed by those of step {step.step}", where)
        last = step.step
        for disagreement in step.disagreements:
            yield Problem(f"step {step.step}: {disagreement}", where)
        of_step = metrics.get(step.step)
        if of_step is None:
            yield Problem(f"there are digests but no metrics of step {step.step}", where)
            continue
        tokens = sum(int(row.lengths.sum()) for row in step.rows)
        for name, found in (("epoch", step.epoch), ("tokens", tokens)):
            if (other := getattr(of_step, name)) not in (None, found):
                what = f"step {step.step} has {name} {found:,} in its digests but {other} in the metrics"
                yield Problem(what, where)
    if last is not None and metrics and last < max(metrics):
        yield Problem(f"the digests end at step {last}, but the metrics at step {max(metrics)}", str(path))


def _samples_problems(folder: Path) -> Iterator[Problem]:
    metrics, last = _metrics_of_steps(folder), 0
    for where, line in _lines(folder / SAMPLES_FILE, "samples"):
        try:
            step = load(_Answer, line, where=where, what="not a record of a sample answer", lenient=True).step
        except FormatError as error:
            yield Problem(error.what, where)
            continue
        if step < last:
            yield Problem(f"an answer after step {last} is followed by one after step {step}", where)
        if metrics and step not in metrics:
            yield Problem(f"there is an answer but no metrics after step {step}", where)
        last = step


def _lines(path: Path, what: str) -> Iterator[tuple[str, str]]:
    """Yield place and text of each line of a file; nothing for one that the run did not write.

    Text that is not UTF-8 has replacements, which are no JSON or other text.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        yield f"{path}: {error.strerror}", f"the run's {what} cannot be read"
        return
    for number, line in enumerate(lines[: -1 if not lines[-1] else None], start=1):
        yield f"{path}, line {number}", line.decode(errors="replace")


def _is_number(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_number, value.values()))
    if isinstance(value, list):
        return all(map(_is_number, value))
    return isinstance(value, int | float) and math.isfinite(value)
