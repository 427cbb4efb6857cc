"""`torchrun -m tests.distributed.weights_ranks JOBS.json OUT`: logits of models that start from Hugging Face weights.

JOBS.json is a list of [port, name, folder, tp, pp, ep, etp, sequences]; each writes OUT/<name>.npy,
float32 [tokens, vocabulary] of one packed row. A folder may have `{rank}` in its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from harness.megatron.batch import run_row, to_device
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model.gpt import build_model
from harness.megatron.pretrained import find_pretrained
from harness.plan.hf_config import read_hf_config
from harness.plan.layout import ParallelConfig
from harness.plan.model import ModelConfig
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch

from .forked import jobs_of


def logits(folder: str, *, sizes: tuple[int, int, int, int], sequences: list[list[int]]) -> np.ndarray | None:
    """Return the logits of every model token of a row on the first rank of the last stage, None elsewhere."""
    found = read_hf_config(Path(folder))
    model = replace(ModelConfig(), max_sequence_length=64, init_from=folder, **found.settings)
    tp, pp, ep, etp = sizes
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        expert_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=tp > 1 and model.num_experts > 0,
    )
    layout = join(parallel, torch.distributed.get_world_size())
    pretrained = find_pretrained(model)
    device = torch.device("cpu")
    chunks = build_model(
        model, parallel, vocab_size=pretrained.vocab_size, device=device, fill=pretrained.filler(layout)
    )
    views = [SequenceView(np.array(ids, np.int32), np.zeros(len(ids), np.uint8)) for ids in sequences]
    row = build_thd_batch(views, pad_to_multiple=parallel.pad_to_multiple)
    kept: list[torch.Tensor] = []

    def forward(rows: Iterator[ThdBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
        tensors = to_device(next(rows), device)
        output = run_row(chunk, tensors, with_labels=False)
        if parallel_state.is_pipeline_last_stage():
            kept.append(gather_from_tensor_model_parallel_region(output).squeeze(0))
        return output, lambda given: (given.sum() * 0, torch.tensor(1), given.sum().detach().reshape(1))

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([row]),
            model=chunks[0],
            num_microbatches=1,
            seq_length=len(row),
            micro_batch_size=1,
            forward_only=True,
        )
    if not kept or layout.tp_rank:
        return None
    return kept[0].numpy()[~row.padding_mask, : pretrained.vocab_size]


if __name__ == "__main__":
    for name, folder, *sizes, sequences in jobs_of(sys.argv[1]):
        with runtime.start("cpu", timeout_s=60):
            folder = folder.format(rank=torch.distributed.get_rank())
            result = logits(folder, sizes=tuple(sizes), sequences=sequences)
            if result is not None:
                np.save(Path(sys.argv[2]) / f"{name}.npy", result)
