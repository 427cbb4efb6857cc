"""Tools for checks: their registry, the data that they feed to a target, and their errors."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.conformance.model import Reference, write_model
from harness.conformance.target import Layout, NotSupported, Step, Tokens

# Relative. float32 sums differ from the float64 reference by about 1e-6, each defect of a check by 1e-3 and more.
LOSS_TOLERANCE, NORM_TOLERANCE = 2e-5, 2e-4
_PATIENCE_S = 120.0
# A check; and the loss and the norm of gradients of each well-known mistake.
Run = Callable[["Kit"], str]
Mistakes = dict[str, tuple[float, float]]
OUTCOMES = PASS, FAIL, ERROR, NOT_SUPPORTED = "PASS", "FAIL", "ERROR", "NOT SUPPORTED"


class Failed(Exception):  # noqa: N818 - a verdict, not an error
    """Raised by a check: the trainer does something else, with figures."""


@dataclass(frozen=True)
class ConformanceCheck:
    """One question to a trainer.

    Attributes:
        about: why it matters and what is done, in a paragraph.
        ranks: of the job.
        after: the check whose checkpoint it continues from, which is run first; empty for none.
        model: the kind of model that targets are built of, of `write_model`.
        threads: public threads in which users found the defect, as OWNER/REPOSITORY#NUMBER.
        run: returns the observed result, or raises `Failed` or `NotSupported`.
    """

    name: str
    about: str
    ranks: int
    after: str
    model: str
    threads: tuple[str, ...]
    run: Run


CHECKS: dict[str, ConformanceCheck] = {}


def check(*threads: str, ranks: int = 1, after: str = "", model: str = "model") -> Callable[[Run], Run]:
    """Register a function as the check of its name; its docstring explains it."""

    def register(run: Run) -> Run:
        name = run.__name__.replace("_", "-")
        CHECKS[name] = ConformanceCheck(name, " ".join((run.__doc__ or "").split()), ranks, after, model, threads, run)
        return run

    return register


class Kit:
    """A target, a new folder for the files of a check, the same on all ranks, and what checks have in common.

    `dp_size` is that of layouts, and `ranks` are the processes here: a command starts its own.
    """

    def __init__(self, target: Any, folder: Path, asked: ConformanceCheck, *, rank: int, ranks: int) -> None:
        self.target, self.folder, self.rank, self.ranks, self.dp_size = target, folder, rank, ranks, asked.ranks
        self._meetings, self.model = 0, folder / asked.model
        if rank == 0 and not self.model.exists():
            written = self.model.with_suffix(".written")
            write_model(written, kind=asked.model)
            written.rename(self.model)
        _wait_for([self.model])
        self.reference = Reference(self.model)

    def build(self, data: Sequence[Tokens], **layout: Any) -> Step:
        """Build the target on some conversations and a `Layout` of these fields; return its step."""
        path = self.folder / f"data-{self._meetings}-{self.rank}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in data))
        self._meetings += 1
        made = self.target.build(self.model, path, Layout(**{"dp_size": self.dp_size, **layout}))

        def step(batch: Sequence[Tokens]) -> tuple[float, float | None]:
            values = made(batch)
            if not isinstance(values, tuple) or len(values) != 2:
                raise TypeError(f"the step returned {values!r} instead of a loss and a norm (None without one)")
            return float(values[0]), None if values[1] is None else float(values[1])

        return step

    def require(self, *methods: str) -> None:
        """Raise NotSupported if the target lacks one of these optional methods."""
        if missing := [name for name in methods if not callable(getattr(self.target, name, None))]:
            raise NotSupported(f"the target has no method {' and no method '.join(missing)}")

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks; they need no process group, which trainers start in their own ways."""
        self._meetings += 1
        paths = [self.folder / f"meeting-{self._meetings}-{rank}.json" for rank in range(self.ranks)]
        written = paths[self.rank].with_suffix(".written")
        written.write_text(json.dumps(value))
        written.rename(paths[self.rank])
        _wait_for(paths)
        return [json.loads(path.read_text()) for path in paths]

    def compare(self, got: tuple[float, float | None], expected: tuple[float, float], otherwise: Mistakes) -> str:
        """Compare loss and gradient norm with the expected ones; raise Failed where they differ.

        The error names the well-known mistake that gives these figures, of those in `otherwise`.
        """
        seen = _describe(got)
        if _agree(got, expected):
            return f"{seen}, as expected" if got[1] is not None else f"{seen}, as expected; no norm is reported"
        likely = otherwise | {f"the gradient of {name}": (expected[0], each[1]) for name, each in otherwise.items()}
        fits = "".join(f", which is {name}" for name, values in likely.items() if _agree(got, values))
        ratio = got[0] / expected[0]
        if got[1] is not None and _agree((ratio, got[1]), (ratio, ratio * expected[1])):
            fits += f", both {ratio:.4g} times those expected: another divisor"
        raise Failed(f"{seen}{fits}; expected {_describe(expected if got[1] is not None else (expected[0], None))}")

    def compare_step(self, data: list[Tokens], otherwise: Mistakes, *, average: str = "token", **layout: Any) -> str:
        """Build the target, train one step, and compare it against the step of the reference."""
        got = self.build(data, loss_average=average, **layout)(data)
        return self.compare(got, self.reference.step(data, average), otherwise)

    def rows_of(self, data: Sequence[Tokens], steps: int | None = None, **layout: Any) -> list[list[list[Tokens]]]:
        """Build the target, train some steps of an epoch; return the rows by rank and step."""
        self.require("rows")
        self.build(data, **layout)
        return self.gather(self.target.rows(steps))


def _describe(values: tuple[float, float | None]) -> str:
    return f"loss {values[0]:.6f}" + ("" if values[1] is None else f", norm {values[1]:.5f}")


def _agree(got: tuple[float, float | None], expected: tuple[float, float]) -> bool:
    pairs = zip(got, expected, (LOSS_TOLERANCE, NORM_TOLERANCE), strict=True)
    return all(
        one is None or (math.isfinite(other) and abs(one - other) <= tolerance * abs(other))
        for one, other, tolerance in pairs
    )


def _wait_for(paths: Iterable[Path]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    for path in paths:
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"another rank did not write {path.name}: it failed, or it does not run this check")
            time.sleep(0.01)


def conversations(lengths: Sequence[int], *, trained: float = 0.5, seed: int = 0) -> list[Tokens]:
    """Return random conversations of some lengths; each pair of neighboring tokens occurs once in all of them.

    A share of each is trained, at its end, and at least its last token.
    """
    rng, used, made = np.random.default_rng(seed), set[tuple[int, int]](), []
    for length in lengths:
        ids = [int(rng.integers(256))]
        while len(ids) < length:
            following = int(rng.integers(256))
            if (ids[-1], following) not in used:
                used.add((ids[-1], following))
                ids.append(following)
        first = length - max(1, round(trained * length))
        made.append({"input_ids": ids, "labels": [-100] * first + ids[first:]})
    return made


def trained_pairs(rows: Iterable[Tokens]) -> list[tuple[int, int]]:
    """Return every (token, next token) pair whose next token is trained."""
    pairs = []
    for row in rows:
        ids, labels = row["input_ids"], row["labels"]
        pairs += [(ids[place - 1], labels[place]) for place in range(1, len(ids)) if labels[place] != -100]
    return pairs


def judge(target: Any, name: str, folder: Path, *, rank: int = 0, ranks: int = 1) -> tuple[str, str]:
    """Return the verdict of one check on a target, and the observed result."""
    asked = CHECKS[name]
    try:
        if ranks != asked.ranks and not getattr(target, "starts_ranks", False):
            raise NotSupported(f"the check needs a job of {asked.ranks} ranks")
        return PASS, asked.run(Kit(target, folder, asked, rank=rank, ranks=ranks))
    except Failed as failed:
        return FAIL, str(failed)
    except NotSupported as missing:
        return NOT_SUPPORTED, str(missing)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the trainer, which may raise anything
        traceback.print_exc()
        return ERROR, f"{first_line(error)} (--dir FOLDER keeps the traceback)"


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['without a message'])[0][:200]}"
