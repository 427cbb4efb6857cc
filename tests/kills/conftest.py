"""Inputs of the killed commands: datasets, token shards, chats, packed files of another tool."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counted_calls import Commands
from live_streams import some_packs, write_chats
from small_packs import write_packs

from harness.formats import convert_dataset

from .cases import Case, Whole


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("commands")) as server:
        yield server


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    for name, seed in (("packs", 0), ("other", 1)):
        write_packs(folder / name, some_packs(24, seed=seed), format="parquet", pack_size=64, packs_per_shard=10)
    convert_dataset(folder / "packs", folder / "store", format="virtual", packs_per_shard=10)
    convert_dataset(folder / "other", folder / "other-store", format="virtual", packs_per_shard=10)
    rows = [
        {name: getattr(pack, name).tolist() for name in ("input_ids", "loss_mask", "seq_start_id")}
        for pack in some_packs(24)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "training.idx.parquet")
    random = np.random.default_rng(0)
    for number, largest in enumerate((60_000, 80_000)):  # the second does not fit the uint16 that the first is kept in
        documents = [random.integers(0, largest, size).tolist() for size in random.integers(1, 400, 250)]
        pq.write_table(pa.table({"input_ids": documents}), folder / f"tokens-{number}.parquet")
    write_chats(folder / "chats.jsonl", 40)
    write_chats(folder / "more.jsonl", 40, seed=1)
    return folder


@pytest.fixture(scope="session")
def whole_of(commands: Commands, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Whole]:
    """whole_of(case): the case without a kill, run once."""
    made: dict[str, Whole] = {}

    def make(case: Case) -> Whole:
        if case.name not in made:
            made[case.name] = Whole(case, commands, inputs, tmp_path_factory.mktemp("case"))
        return made[case.name]

    return make


@pytest.fixture(scope="session")
def public(inputs: Path) -> Iterator[Path]:
    """A folder that any user can enter, with `inputs` in it; the folders of pytest are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="harness-tests-"))
    folder.chmod(0o755)
    shutil.copytree(inputs, folder / "inputs")
    (folder / "inputs").chmod(0o755)
    yield folder
    shutil.rmtree(folder)
