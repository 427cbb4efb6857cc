"""A writer that is killed, or refused by the disk, at each of its operations in turn."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from harness.errors import FormatError
from harness.formats import FORMATS, load_format, open_dataset, open_writer
from harness.formats.convert import convert_dataset
from harness.records import Pack
from harness.storage.files import AtomicFile

PACKS = [Pack([number, 2, 3, 4, 5], [1, 0, 1, 1, 0], [0, 2]) for number in range(3)]
OPERATIONS = ("open", "fsync", "replace", "unlink", "mkdir", "rmdir", "ftruncate", "pwrite")


Fault = Callable[[Callable[[], object] | None], None]


class Disk:
    """Counts the operations of a writer and fails at one of them."""

    def __init__(self, fail_at: int | None, fail: Fault) -> None:
        self.count = 0
        self.dead = False
        self._opened: set[int] = set()
        self._only_writes = fail is write_half
        self._fail_at = fail_at
        self._fail = fail

    def step(self, partly: Callable[[], object] | None = None) -> None:
        if self._only_writes and partly is None:
            return
        number = self.count
        self.count += 1
        if number == self._fail_at:
            self.dead = self._fail is die
            self._fail(partly)
        if self.dead:
            raise KilledError

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            write, start = AtomicFile.write, AtomicFile.__init__

            def counted_write(file: AtomicFile, data: Any) -> int:
                if self.dead:
                    return len(data)  # Arrow writes from destructors, where an exception can go nowhere.
                self.step(lambda: (write(file, memoryview(data).cast("B")[: len(data) // 2]), file.flush()))
                return write(file, data)

            def counted_start(file: AtomicFile, path: Path) -> None:
                self.step()
                start(file, path)

            close = os.close

            def tracked_close(descriptor: int) -> None:
                self._opened.discard(descriptor)
                close(descriptor)

            patch.setattr(os, "close", tracked_close)
            patch.setattr(AtomicFile, "write", counted_write)
            patch.setattr(AtomicFile, "__init__", counted_start)
            try:
                yield
            finally:
                # The system closes the files of a killed process, which releases its locks.
                if self.dead:
                    for descriptor in self._opened:
                        with suppress(OSError):
                            close(descriptor)

    def _wrapped(self, name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.step()
            # The order of operations is what is tested; waiting for the disk at each would take minutes.
            if name == "fsync":
                return None
            result = original(*arguments, **options)
            if name == "open":
                self._opened.add(result)
            return result

        return call


class KilledError(BaseException):
    """Ends the attempt; afterwards the disk accepts nothing, so that no cleanup can save the dataset."""


def die(partly: Callable[[], object] | None) -> None:
    if partly is not None:
        partly()
    raise KilledError


def fill_up(partly: Callable[[], object] | None) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def write_half(partly: Callable[[], object] | None) -> None:
    if partly is not None:
        partly()
    raise OSError(errno.EIO, "Input/output error")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "source"
    with open_writer(path, format="binidx", pack_size=8) as writer:
        for pack in PACKS:
            writer.append(pack)
    return path


def run(source: Path, destination: Path, format: str) -> None:
    convert_dataset(source, destination, format=format, packs_per_shard=2)


def attempt(source: Path, destination: Path, format: str, disk: Disk) -> None:
    with disk.in_place():
        run(source, destination, format)


def check(source: Path, destination: Path, format: str, point: int) -> None:
    """Assert that there is no dataset or a whole one, and that the same command finishes it."""
    try:
        reader = open_dataset(destination)
    except FormatError:
        pass
    else:
        assert list(reader) == PACKS, f"half a dataset after fault {point}"
        reader.close()
    attempt(source, destination, format, Disk(None, die))
    reader = open_dataset(destination)
    assert list(reader) == PACKS
    reader.close()
    if destination.is_dir():
        left = [path for path in destination.rglob("*") if path.suffix in (".tmp", ".part")]
        assert left == [], f"left after fault {point}: {left}"


def destinations(tmp_path: Path, format: str) -> list[Path]:
    single = load_format(format).single_file_suffix
    # A bare .npy has no manifest, so that a second run cannot distinguish it from a foreign file.
    return [tmp_path / "out", *([tmp_path / f"out{single}"] if single == ".parquet" else [])]


def count_operations(source: Path, destination: Path, format: str, fault: Fault) -> int:
    disk = Disk(None, fault)
    attempt(source, destination, format, disk)
    remove(destination)
    return disk.count


def remove(destination: Path) -> None:
    if destination.is_dir():
        shutil.rmtree(destination)
    else:
        destination.unlink(missing_ok=True)


@pytest.mark.parametrize("format", FORMATS)
def test_a_writer_killed_at_any_operation_leaves_no_dataset_or_a_whole_one(
    tmp_path: Path, source: Path, format: str, record_property: Callable[[str, object], None]
) -> None:
    points = 0
    for destination in destinations(tmp_path, format):
        for point in range(count_operations(source, destination, format, die)):
            with pytest.raises(KilledError):
                attempt(source, destination, format, Disk(point, die))
            check(source, destination, format, point)
            remove(destination)
            points += 1
    record_property("fault_points", points)
    print(f"{format}: killed at {points} operations")
    assert points >= 40


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("fault", [fill_up, write_half])
def test_a_disk_that_refuses_any_operation_leaves_no_dataset_or_a_whole_one(
    tmp_path: Path,
    source: Path,
    format: str,
    fault: Fault,
    record_property: Callable[[str, object], None],
) -> None:
    points = 0
    for destination in destinations(tmp_path, format):
        for point in range(count_operations(source, destination, format, fault)):
            try:
                attempt(source, destination, format, Disk(point, fault))
            except FormatError as error:
                assert "failed: " in error.what, error  # noqa: PT017
            check(source, destination, format, point)
            remove(destination)
            points += 1
    record_property("fault_points", points)
    print(f"{format}: refused at {points} operations")
    assert points >= 5
