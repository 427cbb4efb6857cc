"""Cells of a matrix: cases in text form, the run of each case, and the reference that it is compared with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import ConfigError
from harness.parity.compare import IDENTICAL, Tolerances
from harness.train import METRICS_FILE
from harness.train.lines import whole_lines

# Record of an isolation check: one line per turn (equal passes, the batch, each of four documents, the padding).
ISOLATION_FILE, ISOLATION_TURNS = "isolation.jsonl", 7
# Settings of a case that are not settings of `recipes.sft`.
FORMAT, VERSION, KIND = _OWN = ("format", "version", "kind")
_NAMED_BY_VALUE = (FORMAT, VERSION, "parallel", "schedule", "schedule.name")
_LONGEST_NAME = 255
# Recipes that a cell can run; each writes a file with one line per step into the run's folder.
TRAINING, ISOLATION, REFERENCE = (f"harness.recipes.{name}" for name in ("sft", "isolation", "reference"))


@dataclass(frozen=True)
class RunCase:
    """One run to compare: a number of ranks, and settings."""

    ranks: int
    overrides: tuple[str, ...]

    @property
    def _pairs(self) -> list[tuple[str, str]]:
        return [(key, value) for key, _, value in (part.partition("=") for part in self.overrides)]

    @property
    def name(self) -> str:
        pairs = [(key, value) for key, value in self._pairs if key != KIND]  # part of the check's name
        words = [value if key in _NAMED_BY_VALUE else f"{key.split('.')[-1]}={value}" for key, value in pairs]
        return " ".join([*([f"{self.ranks}x"] if self.ranks > 1 or not words else []), *words])

    @property
    def axes(self) -> dict[str, str]:
        """Return the settings that distinguish the case, by name; a preset of `configs/parallel` is its `layout`."""
        names = {"parallel": "layout", "schedule.name": "schedule"}
        return {"ranks": str(self.ranks), **{names.get(key, key.split(".")[-1]): value for key, value in self._pairs}}

    def value_of(self, name: str) -> str | None:
        """Return the value of FORMAT, VERSION or KIND; None if the case does not set it."""
        return dict(reversed(self._pairs)).get(name)

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(f"{key}={value}" for key, value in self._pairs if key not in _OWN)


def parse_case(text: str, *, where: str = "cases") -> RunCase:
    """Parse a case such as `"4 parallel=tp2 loader.num_workers=2"`; raise ConfigError if it is invalid."""
    ranks, *overrides = text.split() or [""]
    if not ranks.isdecimal() or int(ranks) < 1 or any("=" not in part for part in overrides):
        fix = "write the number of ranks, then settings: '4 parallel=tp2 loader.num_workers=2'"
        raise ConfigError(f"{text!r} is not a valid case", where=where, fix=fix)
    return RunCase(int(ranks), tuple(overrides))


@dataclass(frozen=True)
class CheckPlan:
    """Properties of all cells of one check.

    Attributes:
        from_checkpoint: all cells start from the same checkpoint. If each rank draws its own part of the weights, equal
            seeds result in different weights on different layouts.
        shares_processes: cells with the same number of ranks run one after another in the same processes, because
            starting many processes is slow.
    """

    tolerances: Tolerances
    from_checkpoint: bool = False
    shares_processes: bool = False
    program: str = TRAINING


_ALONE = CheckPlan(IDENTICAL)


@dataclass(frozen=True)
class Cell:
    """One run of the matrix; methods return paths in the folder of the matrix.

    Attributes:
        reference: name of the cell that it is compared with; None for a reference.
        steps: total number of steps, including the steps of the cell that it starts from.
        dataset: path of the data; if it changes, a finished cell is run again.
        start: name of the cell that it starts from, with a copy of that cell's run.
        is_reported: False for a cell that is only the start of others.
    """

    name: str
    check: str
    case: RunCase
    reference: str | None
    settings: tuple[str, ...]
    steps: int
    python: str
    dataset: str
    start: str | None = None
    is_reported: bool = True
    plan: CheckPlan = _ALONE

    @property
    def layout(self) -> tuple[int, tuple[str, ...]]:
        """Return the ranks and settings that place sequences in rows: cells of equal layouts have equal rows."""
        return self.case.ranks, tuple(text for text in self.settings if text.startswith(("parallel", "schedule")))

    @property
    def overrides(self) -> list[str]:
        return [*self.settings, f"trainer.steps={self.steps}"]

    @property
    def launcher(self) -> list[str]:
        """Return the beginning of a command line that runs a module on the cell's ranks."""
        many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.case.ranks}"]
        return [self.python, *(many if self.case.ranks > 1 else [])]

    def folder(self, matrix: Path) -> Path:
        return matrix / "cells" / _folder_name(self.name)

    def run_folder(self, matrix: Path) -> Path:
        return self.folder(matrix) / "run"

    def start_folder(self, matrix: Path) -> Path | None:
        return None if self.start is None else matrix / "cells" / _folder_name(self.start) / "run"

    def log_file(self, matrix: Path) -> Path:
        return self.folder(matrix) / "log.txt"

    def record(self, matrix: Path) -> Path:
        """Return the file with one line per step."""
        return self.run_folder(matrix) / (ISOLATION_FILE if self.plan.program == ISOLATION else METRICS_FILE)

    def steps_made(self, matrix: Path) -> int:
        with suppress(OSError):
            return sum(1 for _ in whole_lines(self.record(matrix)))
        return 0

    def command(self, matrix: Path) -> str:
        """Return the shell command that runs only this cell again, in a folder next to its own."""
        again, start = self.folder(matrix) / "again", self.start_folder(matrix)
        copy = f"cp -r {shlex.quote(str(start))} {shlex.quote(str(again))} && " if start else ""
        run = [*self.launcher, "-m", self.plan.program, *self.overrides, f"run_dir={again}"]
        return f"{copy}OMP_NUM_THREADS=1 {shlex.join(run)}"


def plan_check(
    check: str,
    cases: Sequence[str],
    plan: CheckPlan,
    *,
    settings: Sequence[str],
    datasets: Mapping[str, str],
    pythons: Mapping[str, str],
    steps: int,
    steps_before: int,
    max_ranks: int,
) -> list[Cell]:
    """Return the cells of one check: the cell that the others start from, if any, then the cases in order.

    Args:
        datasets: path by format, and under "" for cases that set none.
        pythons: interpreter by version, and under "" for cases that set none.
        steps: number of steps of every cell; if the check starts from a checkpoint, `steps_before` steps precede them.

    Raises:
        ConfigError: a malformed case, two cases with the same name, or nothing to compare with the reference.
    """
    parsed = [case for case in (parse_case(text, where=check) for text in cases) if case.ranks <= max_ranks]
    is_alone = plan.program == ISOLATION  # in other checks, the first case is the reference
    if len(parsed) < (1 if is_alone else 2):
        needs = "a case" if is_alone else "a reference and a case to compare with it"
        what = f"check {check} has {len(parsed)} cases to run, but requires {needs}"
        raise ConfigError(what, where=f"{check}, max_ranks", fix="list cases, the reference first, or allow more ranks")
    folders = [_folder_name(f"{check}: {case.name}") for case in parsed]
    total, start = steps, None
    if plan.from_checkpoint:
        total, start = steps + steps_before, f"{check}: start"
    cells: list[Cell] = []
    for folder, case in zip(folders, parsed, strict=True):
        name = f"{check}: {case.name}"
        if folders.count(folder) > 1:
            raise ConfigError(f"two cases are named {name!r}, or alike", where=check, fix="omit one of them")
        if (size := len(folder.encode())) > _LONGEST_NAME:
            what = f"the name of a case takes {size} bytes, but a folder's name has at most {_LONGEST_NAME}"
            raise ConfigError(what, where=name, fix="put its settings into a file of a group, such as parallel=NAME")
        dataset = _choose(datasets, case.value_of(FORMAT), check, "datasets")
        cells.append(
            Cell(
                name=name,
                check=check,
                case=case,
                reference=cells[0].name if cells and not is_alone else None,
                settings=(f"data.path={dataset}", *settings, f"optimizer.decay_steps={total}", *case.settings),
                steps=total,
                python=_choose(pythons, case.value_of(VERSION), check, "versions"),
                dataset=dataset,
                start=start,
                plan=plan,
            )
        )
    if start is None:
        return cells
    # With the default plan, so that it runs alone even if the others share processes.
    return [replace(cells[0], name=start, start=None, steps=steps_before, is_reported=False, plan=_ALONE), *cells]


def _folder_name(name: str) -> str:
    return "".join(char if char.isalnum() or char in ".-" else "_" for char in name)


def _choose(known: Mapping[str, str], name: str | None, check: str, where: str) -> str:
    if (name or "") not in known:
        what = f"check {check} refers to {name!r}, which is not among {', '.join(filter(None, known)) or 'none'}"
        raise ConfigError(what, where=where, fix=f"{where}='[\"{name}=PATH\"]'")
    return known[name or ""]
