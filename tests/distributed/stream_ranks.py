"""`torchrun -m tests.distributed.stream_ranks JOBS.json DATASET OUT`: rows of the two-phase pipeline on every rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.errors import HarnessError
from harness.formats import open_dataset
from harness.loader import Loader, LoaderConfig, RankLayout
from harness.megatron.batch import RowTensors, to_device
from harness.megatron.data.two_phase import (
    get_batch_on_this_rank_for_sequence_packing,
    needs_data_iterator,
    wrap_data_iterator,
)
from harness.megatron.job import join, runtime
from harness.plan.layout import ParallelConfig
from harness.records import Pack
from harness.schedule import ScheduleConfig

PACKS = 8


def same(one: RowTensors, other: RowTensors, *, tokens: bool) -> bool:
    fields = ["position_ids", *(["tokens", "labels", "loss_mask"] if tokens else [])]
    left, right = one.packed_seq_params, other.packed_seq_params
    return (
        all(
            torch.equal(getattr(one, name), getattr(other, name))
            and getattr(one, name).dtype == getattr(other, name).dtype
            for name in fields
        )
        and left.cu_seqlens_q.tolist() == right.cu_seqlens_q.tolist()
        and left.cu_seqlens_q.dtype == torch.int32
        and (left.cu_seqlens_q_padded is None) == (right.cu_seqlens_q_padded is None)
        and (left.cu_seqlens_q_padded is None or torch.equal(left.cu_seqlens_q_padded, right.cu_seqlens_q_padded))
        and (type(left.max_seqlen_q), left.max_seqlen_q) == (int, right.max_seqlen_q)
    )


def stream(packs: list[Pack], layout: RankLayout, *, steps: int, broken: bool = False) -> Iterator[Pack]:
    """This rank's packs: of each global batch the part that is its own, in order."""
    share = PACKS // layout.dp_size
    for step in range(steps):
        if broken and step == 1:
            raise HarnessError("planted", where="stream")
        start = step * PACKS + layout.dp_rank * share
        yield from packs[start : start + share]


def compare(parallel: ParallelConfig, name: str, dataset: str) -> dict[str, Any]:
    schedule = ScheduleConfig(name=name, max_tokens_per_rank=256)
    with runtime.start("cpu", timeout_s=60) as job:
        layout = join(parallel, job.world_size)
        reader = open_dataset(dataset)
        packs = [reader[index] for index in range(3 * PACKS)]
        planned = Loader(
            reader,
            LoaderConfig(global_batch_size=PACKS, num_workers=0, shuffle=False),
            schedule=schedule,
            layout=layout,
            num_steps=3,
        )
        has_tokens = layout.is_first_stage or layout.is_last_stage
        share = PACKS // layout.dp_size
        report: dict[str, Any] = {"rank": job.rank, "rows": 0, "different": 0}

        def wrap(packs_of_rank: Iterator[Pack] | None) -> Any:
            return wrap_data_iterator(packs_of_rank, schedule, share, layout=layout, device=job.device)

        mine = stream(packs, layout, steps=3) if needs_data_iterator(layout) else None
        for batch in planned:
            wrapped = wrap(mine)
            model_tokens = np.concatenate([pack.sequence_lengths - 1 for pack in reader.read(batch.pack_ids.tolist())])
            sums = (int(model_tokens.sum()), int((model_tokens.astype(np.int64) ** 2).sum()))
            report["different"] += sums != (wrapped.seqlen_sum, wrapped.seqlen_squared_sum)
            report["different"] += wrapped.num_microbatches != batch.num_microbatches
            virtual = parallel.virtual_pipeline_parallel_size
            for iterator in wrapped.data_iterator if virtual else [wrapped.data_iterator]:
                for row in batch.rows:
                    got = get_batch_on_this_rank_for_sequence_packing(iterator, layout=layout, device=job.device)
                    expected = to_device(row, job.device, cp_size=layout.cp_size, cp_rank=layout.cp_rank)
                    report["rows"] += 1
                    report["different"] += not same(got, expected, tokens=has_tokens)
        report["ended"] = wrap(mine) is None
        broken = stream(packs, layout, steps=3, broken=job.rank == 0) if needs_data_iterator(layout) else None
        wrap(broken)
        try:
            wrap(broken)
        except HarnessError as error:
            report["error"] = error.what
    return report


if __name__ == "__main__":
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port, sizes, name in json.loads(Path(sys.argv[1]).read_text()):
        os.environ["MASTER_PORT"] = str(port)
        result = {"layout": sizes, "schedule": name, **compare(ParallelConfig(**sizes), name, sys.argv[2])}
        with Path(f"{sys.argv[3]}.{result['rank']}").open("a") as file:
            file.write(json.dumps(result) + "\n")
