"""Ranks that train the same rows read them once, and an error of one rank is an error of all.

As a program on ranks, `DATASET OUT`: what every rank of a job gets from its feed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.errors import HarnessError
from harness.formats import Provenance, open_dataset
from harness.loader import Loader, LoaderConfig, RankLayout
from harness.loader.plan import PackSource
from harness.megatron.data.feed import Feed, LengthsOnly, readable
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.plan.layout import ParallelConfig
from harness.records import Pack
from harness.schedule import ScheduleConfig
from tests.samples.small_packs import batch_digest, write_packs

from .conftest import overrides_of, read_metrics, run_ranks, run_sft


def loader(source: object) -> Loader:
    return Loader(
        source,
        LoaderConfig(global_batch_size=6, num_workers=0),
        schedule=ScheduleConfig(max_tokens_per_rank=256),
        num_epochs=1,
    )


def test_tensor_parallel_ranks_get_what_the_first_of_them_reads_and_fail_together(dataset, tmp_path) -> None:
    out = tmp_path / "report"
    run_ranks(4, "test_feed", dataset / "train", out)
    report = [json.loads((tmp_path / f"report.{rank}").read_text()) for rank in range(4)]
    expected = [batch_digest(batch) for batch in loader(open_dataset(str(dataset / "train")))]
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


@pytest.mark.parametrize(
    "layout",
    [
        "parallel=cp2 schedule.max_tokens_per_rank=4600",
        "schedule.name=dynamic_context schedule.max_tokens_per_rank=4400",
    ],
)
def test_ranks_that_read_only_their_parts_of_rows_train_as_those_that_read_whole_rows(tmp_path, layout: str) -> None:
    random, packs = np.random.default_rng(0), []
    for _ in range(2):
        starts = np.array([0, 200, 500])
        packs.append(Pack(random.integers(0, 250, 9000), ~np.isin(np.arange(1, 9001) % 9000, starts), starts))
    provenance = Provenance(counts={"vocab_size": 256})
    path = write_packs(tmp_path / "data", packs, format="parquet", pack_size=9000, provenance=provenance)
    settings = ["trainer.steps=1", "trainer.eval_interval=0", "trainer.checkpoint_interval=0", "model.num_layers=1"]
    settings += ["loader.global_batch_size=2", "model.max_sequence_length=9000", "loader.num_workers=0"]
    places = {value: tmp_path / value for value in ("false", "true")}
    runs = [
        (overrides_of(path, place, *settings, *layout.split(), f"trainer.record_digests={value}"), str(place), None)
        for value, place in places.items()
    ]
    run_sft(2, tmp_path, runs)
    parts, whole = ([(line["loss"], line["grad_norm"]) for line in read_metrics(place)] for place in places.values())
    assert len(whole) == 1
    assert parts == whole


class Failing:
    """A dataset that one rank cannot read from its third global batch on."""

    def __init__(self, source: PackSource) -> None:
        self.source = source
        self.reads = 0
        self.pack_offsets = source.pack_offsets
        self.sequence_lengths = source.sequence_lengths
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: list[int]) -> list[Pack]:
        self.reads += 1
        if self.reads > 2:
            raise HarnessError("planted", where=f"read {self.reads}")
        return self.source.read(indices)


def main(dataset: Path, out: Path) -> None:
    source = open_dataset(str(dataset))
    report: dict[str, object] = {}
    with runtime.start("cpu", timeout_s=60) as job:
        parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
        layout = join(parallel, job.world_size)
        opened = []

        def make(source: PackSource) -> Loader:
            opened.append(source)
            return Loader(
                readable(source, layout),
                LoaderConfig(global_batch_size=6, num_workers=0),
                schedule=ScheduleConfig(max_tokens_per_rank=256),
                layout=RankLayout(dp_rank=layout.dp_rank, dp_size=layout.dp_size),
                num_epochs=1,
            )

        with Feed(lambda: make(source), device=job.device) as feed:
            report = {"rank": job.rank, "tp": layout.tp_rank, "digests": [batch_digest(batch) for batch in feed]}
        report["opened"] = len(opened)

        faulty = Failing(source) if job.rank == 2 else source
        got = 0
        try:
            for _ in Feed(lambda: make(faulty), device=job.device):
                got += 1
        except HarnessError as error:
            report |= {"got": got, "error": error.what}
        try:
            Feed(lambda: _refuse() if job.rank == 0 else make(source), device=job.device)
        except HarnessError as error:
            report["refused"] = error.what
        report["sum"] = float(_sum(job.device))
    with Path(f"{out}.{report['rank']}").open("w") as file:
        json.dump(report, file)


def _refuse() -> Loader:
    raise HarnessError("planted while opening")


def _sum(device: torch.device) -> torch.Tensor:
    """Still in step: a collective after the errors gives what it should."""
    one = torch.ones(1, device=device)
    torch.distributed.all_reduce(one)
    return one


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
