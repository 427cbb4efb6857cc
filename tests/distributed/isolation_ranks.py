"""`torchrun -m tests.distributed.isolation_ranks JOBS.json`: the isolation check with and without planted defects.

JOBS.json is a list of [port, name of a preset]; a line of JSON a preset goes to the file named by the second argument;
the third is the device, cpu where it is left out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from harness.config import compose_config
from harness.loader import RankLayout
from harness.megatron.batch import RowTensors, to_device
from harness.megatron.compat import packed_seq_params
from harness.megatron.job import join, runtime
from harness.megatron.model.gpt import build_model
from harness.parity.isolation import IsolationCheck, Prepare, sample_documents
from harness.plan.layout import ParallelConfig
from harness.plan.model import ModelConfig
from harness.plan.settings import SftConfig
from harness.thd import ThdBatch

VOCAB = 256
MODEL = ModelConfig(
    num_layers=4, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=4, init_std=0.2
)


def defects(layout: RankLayout, parallel: ParallelConfig, multiple: int) -> dict[str, Prepare]:
    """Return bugs that other trainers had, each as a change of a rank's batch; only those that the layout can have."""

    def on_row(change: Callable[[ThdBatch], ThdBatch]) -> Prepare:
        return lambda row, device, **slices: to_device(change(row), device, **slices)

    def bounds_dropped(row: ThdBatch, device: torch.device, **slices: int) -> RowTensors:
        tensors = to_device(row, device, **slices)
        if layout.pp_rank != parallel.pipeline_parallel_size // 2:
            return tensors  # the bug was in stages in the middle
        whole = torch.tensor([0, len(row)], dtype=torch.int32, device=device)
        params = packed_seq_params(cu_seqlens=whole, cu_seqlens_padded=None, max_seqlen=len(row))
        return replace(tensors, packed_seq_params=params)

    def positions_continue(row: ThdBatch) -> ThdBatch:
        return replace(row, position_ids=np.arange(len(row), dtype=np.int64))

    def slice_off_by_one(row: ThdBatch, device: torch.device, *, cp_size: int, cp_rank: int) -> RowTensors:
        chunk = np.concatenate(
            [
                np.arange(start, stop).reshape(2 * cp_size, -1)[[cp_rank + 1, 2 * cp_size - 1 - cp_rank]].reshape(-1)
                for start, stop in zip(row.cu_seqlens_padded[:-1], row.cu_seqlens_padded[1:], strict=True)
            ]
        )
        right = to_device(row, device, cp_size=cp_size, cp_rank=cp_rank)
        return replace(right, tokens=torch.from_numpy(row.tokens[chunk]).unsqueeze(0).to(device))

    def padding_attended(row: ThdBatch) -> ThdBatch:
        # The padding at the end of a document counts as part of the next document, which attends to it.
        bounds = row.cu_seqlens_padded.copy()
        bounds[1:-1] -= multiple
        keep = np.append(True, np.diff(bounds) > 0)
        return replace(row, cu_seqlens_padded=bounds[keep], cu_seqlens=row.cu_seqlens[keep])

    def label_crosses(row: ThdBatch) -> ThdBatch:
        labels, mask = row.labels.copy(), row.loss_mask.copy()
        last = int(row.cu_seqlens[1]) - 1
        labels[last], mask[last] = row.tokens[int(row.cu_seqlens_padded[1])], 1.0
        return replace(row, labels=labels, loss_mask=mask)

    def mask_shifted(row: ThdBatch) -> ThdBatch:
        return replace(row, loss_mask=np.roll(row.loss_mask, 1))

    planted: dict[str, Prepare] = {
        "cu_seqlens dropped": bounds_dropped,
        "positions not restarted": on_row(positions_continue),
        "padding attended": on_row(padding_attended),
        "label crosses a boundary": on_row(label_crosses),
        "mask shifted by one": on_row(mask_shifted),
    }
    if parallel.context_parallel_size > 1:
        planted["slice off by one chunk"] = slice_off_by_one
    return planted


def check(name: str, out: Path, device: str) -> None:
    parallel = compose_config("sft", SftConfig, [f"parallel={name}"]).parallel
    with runtime.start(device, timeout_s=60) as job:
        layout = join(parallel, job.world_size)
        dtype = "float32" if job.device.type == "cpu" else "bfloat16"
        # A layer at least for each virtual stage: pp4_vpp2 has eight of them.
        stages = parallel.pipeline_parallel_size * (parallel.virtual_pipeline_parallel_size or 1)
        model = replace(MODEL, dtype=dtype, num_layers=max(MODEL.num_layers, stages))
        chunks = build_model(model, parallel, vocab_size=VOCAB, device=job.device)
        multiple = int(np.lcm(parallel.pad_to_multiple, 4))
        checker = IsolationCheck(
            chunks,
            sample_documents(VOCAB),
            parallel=parallel,
            layout=layout,
            device=job.device,
            pad_to_multiple=multiple,
            vocab_size=VOCAB,
        )
        found = {"": checker.run()}
        found |= {defect: checker.run(prepare) for defect, prepare in defects(layout, parallel, multiple).items()}
    if job.rank == 0:
        with out.open("a") as file:
            file.write(json.dumps({"layout": name, "found": found}) + "\n")


if __name__ == "__main__":
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port, layout in json.loads(Path(sys.argv[1]).read_text()):
        os.environ["MASTER_PORT"] = str(port)
        check(layout, Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "cpu")
