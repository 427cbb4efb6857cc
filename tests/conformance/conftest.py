"""Datasets that every format is tested with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from small_packs import write_packs

from harness.formats import FORMATS, PackReader, open_dataset
from harness.records import Pack

PACK_SIZE = 16


@pytest.fixture(params=FORMATS)
def format_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def packs() -> list[Pack]:
    """Five packs: full, of one token, of one sequence, with the largest ids, with nothing trained."""
    return [
        Pack(
            input_ids=[5, 6, 7, 8, 9, 1, 2, 3, 4, 10, 11, 12, 13, 14, 15, 16],
            loss_mask=[0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0],
            seq_start_id=[0, 5, 9],
        ),
        Pack(input_ids=[3], loss_mask=[0], seq_start_id=[0]),
        Pack(input_ids=[100, 101, 102], loss_mask=[1, 1, 0], seq_start_id=[0]),
        Pack(input_ids=[2**31 - 1, 0, 2**31 - 1, 2**16], loss_mask=[1, 0, 1, 0], seq_start_id=[0, 2]),
        Pack(input_ids=[1, 2, 3, 4, 5], loss_mask=[0, 0, 0, 0, 0], seq_start_id=[0, 1, 2, 3, 4]),
    ]


@pytest.fixture
def write(tmp_path: Path, format_name: str) -> Callable[..., Path]:
    """Write packs in the format under test, two packs a shard; returns the folder."""

    def write(packs: Sequence[Pack], *, packs_per_shard: int = 2) -> Path:
        options = {"format": format_name, "pack_size": PACK_SIZE, "packs_per_shard": packs_per_shard}
        return write_packs(tmp_path / "data", packs, **options)

    return write


@pytest.fixture
def dataset(write: Callable[..., Path], packs: list[Pack]) -> Path:
    return write(packs)


@pytest.fixture
def reader(dataset: Path) -> Iterator[PackReader]:
    reader = open_dataset(dataset)
    yield reader
    reader.close()
