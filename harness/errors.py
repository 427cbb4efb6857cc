"""Errors that a user can cause and fix: each states what happened, where, and how to fix it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass


class HarnessError(Exception):
    """Base of every error that input, configuration or environment can cause.

    Args:
        what: what happened, with its numbers.
        where: the file, pack, line or setting.
        fix: the remedy; empty for `default_fix`.

    Attributes:
        default_fix: the remedy of every error of the class that names none of its own.
    """

    default_fix = ""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix or self.default_fix
        # Set by the runtime of a job: the rank that raised it, and True where every rank raises the same.
        self.rank: int | None = None
        self.is_shared = False

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (loader workers), and keyword-only arguments do not pickle by default.
        return _rebuild, (type(self), self.what, self.where, self.fix)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


def _rebuild(kind: type[HarnessError], what: str, where: str, fix: str) -> HarnessError:
    return kind(what, where=where, fix=fix)


class ConfigError(HarnessError):
    """A setting is wrong, or two settings contradict each other."""


class FormatError(HarnessError):
    """Stored data is missing, damaged, or breaks an invariant."""

    default_fix = "copy the data again, or write it again; `harness verify` lists all damage"


class PrepError(HarnessError):
    """The input of a preparation is unusable: bad lines, a template without a mask, an empty corpus."""


class ScheduleError(HarnessError):
    """Sequences cannot be placed on ranks, or a row cannot be built."""


class LoaderError(HarnessError):
    """Data does not arrive: a worker died, or a state belongs to another dataset."""


class LostRankError(HarnessError):
    """Another rank of the job exited, or never joined: `about`, None where its number is unknown."""

    about: int | None = None


class CheckpointError(HarnessError):
    """A checkpoint is missing, cut short, or belongs to another run."""


# Packages that commands import when they run, and the extra that installs each.
_EXTRAS = {
    **dict.fromkeys(("torch", "megatron", "psutil", "safetensors", "tensorboard", "matplotlib"), "train"),
    **dict.fromkeys(("tokenizers", "transformers"), "tokenize"),
    **dict.fromkeys(("jinja2", "plotly"), "report"),
    "ray": "ray",
}


@contextlib.contextmanager
def os_errors_as(kind: type[HarnessError], what: str, *, where: object, fix: str = "") -> Iterator[None]:
    """Raise an error of the system, such as a full disk, as `kind`: `what` failed, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}", where=str(where), fix=fix) from error


class exit_on_error:  # noqa: N801 - reads as a statement where it is used
    """Context manager that turns a HarnessError into its message and exit code 2, and Ctrl-C into exit code 130.

    A missing package of one of the extras is such an error too.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _EXTRAS:
            extra = _EXTRAS[(error.name or "").partition(".")[0]]
            error = ConfigError(
                f"the package {error.name} is not installed", where=sys.executable, fix=f"pip install '.[{extra}]'"
            )
        if not isinstance(error, HarnessError) or os.environ.get("HARNESS_TRACEBACK") == "1":
            return
        # Before the job is joined an error is that of a node (its files, its packages), and one process of each node
        # prints it. Later it can be that of one rank.
        rank = os.environ.get("RANK", "0")
        message = f"{type(error).__name__}: {error}"
        if rank == "0":
            print(message, file=sys.stderr)
        elif not error.is_shared and (error.rank is not None or os.environ.get("LOCAL_RANK") == "0"):
            print(f"rank {rank}: {message}", file=sys.stderr)
        sys.stdout.flush()
        sys.exit(2)


@dataclass(frozen=True)
class Problem:
    """One defect of a dataset: what, and where."""

    what: str
    where: str
