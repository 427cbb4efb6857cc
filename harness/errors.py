"""Errors that users can cause and fix; each states what happened, where, and how to fix it."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.printing import UNREAD, indented, print_line, print_text, printable, redact

# Environment variables of launchers that end all ranks when one exits (torchrun, srun), and the seconds that a rank
# without its own message waits, so that another rank can print its message.
_LAUNCHERS, _LAST_WORDS_S = {"TORCHELASTIC_RUN_ID", "SLURM_PROCID"}, 5.0


class HarnessError(Exception):
    """Base class of all errors that input, configuration or the environment can cause.

    Args:
        what: what happened, with its numbers.
        where: the file, pack, line or setting.
        fix: the remedy; empty for `default_fix`.

    Attributes:
        default_fix: remedy for errors of the class that specify none.
    """

    default_fix = ""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = (printable(redact(str(text))) for text in (what, where, fix))
        self.fix = self.fix or self.default_fix
        super().__init__(self.what, self.where, self.fix)
        # Set in a job: the rank that raised it, and True if rank 0 raises the same error and prints it.
        self.rank: int | None = None
        self.is_shared = False

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (loader workers), and keyword-only arguments do not pickle by default.
        return functools.partial(type(self), where=self.where, fix=self.fix), (self.what,)

    def __str__(self) -> str:
        return _lines_of(self.what, self.where, self.fix)


def _lines_of(what: str, where: str, fix: str) -> str:
    named = [what] + [f"  where: {where}"] * bool(where) + [f"  fix:   {fix}"] * bool(fix)
    return "\n".join(map(indented, named))


class ConfigError(HarnessError):
    """A setting is wrong, or two settings contradict each other."""


class FormatError(HarnessError):
    """Stored data is missing or damaged, or violates an invariant."""

    default_fix = "copy the data again, or write it again; `harness verify` lists all damage"


class PrepError(HarnessError):
    """`prepare` cannot use its input: bad records, a template without a mask, an empty corpus."""


class ScheduleError(HarnessError):
    """Sequences cannot be placed on ranks, or a row cannot be built."""


class LoaderError(HarnessError):
    """Data cannot be loaded: a worker died, or the state belongs to another dataset."""


class LostRankError(HarnessError):
    """Another rank of the job exited or never joined: rank `about`, or None if its number is unknown."""

    about: int | None = None


class CheckpointError(HarnessError):
    """A checkpoint is missing or incomplete, or belongs to another run."""


# Packages that commands import when they run, and the extra that installs each.
_EXTRAS = {
    **dict.fromkeys(("typer", "rich", "yaml", "hydra", "omegaconf"), "cli"),
    **dict.fromkeys(("torch", "megatron", "psutil", "safetensors", "tensorboard", "matplotlib"), "train"),
    **dict.fromkeys(("tokenizers", "transformers", "huggingface_hub", "jinja2"), "tokenize"),
    "ray": "ray",
}


def how_to_install(error: ModuleNotFoundError) -> str:
    """Return the command that installs the extra of a missing package, or "" if it belongs to none."""
    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    return f"pip install 'megatron-sft-harness[{extra}]'" if extra else ""


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the given packages that are installed."""
    import importlib.metadata

    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@contextlib.contextmanager
def os_errors_as(kind: type[HarnessError], what: str, *, where: object, fix: str = "") -> Iterator[None]:
    """Raise system errors, such as a full disk, as `kind`, with `what` failed and the system's reason."""
    try:
        yield
    except Exception as error:
        refused = os_error_of(error)
        if refused is None:
            raise
        raise kind(f"{what}: {refused.strerror or refused}", where=str(where), fix=fix) from error


def os_error_of(error: BaseException) -> OSError | None:
    """Return the OSError of a system error, including errors raised by Rust libraries (tokenizers, safetensors)."""
    if isinstance(error, (OSError, HarnessError)):
        return error if isinstance(error, OSError) else None
    number = re.search(r"\(os error (\d{1,4})\)", str(error))
    return None if number is None else OSError(int(number[1]), os.strerror(int(number[1])))


def is_of_disk(error: OSError) -> bool:
    """Return True for errors of a full, failing or missing disk, which any operation can raise."""
    return error.errno in _OF_DISKS


def reasons_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, each once: re-raised errors can be causes of each other."""
    seen = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


_NO_MEMORY = re.compile("(can't allocate|out of) memory", re.IGNORECASE)


def reason_of_memory(error: BaseException) -> BaseException | None:
    """Return the error, or the first of its causes, that reports exhausted memory; None if there is none."""
    for each in reasons_of(error):
        if isinstance(each, MemoryError) or getattr(os_error_of(each), "errno", None) == errno.ENOMEM:
            return each
        # From torch, CUDA and font libraries.
        if isinstance(each, RuntimeError) and _NO_MEMORY.search(str(each)):
            return each
    return None


_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE, errno.ENXIO, errno.ENODEV}


def _end_output() -> OSError | None:
    """Flush standard output; on failure, discard the rest, which would fail again when the interpreter exits."""
    try:
        sys.stdout.flush()
    except OSError as error:
        discard_output()
        return error
    except ValueError:  # closed
        pass
    return None


def discard_output() -> None:
    """Discard unwritten and all further standard output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class exit_on_error:  # noqa: N801 - reads as a statement where it is used
    """Context manager that turns a HarnessError into its message and exit code 2, and Ctrl-C into exit code 130.

    Missing packages of an extra, full or failing disks (including the disk of standard output) and files without access
    permission are treated as HarnessErrors. If the reader of standard output, such as `head`, has exited, the command
    ends with exit code 141, like other programs.

    Args:
        reads_input: the command reads standard input. For other commands and the processes that they start, piped input
            reads as empty, so that no prompt of a library consumes it.
    """

    def __init__(self, *, reads_input: bool = False) -> None:
        self._reads_input = reads_input

    def __enter__(self) -> None:
        # Reopen streams that the caller closed (`>&-`): each gets the lowest free descriptor, which is its own.
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="replace")  # for characters missing in its encoding
        if not self._reads_input and not os.isatty(0):
            empty = os.open(os.devnull, os.O_RDONLY)
            os.dup2(empty, 0)
            os.close(empty)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            if os.environ.get("RANK", "0") == "0":
                print_line("interrupted", file=sys.stderr)
            sys.exit(130)
        if isinstance(error, ModuleNotFoundError) and (fix := how_to_install(error)):
            error = ConfigError(f"the package {error.name} is not installed", where=sys.executable, fix=fix)
        command = f"`{' '.join(sys.argv)[:200]}`"
        if error is not None and not isinstance(error, HarnessError) and reason_of_memory(error) is not None:
            what = f"out of memory: {str(error).partition(chr(10))[0] or 'this process'}"
            fix = "use a machine with more memory, or let this process use more, then run the same command again"
            error = HarnessError(what, where=command, fix=fix)
        if error is not None and (system := os_error_of(error)) is not None and is_of_disk(system):
            # No code closer to the file has explained the error.
            place = str(system.filename or "") or ("standard output" if _end_output() is not None else "")
            what = f"a disk could not be written to or read: {system.strerror or system}"
            fix = "free disk space or check the disk (dmesg), then run the same command again"
            error = HarnessError(what, where=place or f"a file or the output of {command}", fix=fix)
        refused = _end_output()
        if isinstance(refused, BrokenPipeError) and not isinstance(error, HarnessError):
            sys.exit(UNREAD)
        if refused is not None and is_of_disk(refused) and not isinstance(error, HarnessError):
            what = f"standard output cannot be written: {refused.strerror}"
            fix = "free disk space, or write it to another disk; the command itself has finished"
            error = HarnessError(what, where="standard output", fix=fix)
        if isinstance(error, PermissionError) and error.filename is not None:
            fix = "run as a user who has access, or change the permissions of the file and its folders"
            error = HarnessError(error.strerror or "Permission denied", where=str(error.filename), fix=fix)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            where = str(error.filename)[:100]
            error = HarnessError("the name is too long for a path", where=where, fix="check it, or use a shorter one")
        if not isinstance(error, HarnessError) or os.environ.get("HARNESS_TRACEBACK") == "1":
            return
        # Before the ranks join, an error concerns a node (its files, its packages), and one process per node prints it.
        # Later, an error can concern a single rank.
        rank = os.environ.get("RANK", "0")
        message = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # the exit code remains
            if rank == "0":
                print_text(message, file=sys.stderr)
            elif not error.is_shared and (error.rank is not None or os.environ.get("LOCAL_RANK") == "0"):
                print_text(f"rank {rank}: {message}", file=sys.stderr)
            elif _LAUNCHERS & os.environ.keys():
                time.sleep(_LAST_WORDS_S)
        sys.exit(2)


@dataclass(frozen=True)
class Problem:
    """One defect of a dataset: what, where, and a fix unless that is to write the dataset again."""

    what: str
    where: str
    fix: str = ""

    def __str__(self) -> str:
        return _lines_of(self.what, self.where, self.fix)
