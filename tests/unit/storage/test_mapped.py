from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.errors import FormatError
from harness.storage.arrays import map_npy
from harness.storage.files import bus_error_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SIGBUS is named on Linux")
READS = """
import sys
from pathlib import Path
import numpy as np
from harness.storage import name_bus_errors
from harness.storage.arrays import map_npy
name_bus_errors(dies=sys.argv[2] == "dies")
array = map_npy(Path(sys.argv[1]), np.dtype(np.int32))
print(array[0], flush=True)
input()
print(array[3000:].sum())
"""


@pytest.mark.parametrize(("ends", "code"), [("exits", 2), ("dies", -7)])
def test_a_process_that_reads_past_the_end_of_a_cut_file_names_it(tmp_path: Path, ends: str, code: int) -> None:
    path = tmp_path / "array.npy"
    np.save(path, np.arange(4000, dtype=np.int32))
    command = [sys.executable, "-c", READS, path, ends]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "0\n"
        os.truncate(path, 5000)
        out, errors = process.communicate("read\n")
    assert (process.returncode, out) == (code, "")
    assert errors.startswith(
        "FormatError: the file was truncated or removed, or its disk failed, while it was read: byte 12,"
    )
    assert f"\n  where: {path}\n  fix:   copy the file again" in errors


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_a_list_of_numbers_is_no_array_of_another_number_of_dimensions(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "array.npy", np.zeros(shape, np.int32))
    with pytest.raises(FormatError, match="holds int32"):
        map_npy(tmp_path / "array.npy", np.dtype(np.int32))


def test_the_cause_is_taken_from_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(20_000))
    with path.open("r+b") as file:
        data = mmap.mmap(file.fileno(), 0)
    address = np.frombuffer(data, np.uint8).ctypes.data
    error = bus_error_at(address + 9000)
    assert error.what.endswith("while it was read: byte 9,000 is missing")
    assert error.where == str(path)
    assert bus_error_at(8).what == "a memory page cannot be read"
