"""Small chat files that claim much: our own errors, within memory that is limited by the system and not by us."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.formats.jsonl import pack_of_line
from harness.prep.sources import read_chunks, tables

# Imports alone take up to 1.5 GB of addresses, nearly all of them unused.
_CHILD = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from harness.errors import HarnessError
from harness.formats import open_dataset
from harness.loader.live.folder import LiveChunk
from harness.prep.sources import read_chunks
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
resource.setrlimit(resource.RLIMIT_DATA, (700 << 20, 700 << 20))
for read in (
    lambda: [one for chunk in read_chunks([path]) for one in chunk.parse()],
    lambda: LiveChunk(path, None).conversation(0),
    lambda: list(open_dataset(path)),
):
    try:
        read()
    except HarnessError as error:
        assert error.fix
        print(error.what)
    else:
        print("read")
"""


def whats_of(path: Path) -> list[str]:
    """Read a file as chats, as a live chunk and as packs, in a process of limited memory; returns the errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_parquet_of_500_bytes_with_a_conversation_of_millions_of_turns_is_refused(tmp_path: Path) -> None:
    turns = pa.nulls(1 << 23, pa.struct([("role", pa.string()), ("content", pa.string())]))
    table = pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, 1 << 23], pa.int32()), turns)})
    pq.write_table(table, tmp_path / "chats.parquet", write_statistics=False, store_schema=False)
    assert (tmp_path / "chats.parquet").stat().st_size < 700
    chats, live, packs = whats_of(tmp_path / "chats.parquet")
    assert chats.startswith("the column messages.list.element.role claims 8,388,608 values, at most 4,194,304 can")
    assert live == chats
    assert packs.startswith("lacks the column input_ids")


@pytest.mark.parametrize("unit", [b"[],", b'"ab",'], ids=["lists", "texts"])
def test_a_line_of_60_mb_is_refused_before_it_is_parsed(tmp_path: Path, unit: bytes) -> None:
    for name in (b"messages", b"input_ids"):
        line = b'{"' + name + b'":[' + unit * (60_000_000 // len(unit)) + b"0]}\n"
        (tmp_path / "rows.jsonl").write_bytes(line)
        chats, live, packs = whats_of(tmp_path / "rows.jsonl")
        assert chats == "the line is longer than 32 MiB"
        assert live == f"the conversation is {len(line):,} bytes long, more than 33,554,432"
        assert "quotes and brackets, more than lists of numbers need" in packs


def test_a_row_group_of_many_regular_conversations_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Their roles take few bytes, a field that no turn has takes none.
    monkeypatch.setattr(tables, "_FREE_VALUES", 1000)
    turns = [
        {"role": role, "content": f"{role} {place}", "name": None}
        for place in range(5)
        for role in ("user", "assistant")
    ]
    schema = pa.schema([("messages", pa.list_(pa.struct([(name, pa.string()) for name in turns[0]])))])
    rows = [[turn | {"content": f"{turn['content']} {row}"} for turn in turns] for row in range(2000)]
    pq.write_table(pa.table({"messages": rows}, schema), tmp_path / "chats.parquet", compression="zstd")
    group = pq.read_metadata(tmp_path / "chats.parquet").row_group(0)
    assert min(group.column(place).total_compressed_size for place in range(3)) * 16 < 20_000
    assert sum(len(list(chunk.parse())) for chunk in read_chunks([tmp_path / "chats.parquet"])) == 2000


def test_a_packed_line_of_other_tools_may_name_its_samples() -> None:
    line = b'{"input_ids":[1,2],"labels":[-100,2],"lengths":[2],"names":[' + b'"a",' * 5000 + b'"b"]}'
    assert len(pack_of_line(line)) == 2
