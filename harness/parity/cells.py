"""The matrix: cases as text, the runs of `recipes.sft` that they stand for, and which of them are held together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.errors import ConfigError
from harness.parity.compare import IDENTICAL, Tolerances

# What a case may name beside settings of `recipes.sft`.
FORMAT, VERSION = "format", "version"
_SAID_BY_VALUE = (FORMAT, VERSION, "parallel", "schedule", "schedule.name")


@dataclass(frozen=True)
class Case:
    """One run to compare: so many ranks with these settings."""

    ranks: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        pairs = [part.partition("=") for part in self.overrides]
        said = [value if key in _SAID_BY_VALUE else f"{key.split('.')[-1]}={value}" for key, _, value in pairs]
        return " ".join([*([f"{self.ranks}x"] if self.ranks > 1 or not said else []), *said])

    @property
    def axes(self) -> dict[str, str]:
        """What distinguishes it, by name; `layout` for a preset of `configs/parallel`."""
        pairs = [part.partition("=") for part in self.overrides]
        names = {"parallel": "layout", "schedule.name": "schedule"}
        named = {names.get(key, key.split(".")[-1]): value for key, _, value in pairs}
        return {"ranks": str(self.ranks), **named}

    def takes(self, name: str) -> str | None:
        """The value of a pseudo-setting (FORMAT, VERSION), None where the case does not name it."""
        return next((part.split("=", 1)[1] for part in self.overrides if part.startswith(f"{name}=")), None)

    @property
    def settings(self) -> tuple[str, ...]:
        """Those of `recipes.sft`."""
        return tuple(part for part in self.overrides if not part.startswith((f"{FORMAT}=", f"{VERSION}=")))


def parse_case(text: str, *, where: str = "cases") -> Case:
    """`"4 parallel=tp2 loader.num_workers=2"` as a Case; raises ConfigError for another form."""
    ranks, *overrides = text.split() or [""]
    if not ranks.isdigit() or int(ranks) < 1 or any("=" not in part for part in overrides):
        raise ConfigError(
            f"{text!r} is not a case",
            where=where,
            fix="ranks, then settings: '4 parallel=tp2 loader.num_workers=2'",
        )
    return Case(int(ranks), tuple(overrides))


@dataclass(frozen=True)
class CheckPlan:
    """How one check goes.

    Attributes:
        tolerances: of its cells against the reference.
        same_layout: whether its cells schedule onto ranks as the reference does.
        from_checkpoint: all go on from one checkpoint; where ranks draw their own part of the weights, the same seed
            gives another function.
        shares_processes: cells of one number of ranks follow each other in the same processes, which take long to
            start where there are many.
    """

    tolerances: Tolerances
    same_layout: bool
    from_checkpoint: bool = False
    shares_processes: bool = False


@dataclass(frozen=True)
class Cell:
    """One run of the matrix.

    Attributes:
        name: unique in the matrix.
        check: what it belongs to.
        case: what it runs.
        reference: name of the cell that it is held against; None for a reference.
        settings: all settings of `recipes.sft` but the folder.
        steps: that it makes, those of the cell that it starts from included.
        start: name of the cell whose folder it goes on from.
        python: the interpreter.
        dataset: what it trains on; part of what makes a finished cell stale.
        is_told: whether it stands in the report; a cell that others only start from does not.
    """

    name: str
    check: str
    case: Case
    reference: str | None
    settings: tuple[str, ...]
    steps: int
    python: str
    dataset: str
    start: str | None = None
    is_told: bool = True
    plan: CheckPlan = field(default_factory=lambda: CheckPlan(IDENTICAL, same_layout=True))

    @property
    def folder_name(self) -> str:
        """Of this cell below the report's folder."""
        kept = [one if one.isalnum() or one in ".-" else "_" for one in self.name]
        return "".join(kept)


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
    """The cells of one check, what they start from first, then the reference: the first of `cases`.

    Args:
        settings: of `recipes.sft`, for every cell.
        datasets: path by format; "" where a case names none.
        pythons: interpreter by version; "" where a case names none.
        steps: of every cell; `steps_before` more, before them, where the check goes on from a checkpoint.
        max_ranks: cases of more ranks are left out.

    Raises:
        ConfigError: a case that is none, two of one name, or nothing to hold against the reference.
    """
    parsed = [case for case in (parse_case(text, where=check) for text in cases) if case.ranks <= max_ranks]
    if len(parsed) < 2:
        raise ConfigError(
            f"check {check} has {len(parsed)} cases to run, and needs a reference and a case to hold against it",
            where=f"{check}, max_ranks",
            fix="name cases, the reference first, or allow more ranks",
        )
    names = [f"{check}: {case.name}" for case in parsed]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two cases are named {twice!r}", where=check, fix="leave one of them out")
    total = steps + (steps_before if plan.from_checkpoint else 0)
    cells = []
    start = f"{check}: start" if plan.from_checkpoint else None
    for name, case in zip(names, parsed, strict=True):
        dataset = _chosen(datasets, case.takes(FORMAT), check, "datasets")
        cells.append(
            Cell(
                name=name,
                check=check,
                case=case,
                reference=None if name == names[0] else names[0],
                settings=(f"data.path={dataset}", *settings, f"optimizer.decay_steps={total}", *case.settings),
                steps=total,
                python=_chosen(pythons, case.takes(VERSION), check, "versions"),
                dataset=dataset,
                start=start,
                plan=plan,
            )
        )
    if start is None:
        return cells
    first = cells[0]
    return [
        Cell(start, check, first.case, None, first.settings, steps_before, first.python, first.dataset, is_told=False),
        *cells,
    ]


def _chosen(known: Mapping[str, str], name: str | None, check: str, where: str) -> str:
    if (name or "") not in known:
        raise ConfigError(
            f"check {check} names {name!r}, which is not among {', '.join(filter(None, known)) or 'none'}",
            where=where,
            fix=f"{where}='{{{name}: PATH}}'",
        )
    return known[name or ""]
