"""Ranks that train the same rows read them once, and an error of one rank is an error of all."""

from __future__ import annotations

import json

import numpy as np

from harness.formats import open_dataset
from harness.loader import Loader, LoaderConfig
from harness.megatron.data.feed import LengthsOnly
from harness.schedule import ScheduleConfig

from .conftest import run_ranks


def loader(source: object) -> Loader:
    return Loader(
        source,
        LoaderConfig(global_batch_size=6, num_workers=0),
        schedule=ScheduleConfig(max_tokens_per_rank=256),
        num_epochs=1,
    )


def test_tensor_parallel_ranks_get_what_the_first_of_them_reads_and_fail_together(dataset, tmp_path) -> None:
    out = tmp_path / "report"
    run_ranks(4, "feed_ranks", dataset / "train", out)
    report = [json.loads((tmp_path / f"report.{rank}").read_text()) for rank in range(4)]
    expected = [batch.digest() for batch in loader(open_dataset(str(dataset / "train")))]
    assert len(expected) == 7
    for rank, entry in enumerate(report):
        assert entry["digests"] == expected
        assert entry["opened"] == (1 if entry["tp"] == 0 else 0)
        assert entry["got"] == 2
        assert entry["error"] == ("planted" if rank == 2 else "rank 2: planted")
        assert entry["refused"] == ("planted while opening" if rank == 0 else "rank 0: planted while opening")
        assert entry["sum"] == 4.0


def test_a_dataset_of_lengths_alone_gives_the_same_rows_but_for_their_tokens(dataset) -> None:
    source = open_dataset(str(dataset / "train"))
    for full, bare in zip(loader(source), loader(LengthsOnly(source)), strict=True):
        assert full.num_microbatches == bare.num_microbatches
        for row, empty in zip(full.rows, bare.rows, strict=True):
            for name in ("cu_seqlens", "cu_seqlens_padded", "position_ids", "padding_mask", "max_seqlen"):
                assert np.array_equal(getattr(row, name), getattr(empty, name)), name
            assert not empty.tokens.any()
            assert not empty.loss_mask.any()
            assert row.tokens.any()
