"""Small datasets that the loader's tests share: the same packs in every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small_packs

from harness.formats import FORMATS, Provenance
from harness.records import Pack

WritePacks = Callable[..., Path]


def random_packs(count: int, *, seed: int, pack_size: int = 64) -> list[Pack]:
    """Packs of up to four sequences of 2 tokens or more; no two sequences of one seed are likely to be equal."""
    random = np.random.default_rng(seed)
    packs = []
    for _ in range(count):
        lengths = random.integers(2, pack_size // 4, random.integers(1, 5))
        starts = np.cumsum(lengths) - lengths
        mask = random.integers(0, 2, lengths.sum())
        mask[starts + lengths - 1] = 0
        packs.append(Pack(input_ids=random.integers(0, 500, lengths.sum()), loss_mask=mask, seq_start_id=starts))
    return packs


@pytest.fixture(scope="session")
def write_packs() -> WritePacks:
    """`write_packs(folder, count, format=..., seed=..., pack_size=..., packs_per_shard=..., tokenizer=...)`."""

    def write(
        folder: Path,
        count: int,
        *,
        format: str = "memmap",
        seed: int = 0,
        pack_size: int = 64,
        packs_per_shard: int | None = None,
        tokenizer: str = "",
    ) -> Path:
        provenance = Provenance(tokenizer=tokenizer, tokenizer_hash=tokenizer, counts={"vocab_size": 500})
        options = {"pack_size": pack_size, "packs_per_shard": packs_per_shard, "provenance": provenance}
        packs = random_packs(count, seed=seed, pack_size=pack_size)
        return small_packs.write_packs(folder, packs, format=format, rows_per_group=4, **options)

    return write


@pytest.fixture(scope="session")
def in_every_format(tmp_path_factory: pytest.TempPathFactory, write_packs: WritePacks) -> dict[str, Path]:
    """37 packs in shards of 8, by format."""
    place = tmp_path_factory.mktemp("formats")
    return {name: write_packs(place / name, 37, format=name, packs_per_shard=8) for name in FORMATS}
