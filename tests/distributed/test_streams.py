"""Megatron-LM's calls of its packing scheduler give every rank the rows that the loader plans.

As a program on ranks, `JOBS.json DATASET OUT`: every rank makes the calls of Megatron-LM's training loop and compares
their rows with those that the loader plans.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from harness.errors import FormatError, HarnessError
from harness.formats import open_dataset
from harness.integrations.megatron_lm.data_schedule import (
    get_batch_on_this_rank_for_sequence_packing,
    wrap_data_iterator,
)
from harness.integrations.megatron_lm.data_schedule_utils import FIELDS, samples_of_pack
from harness.loader import Loader, LoaderConfig, RankLayout
from harness.megatron.batch import RowTensors, to_device
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.plan.layout import ParallelConfig
from harness.records import Pack
from harness.schedule import ScheduleConfig, schedule
from harness.thd import context_parallel_indices

from .conftest import run_jobs
from .forked import jobs_of

TWO = [
    ({}, "dp_balanced"),
    ({"tensor_parallel_size": 2, "sequence_parallel": True}, "cost_balanced"),
    ({"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}, "dp_balanced"),
    ({"context_parallel_size": 2}, "dp_balanced"),
    ({}, "default_dynamic_cp"),
]
FOUR = [
    ({}, "cost_balanced"),
    ({}, "default_dynamic_cp"),
    ({"context_parallel_size": 2}, "default_dynamic_cp"),
    ({"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}, "default_dynamic_cp"),
    ({"tensor_parallel_size": 2, "sequence_parallel": True}, "default_dynamic_cp"),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}, "dp_balanced"),
    ({"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}, "dp_balanced"),
]
FOUR_MORE = [
    ({"pipeline_parallel_size": 4}, "dp_balanced"),
    ({"tensor_parallel_size": 2}, "dp_balanced"),
    ({"context_parallel_size": 2, "pipeline_parallel_size": 2}, "cost_balanced"),
]


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [(2, TWO), *(pytest.param(4, four, marks=pytest.mark.nightly) for four in (FOUR, FOUR_MORE))],
    ids=["two ranks", "four ranks", "four ranks, other layouts"],
)
def test_rows_of_a_stream_are_those_of_the_plan_and_a_broken_stream_stops_every_rank(dataset, tmp_path, ranks, layouts):
    out = tmp_path / "report"
    run_jobs(ranks, "test_streams", tmp_path, layouts, dataset / "train", out)
    for rank in range(ranks):
        report = [json.loads(line) for line in Path(f"{out}.{rank}").read_text().splitlines()]
        assert [(one["layout"], one["schedule"]) for one in report] == layouts
        for one in report:
            assert one["different"] == [], one
            assert one["rows"] >= 3, one
            assert one["ended"], one
            if one["schedule"] == "default_dynamic_cp":
                assert {1, 2} <= {*one["sizes"]}, one
            else:
                assert one["error"] == ("planted" if rank == 0 else "rank 0: planted"), one
                layout = one["layout"]
                shares = "tensor_parallel_size" in layout and "virtual_pipeline_parallel_size" not in layout
                seen = "pack 3 is damaged" if rank % 2 == 0 else f"rank {rank - 1}: pack 3 is damaged"
                assert one.get("unreadable") == (seen if shares else None), one


PACKS = 8


def differences(got: tuple[Any, ...], expected: RowTensors, *, is_first: bool, is_last: bool) -> list[str]:
    """The names of what one microbatch has other than the plan."""
    tokens, labels, loss_mask, attention_mask, position_ids, params, padding_mask = got
    wrong = [] if attention_mask is None else ["attention_mask"]
    wrong += [] if torch.equal(padding_mask, expected.padding_mask) else ["padding_mask"]
    for name, value, wanted in (
        ("tokens", tokens, is_first),
        ("position_ids", position_ids, is_first),
        ("labels", labels, is_last),
        ("loss_mask", loss_mask, is_last),
    ):
        planned = getattr(expected, name)
        same = value is not None and value.dtype == planned.dtype and torch.equal(value, planned)
        wrong += [] if (same if wanted else value is None) else [name]
    planned = expected.packed_seq_params
    padded = planned.cu_seqlens_q if planned.cu_seqlens_q_padded is None else planned.cu_seqlens_q_padded
    for name, bounds in (
        ("cu_seqlens_q", planned.cu_seqlens_q),
        ("cu_seqlens_kv", planned.cu_seqlens_q),
        ("cu_seqlens_q_padded", padded),
        ("cu_seqlens_kv_padded", padded),
    ):
        value = getattr(params, name)
        wrong += [] if value.dtype == torch.int32 and torch.equal(value, bounds) else [name]
    longest = (params.max_seqlen_q, params.max_seqlen_kv)
    wrong += [] if longest == (planned.max_seqlen_q,) * 2 and type(longest[0]) is int else ["max_seqlen"]
    return wrong + ([] if params.qkv_format == "thd" else ["qkv_format"])


def stream(packs: list[Pack], layout: RankLayout, *, steps: int, broken: bool = False) -> Iterator[Any]:
    """This rank's microbatches of each global batch, in order, in the three forms that Megatron's datasets have."""
    share = PACKS // layout.dp_size
    for step in range(steps):
        if broken and step == 1:
            raise HarnessError("planted", where="stream")
        start = step * PACKS + layout.dp_rank * share
        for number, pack in enumerate(packs[start : start + share]):
            samples = samples_of_pack(pack, pad_to_multiple=layout.pad_to_multiple)
            if number % 2 == 0:
                yield samples
                continue
            ends = {name: np.cumsum([0, *(int(one[name]) for one in samples)]) for name in samples[0] if "len" in name}
            joined = {name: torch.cat([one[name] for one in samples])[None] for name in samples[0] if "len" not in name}
            bounds = torch.tensor(ends["original_seq_len"])[None], torch.tensor(ends["padded_seq_len"])[None]
            yield {**joined, "cu_seqlens": bounds[0], "cu_seqlens_padded": bounds[1]}


def unreadable() -> Iterator[Any]:
    raise FormatError("pack 3 is damaged", where="shard 1")
    yield


def compare(parallel: ParallelConfig, name: str, dataset: str) -> dict[str, Any]:
    settings = ScheduleConfig(name=name, max_tokens_per_rank=256)
    with runtime.start("cpu", timeout_s=60) as job:
        layout = join(parallel, job.world_size)
        reader = open_dataset(dataset)
        packs = [reader[index] for index in range(3 * PACKS)]
        planned = Loader(
            reader,
            LoaderConfig(global_batch_size=PACKS, num_workers=0, shuffle=False),
            schedule=settings,
            layout=layout,
            num_steps=3,
        )
        share = PACKS // layout.dp_size
        report: dict[str, Any] = {"rank": job.rank, "rows": 0, "different": []}
        virtual = parallel.virtual_pipeline_parallel_size
        # The fields of a TransformerConfig that Megatron's own scheduler reads.
        config = SimpleNamespace(
            sequence_packing_scheduler=name,
            max_seqlen_per_dp_cp_rank=256,
            virtual_pipeline_model_parallel_size=virtual,
            microbatch_group_size_per_vp_stage=layout.group_size,
            sequence_parallel=parallel.sequence_parallel,
            pipeline_model_parallel_layout=None,
            mtp_num_layers=None,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp", "dp", "dp_cp"])
        reads = layout.tp_rank == 0 and layout.needs_tokens

        def source(**options: Any) -> Any:
            mine = stream(packs, layout, steps=3, **options) if reads else None
            return mine if virtual is None else [mine] * virtual

        mine = source()
        for step, batch in enumerate(planned):
            # Megatron's loop gives the groups; its helper scripts leave them out.
            pg_collection = groups if step % 2 == 0 else None
            iterator, count, total, squared = wrap_data_iterator(mine, config, share, pg_collection)
            lengths = np.concatenate([pack.sequence_lengths - 1 for pack in reader.read(batch.pack_ids.tolist())])
            padded = -(-lengths.astype(np.int64) // layout.pad_to_multiple) * layout.pad_to_multiple
            if (count, total, squared) != (batch.num_microbatches, float(padded.sum()), float((padded**2).sum())):
                report["different"].append([count, total, squared])
            if (type(count), type(total), type(squared)) != (int, float, float):
                report["different"].append("types")
            for stage, rows in enumerate(iterator if virtual else [iterator]):
                is_first = layout.is_first_stage and stage == 0
                is_last = layout.is_last_stage and stage == (virtual or 1) - 1
                kept = None if rows is None else [next(rows) for _ in range(count)]
                # The scheduler's own tests in Megatron-LM find all four fields at both ends of a pipeline.
                wanted = FIELDS.keys() if is_first or is_last else set()
                report["different"] += ["fields" for row in kept or () if FIELDS.keys() & row.keys() != wanted]
                rows = None if kept is None else iter(kept)
                for row in batch.rows:
                    got = get_batch_on_this_rank_for_sequence_packing(
                        rows,
                        vpp_size=virtual,
                        mtp_on_this_rank=False,
                        vp_stage=stage if virtual else None,
                        pg_collection=pg_collection,
                    )
                    expected = to_device(row, job.device, cp_size=layout.cp_size, cp_rank=layout.cp_rank)
                    report["rows"] += 1
                    report["different"] += differences(got, expected, is_first=is_first, is_last=is_last)
        try:
            wrap_data_iterator(mine, config, share, groups)
        except StopIteration:
            report["ended"] = True
        broken = source(broken=job.rank == 0)
        wrap_data_iterator(broken, config, share, groups)
        try:
            wrap_data_iterator(broken, config, share, groups)
        except HarnessError as error:
            report["error"] = error.what
        if layout.tp_size > 1 and virtual is None:
            try:
                get_batch_on_this_rank_for_sequence_packing(unreadable() if reads else None)
            except HarnessError as error:
                report["unreadable"] = error.what
    return report


def compare_shared(parallel: ParallelConfig, name: str, dataset: str) -> dict[str, Any]:
    """Compare rows of dynamic context parallelism with the samples that the schedule places in them."""
    with runtime.start("cpu", timeout_s=60) as job:
        layout = join(parallel, job.world_size, shares_rows=True)
        packs = list(open_dataset(dataset))[: 3 * PACKS]
        ranks = layout.dp_size * layout.cp_size
        rank, pad_to = parallel_state.get_data_parallel_rank(with_context_parallel=True), 2 * ranks * layout.tp_size
        longest = max(int(pack.sequence_lengths.max()) - 1 for pack in packs)
        tokens = -(-longest // (2 * pad_to)) * pad_to
        virtual = parallel.virtual_pipeline_parallel_size
        config = SimpleNamespace(
            sequence_packing_scheduler=name,
            dynamic_context_parallel=True,
            max_seqlen_per_dp_cp_rank=tokens,
            virtual_pipeline_model_parallel_size=virtual,
            microbatch_group_size_per_vp_stage=layout.group_size,
            sequence_parallel=parallel.sequence_parallel,
        )
        layout = replace(layout, pad_to_multiple=pad_to)
        mine = stream(packs, layout, steps=3) if layout.tp_rank == 0 and layout.needs_tokens else None
        mine = mine if virtual is None else [mine] * virtual
        report: dict[str, Any] = {"rank": job.rank, "rows": 0, "different": [], "sizes": []}
        for step in range(3):
            iterator, count, *_ = wrap_data_iterator(mine, config, PACKS // layout.dp_size)
            batch = packs[step * PACKS : (step + 1) * PACKS]
            samples = [one for pack in batch for one in samples_of_pack(pack, pad_to_multiple=pad_to)]
            placed = schedule(
                "dynamic_context",
                [int(one["padded_seq_len"]) for one in samples],
                dp_size=ranks,
                max_tokens_per_rank=tokens,
                group_size=layout.group_size,
            )
            report["different"] += [] if count == placed.num_microbatches else [count]
            for stage, rows in enumerate(iterator if virtual else [iterator]):
                ends = layout.is_first_stage and stage == 0, layout.is_last_stage and stage == (virtual or 1) - 1
                for number in range(count):
                    got = get_batch_on_this_rank_for_sequence_packing(
                        rows, vpp_size=virtual, vp_stage=stage if virtual else None, dynamic_cp=True, config=config
                    )
                    own, size = [samples[i] for i in placed.row(number, rank)], placed.ranks_of_row(number, rank)
                    report["sizes"].append(size)
                    report["rows"] += 1
                    report["different"] += shared_differences(got, own, (size, rank % size), ends)
        try:
            wrap_data_iterator(mine, config, PACKS // layout.dp_size)
        except StopIteration:
            report["ended"] = True
    return report


def shared_differences(
    got: tuple[Any, ...], samples: list[Any], place: tuple[int, int], ends: tuple[bool, bool]
) -> list[str]:
    """The names of what a rank's part of a row has other than these samples."""
    values = dict(zip(("tokens", "labels", "loss_mask", "_", "position_ids"), got, strict=False))
    group = got[5].cp_group
    wrong = [] if got[5].local_cp_size == place[0] and (group is None or group.size() == place[0]) else ["cp_group"]
    wrong += [] if (group is None) == (place[0] == 1) else ["cp_group"]
    if not samples:
        mask = values["loss_mask"]
        return wrong + ([] if bool(got[6].all()) and (mask is None or not mask.any()) else ["empty"])
    padded = np.cumsum([0, *(int(one["padded_seq_len"]) for one in samples)])
    keep = torch.from_numpy(context_parallel_indices(padded, cp_size=place[0], cp_rank=place[1]))
    for name in FIELDS:
        whole = torch.cat([one[name] for one in samples])[keep][None]
        wanted = ends[0] if name in ("tokens", "position_ids") else ends[1]
        same = values[name] is not None and torch.equal(values[name], whole)
        wrong += [] if (same if wanted else values[name] is None) else [name]
    bounds = got[5].cu_seqlens_q_padded if got[5].cu_seqlens_q_padded is not None else got[5].cu_seqlens_q
    return wrong + ([] if bounds.tolist()[: len(padded)] == padded.tolist() else ["bounds"])


if __name__ == "__main__":
    for sizes, name in jobs_of(sys.argv[1]):
        run = compare_shared if name == "default_dynamic_cp" else compare
        result = {"layout": sizes, "schedule": name, **run(ParallelConfig(**sizes), name, sys.argv[2])}
        with Path(f"{sys.argv[3]}.{result['rank']}").open("a") as file:
            file.write(json.dumps(result) + "\n")
