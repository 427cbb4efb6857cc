"""A file of lines keeps whole lines on a disk that fills up in the middle of one."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import FormatError, HarnessError
from harness.train.lines import LineFile, describe_hole, keep_lines_before, read_sound_lines


class FullDisk(io.FileIO):
    """A file that takes ten bytes more and then no byte."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "ab")
        self.room = 10

    def write(self, data: object) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = super().write(memoryview(data)[: self.room])  # type: ignore[call-overload]
        self.room -= taken
        return taken


@pytest.fixture
def full(tmp_path: Path) -> Iterator[LineFile]:
    lines = LineFile(tmp_path / "metrics.jsonl", "the run's metrics")
    lines.append('{"step": 1}\n')
    lines.close()
    lines._file = FullDisk(tmp_path / "metrics.jsonl")
    yield lines
    lines.close()


def test_a_line_that_does_not_fit_is_refused_by_name_and_leaves_no_half(full: LineFile, tmp_path: Path) -> None:
    with pytest.raises(HarnessError) as refused:
        full.append('{"step": 2}\n')
    assert refused.value.what == "the run's metrics cannot be written: No space left on device"
    assert refused.value.where == str(tmp_path / "metrics.jsonl")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    "damaged", [b"[]", b"{}", b'{"step": "a"}', b'{"step": 1.0}', b'{"stex": 1}', b'{"step": \xb2}', b"[" * 100_000]
)
def test_a_damaged_line_is_named_and_stays(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damaged + b"\n")
    with pytest.raises(FormatError, match="line 2 is not a record of a step") as refused:
        keep_lines_before(path, 2)
    assert refused.value.where == str(path)
    assert path.read_bytes() == b'{"step": 1}\n' + damaged + b"\n"


def test_bytes_that_are_no_text_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"step": 1, "answer": "\xff "}\r\n{"step": 1}\n{"step": 2}\n')
    keep_lines_before(path, 2)
    assert path.read_bytes() == b'{"step": 1, "answer": "\xff "}\r\n{"step": 1}\n'


# Numbers that no status can show.
ODD = ("NaN", "-Infinity", "1e999", "1" + "0" * 400)


def test_damaged_lines_are_left_out_of_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"stex": 3}\n{"step": 4}\n{"st')
    assert [line.step for line in read_sound_lines(path)] == [1, 2, 4]
    assert [line.step for line in read_sound_lines(path, 3)] == [2, 4]
    path.write_text("".join(f'{{"step": 5, "{name}": {value}}}\n' for name in ("loss", "step_s") for value in ODD))
    assert read_sound_lines(path) == []


def test_lines_of_a_step_that_is_trained_again_are_removed_or_all_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    keep_lines_before(path, 2)
    assert path.read_text() == '{"step": 1}\n'
    lines = LineFile(path, "the run's metrics")
    lines.append('{"step": 2}\n')
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(HarnessError, match=r"metrics\.jsonl cannot be written: Input/output error"):
        keep_lines_before(path, 1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(HarnessError, match="the run's metrics cannot be written: Input/output error"):
        lines.sync()
    lines.close()
    with pytest.raises(HarnessError, match="the run's metrics cannot be written"):
        LineFile(tmp_path, "the run's metrics")


def test_steps_without_a_line_are_named_and_those_after_the_checkpoint_are_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert keep_lines_before(path, 1) == []
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 4, 5, 7)))
    kept = keep_lines_before(path, 7)
    assert kept == [1, 4, 5]
    assert "metrics.jsonl has no records of 3 of the trained steps 2 to 6: " in describe_hole(path, kept, range(1, 7))
    assert describe_hole(path, kept, range(4, 6)) == describe_hole(path, [], []) == ""
