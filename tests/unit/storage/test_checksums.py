"""Checksums of a folder: every byte of its files, and of the file that lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import FormatError
from harness.storage import StoredFile, read_checksums
from harness.storage.checksums import (
    CHECKSUMS_FILE,
    digest_files,
    list_hash_problems,
    list_size_problems,
    share_of,
    write_checksums,
)


def folder_of_two(folder: Path) -> list[StoredFile]:
    (folder / "weights").write_bytes(bytes(1000))
    (folder / "notes").write_bytes(b"text")
    write_checksums(folder, digest_files(folder, ["weights", "notes"]))
    files = read_checksums(folder)
    assert files is not None
    return files


def test_what_was_written_is_read_back_and_has_no_problem_and_without_it_there_is_none(tmp_path: Path) -> None:
    assert read_checksums(tmp_path) is None
    files = folder_of_two(tmp_path)
    assert [(file.path, file.num_bytes) for file in files] == [("notes", 4), ("weights", 1000)]
    assert list_size_problems(tmp_path, files) == []
    assert list_hash_problems(tmp_path, files) == []


def test_every_flipped_bit_of_the_checksums_is_noticed(tmp_path: Path) -> None:
    folder_of_two(tmp_path)
    path = tmp_path / CHECKSUMS_FILE
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(FormatError, match="damaged"):
                read_checksums(tmp_path)


def test_a_missing_and_a_shortened_file_are_named_with_both_sizes(tmp_path: Path) -> None:
    files = folder_of_two(tmp_path)
    (tmp_path / "notes").unlink()
    (tmp_path / "weights").write_bytes(bytes(999))
    assert [problem.what for problem in list_size_problems(tmp_path, files)] == [
        "the file notes is missing, expected 4 bytes",
        "the file weights has 999 bytes, expected 1,000 bytes",
    ]


def test_a_flipped_bit_is_named_with_both_hashes(tmp_path: Path) -> None:
    files = folder_of_two(tmp_path)
    (tmp_path / "weights").write_bytes(bytes(500) + b"\x01" + bytes(499))
    now = digest_files(tmp_path, ["weights"])[0].xxh3
    assert [problem.what for problem in list_hash_problems(tmp_path, files)] == [
        f"the file weights has the hash {now}, expected {files[1].xxh3}"
    ]


@pytest.mark.parametrize("name", ["../weights", "/etc/passwd"])
def test_a_list_that_names_files_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    write_checksums(tmp_path, [StoredFile(name, 1, "0" * 16)])
    with pytest.raises(FormatError, match="outside the folder"):
        read_checksums(tmp_path)


def test_ranks_share_the_files_by_size_and_leave_none_out() -> None:
    files = [StoredFile(name, size, "") for name, size in (("a", 5), ("b", 90), ("c", 40), ("d", 50))]
    shares = [[file.path for file in share_of(files, rank, 2)] for rank in range(2)]
    assert shares == [["b", "a"], ["d", "c"]]
    assert share_of(files, 5, 6) == []
