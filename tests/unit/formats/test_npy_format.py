"""The legacy pickled format: read without running any code, written for `np.load`."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_packs import write_packs

from harness.errors import FormatError
from harness.formats import open_dataset
from harness.formats.layouts.npy import check_opcodes, unpickle_objects
from harness.records import Pack

ROWS: list[dict[str, Any]] = [
    {"input_ids": [1, 2, 300, 70_000, 5], "loss_mask": [0, 1, 0, 1, 0], "seq_start_id": [0, 3]},
    {"input_ids": [9], "loss_mask": [0], "seq_start_id": [0]},
]
PACKS = [Pack(row["input_ids"], row["loss_mask"], row["seq_start_id"]) for row in ROWS]


def save_pickle(path: Path, pickled: bytes, count: int) -> Path:
    """A `.npy` file of `count` objects around any pickle."""
    text = f"{{'descr': '|O', 'fortran_order': False, 'shape': ({count},), }}".ljust(117) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + pickled)
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", [list, np.array, lambda values: np.array(values, np.int64)])
def test_pickles_of_every_protocol_are_read(tmp_path: Path, protocol: int, kind: Any) -> None:
    rows = np.array([{key: kind(values) for key, values in row.items()} for row in ROWS], dtype=object)
    path = save_pickle(tmp_path / "data.npy", pickle.dumps(rows, protocol=protocol), 2)
    assert list(open_dataset(path)) == PACKS


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_numpy_1_and_numpy_2_pickles_are_read(tmp_path: Path, module: str) -> None:
    pickled = pickle.dumps(np.array(ROWS, dtype=object), protocol=2)
    pickled = pickled.replace(b"cnumpy._core.multiarray\n", b"c" + module.encode() + b"\n")
    assert list(open_dataset(save_pickle(tmp_path / "data.npy", pickled, 2))) == PACKS


def test_numpy_loads_our_files_as_python_lists_and_we_those_of_other_numbers(tmp_path: Path) -> None:
    write_packs(tmp_path / "data.npy", PACKS, format="npy", pack_size=8)
    loaded = np.load(tmp_path / "data.npy", allow_pickle=True)
    assert (loaded.shape, loaded.dtype) == ((2,), np.dtype("O"))
    assert loaded.tolist() == ROWS
    assert type(loaded[0]["input_ids"]) is list
    assert type(loaded[0]["input_ids"][2]) is int
    row = {"input_ids": [np.int64(4), np.int64(5)], "loss_mask": [1.0, 0.0], "seq_start_id": [0]}
    np.save(tmp_path / "data.npy", [row], allow_pickle=True)  # type: ignore[arg-type]
    assert list(open_dataset(tmp_path / "data.npy")) == [Pack([4, 5], [1, 0], [0])]
    check_opcodes(pickle.dumps(list(range(-300, 70_000, 7)), protocol=2))


class Payload:
    """Pickles as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def payloads(marker: Path) -> dict[str, Any]:
    command = f"touch {marker}"
    return {
        "os.system": Payload(os.system, (command,)),
        "eval": Payload(eval, (f"__import__('os').system({command!r})",)),
        "getattr": Payload(getattr, ("", "join")),
        "pickle.loads": Payload(pickle.loads, (pickle.dumps(Payload(os.system, (command,))),)),
        "np.empty": Payload(np.empty, ((1 << 40,),)),
        "object array in a dict": {**ROWS[0], "input_ids": np.array([1, [2], Payload(os.system, (command,))], object)},
        "object array of objects": {**ROWS[0], "input_ids": np.array([1, None, 3], object)},
        "structured array": {**ROWS[0], "input_ids": np.zeros(2, [("a", "i4")])},
        "strings": {**ROWS[0], "input_ids": ["a", "b"]},
        "text array": {**ROWS[0], "input_ids": np.array(["a", "b"])},
        "nested lists": {**ROWS[0], "input_ids": [[1, 2], [3]]},
        "two dimensions": {**ROWS[0], "input_ids": np.zeros((2, 2), np.int32)},
        "no dict": [1, 2, 3],
        "missing field": {"input_ids": [1], "loss_mask": [0]},
        "huge number": {**ROWS[0], "input_ids": [1 << 70, 2, 3, 4, 5]},
        "number past int32": {**ROWS[0], "input_ids": [1 << 31, 2, 3, 4, 5]},
        "fractions": {**ROWS[0], "loss_mask": [0.5, 0, 0, 0, 0]},
        "not a number": {**ROWS[0], "loss_mask": [float("nan"), 0, 0, 0, 0]},
        "lengths differ": {**ROWS[0], "loss_mask": [0, 1]},
    }


@pytest.mark.parametrize("name", payloads(Path("x")))
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_hostile_pickle_is_an_error_and_runs_nothing(tmp_path: Path, name: str, protocol: int) -> None:
    marker = tmp_path / "ran"
    rows = np.empty(1, object)
    rows[0] = payloads(marker)[name]
    path = save_pickle(tmp_path / "data.npy", pickle.dumps(rows, protocol=protocol), 1)
    with pytest.raises(FormatError):
        open_dataset(path)
    assert not marker.exists()


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
HUGE_SHAPE = RECONSTRUCT + b"cnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01J\xff\xff\xff\x7f\x85"
HUGE_SHAPE += b"cnumpy\ndtype\nX\x02\x00\x00\x00i4\x89\x88\x87R" + b"\x89C\x00tb."


@pytest.mark.parametrize(
    ("message", "pickled"),
    [
        ("not an array of packed samples", RECONSTRUCT + b"cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85C\x01b\x87R."),
        ("reconstructs something other", RECONSTRUCT + b"cnumpy\ndtype\nK\x00\x85C\x01b\x87R."),
        ("calls numpy.ndarray", b"cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85\x85R."),
        ("sets the state of a function", RECONSTRUCT + b"N}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b."),
        ("sets the state of a function", b"cnumpy\nndarray\n}X\x01\x00\x00\x00aK\x01sb."),
        ("with other bytes", HUGE_SHAPE),
        ("claims LONG_BINPUT 2,147,483,647", b"]r\xff\xff\xff\x7f."),
        ("but only 1 remain", b"\x8e" + struct.pack("<Q", 1 << 60) + b"."),
        ("but only 1 remain", b"X\xff\xff\xff\x7f."),
        ("claims FRAME 1,152,921,504,606,846,976", b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"]."),
        ("uses opcode", b"\x8b\xff\xff\xff\x7f."),
        ("uses opcode", b"Pname\n."),
        ("uses opcode", b"(ios\nsystem\n."),
        ("is damaged", b"t."),
        ("not enough data", b"](K\x01K"),
        ("is truncated", b"](K\x01"),
        ("no newline found", b"c" + b"a" * 5000),
    ],
)
def test_crafted_opcodes_are_refused(message: str, pickled: bytes) -> None:
    with pytest.raises(FormatError, match=message):
        unpickle_objects(pickled)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("{'descr': '|O', 'fortran_order': False, 'shape': (99999999999,), }", "claims 99,999,999,999 packs"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", "claims 3 packs but contains 2"),
        ("{'descr': '<i4', 'fortran_order': False, 'shape': (3,), }", "expected a pickled list"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1, 2), }", "expected a pickled list"),
        ("__import__('os').system('true')", "header is damaged"),
    ],
)
def test_a_header_that_claims_something_else_is_an_error(tmp_path: Path, header: str, problem: str) -> None:
    text = header.ljust(117) + "\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()
    (tmp_path / "data.npy").write_bytes(data + pickle.dumps(np.array(ROWS, object)))
    with pytest.raises(FormatError, match=problem):
        open_dataset(tmp_path / "data.npy")
