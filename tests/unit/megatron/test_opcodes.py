"""Small files of a checkpoint that claim much: refused from their opcodes, before anything is loaded."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.errors import CheckpointError
from harness.megatron.state.loading import _Reader, read_metadata
from harness.megatron.state.opcodes import check_archive, check_pickle


def pairs(levels: int, make: bytes) -> bytes:
    """Opcodes of a value that holds the one before it twice, `levels` times."""
    halves = b"".join(b"h%ch%c%bq%c" % (level, level, make, level + 1) for level in range(levels))
    return b"K\x01\x85q\x00" + halves


HOSTILE = {
    "tuples of two references to the one before": (b"\x80\x02" + pairs(40, b"\x86") + b".", "refer to more than"),
    # The C unpickler hashes the key while it loads.
    "the same as a key": (b"\x80\x02}" + pairs(40, b"\x86") + b"K\x01s.", "refer to more than"),
    "lists filled by reference": (
        b"\x80\x02]q\x00" + b"".join(b"]q%c(h%ch%ce" % (level + 1, level, level) for level in range(40)) + b".",
        "refer to more than",
    ),
    "one long tuple, in one that names it often": (
        b"\x80\x02(" + b"K\x01" * 4000 + b"tq\x00(" + b"h\x00" * 4000 + b"t.",
        "refer to more than",
    ),
    "a list that contains itself": (b"\x80\x02]q\x00h\x00a.", "changes a value that it did not create"),
    "nesting": (b"\x80\x02" + b"]" * 1000 + b"a" * 999 + b".", "nests values more than 64 deep"),
    "a memo of gigabytes": (b"\x80\x02K\x01r\xff\xff\xff\x7f.", "memoizes value 2,147,483,647 after 0"),
    "bytes of gigabytes": (b"\x80\x04\x8e" + (1 << 33).to_bytes(8, "little") + b"x.", "expected 8589934592 bytes"),
    "a huge number": (b"\x80\x02\x8b" + (1 << 16).to_bytes(4, "little") + b"\x7f" * (1 << 16) + b".", "a number of 5"),
    "a value twice on the stack": (b"\x80\x02K\x012\x86.", "uses the opcode DUP"),
}


@pytest.mark.parametrize(("data", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_metadata_that_claims_more_than_its_bytes_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem) as error:
        read_metadata(io.BytesIO(data), Path("/checkpoint"))
    assert ".metadata" in error.value.what
    assert error.value.fix


def test_a_flipped_bit_anywhere_in_a_file_of_torch_is_found_by_comparing_or_changes_nothing() -> None:
    saved, value = io.BytesIO(), {"weights": torch.arange(6.0), "steps": [1, "x"]}
    torch.save(value, saved)
    data, refused = bytearray(saved.getvalue()), 0
    for place in range(len(data)):
        bit = 1 << place % 8
        data[place] ^= bit
        file = io.BytesIO(bytes(data))
        data[place] ^= bit
        try:
            check_archive(file, compare=True)
            loaded = torch.load(file, weights_only=True)
        except pickle.UnpicklingError:
            refused += 1
        else:
            assert torch.equal(loaded["weights"], value["weights"]), place
            assert loaded["steps"] == value["steps"], place
    assert refused > len(data) // 3


@pytest.mark.parametrize("record", range(7))
def test_a_record_that_is_marked_as_a_folder_is_found_by_comparing(record: int) -> None:
    """Torch would take its values from memory that nothing has written."""
    saved = io.BytesIO()
    torch.save(torch.arange(6.0), saved)
    data, header = bytearray(saved.getvalue()), -1
    for _ in range(record + 1):
        header = data.index(b"PK\x01\x02", header + 1)
    data[header + 38] ^= 1 << 4  # in the directory of the archive, an attribute of MS-DOS
    with pytest.raises(pickle.UnpicklingError):
        check_archive(io.BytesIO(bytes(data)), compare=True)


def archive(value: Any, *, pickled: bytes = b"", method: int = zipfile.ZIP_STORED) -> io.BytesIO:
    """A file of torch.save, written again with another pickle or compressed."""
    saved, out = io.BytesIO(), io.BytesIO()
    torch.save(value, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(out, "w", method) as target:
        for name in source.namelist():
            target.writestr(name, pickled if pickled and name.endswith("data.pkl") else source.read(name))
    return io.BytesIO(out.getvalue())


def test_files_as_torch_saves_them_pass() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    shared = (1, "two", 3.0, None, True)
    values: list[Any] = [
        {"groups": [{"lr": 1.0, "betas": shared, "again": shared}], "step": torch.tensor(3)},
        model.state_dict(),
        [torch.zeros(3, dtype=dtype) for dtype in (torch.bfloat16, torch.uint16, torch.float8_e4m3fn)],
        OrderedDict(model.named_parameters()),
        torch.Size([1, 2]),
    ]
    for value in values:
        file = archive(value)
        check_archive(file)
        torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (archive(torch.zeros(1 << 20), method=zipfile.ZIP_DEFLATED), "records claim 4,194,"),
        (archive(0, pickled=b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R."), "it calls 'builtins bytearray'"),
        (archive(0, pickled=b"\x80\x02ctorch.storage\nUntypedStorage\nJ\x00\x00\x00\x40\x85R."), "UntypedStorage'"),
        (archive(0, pickled=b"\x80\x02" + pairs(40, b"\x86") + b"."), "refer to more than"),
        (io.BytesIO(pickle.dumps({"step": 1})), "not written by torch.save"),
        (io.BytesIO(b"PK\x03\x04" + bytes(100)), "PytorchStreamReader failed"),
    ],
)
def test_a_file_that_torch_would_expand_is_refused(file: io.BytesIO, problem: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=problem):
        check_archive(file)


def test_each_stored_tensor_is_checked_before_torch_reads_it(tmp_path: Path) -> None:
    bomb = archive(torch.zeros(1 << 20), method=zipfile.ZIP_DEFLATED).getvalue()
    (tmp_path / "__0_0.distcp").write_bytes(b"before" + bomb)
    stored: Any = type("Stored", (), {"offset": 6, "length": len(bomb), "relative_path": "__0_0.distcp"})
    reader = _Reader(str(tmp_path), None)  # type: ignore[arg-type]
    with (tmp_path / "__0_0.distcp").open("rb") as file, pytest.raises(pickle.UnpicklingError, match="records claim"):
        reader._slice_file(file, stored)


def test_values_that_are_shared_once_a_tensor_pass() -> None:
    size = torch.Size([512, 4096])
    check_pickle(pickle.dumps({f"weight.{number}": [size, size, size] for number in range(5000)}))
