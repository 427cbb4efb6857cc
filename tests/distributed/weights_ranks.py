"""`torchrun -m tests.distributed.weights_ranks JOBS.json OUT`: logits of models that start from Hugging Face weights.

JOBS.json is a list of [port, name, folder, tp, pp, sequences]; each writes OUT/<name>.npy, float32 [tokens, vocabulary]
of one packed row.
"""

from __future__ import annotations

import json
import os
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

from harness.megatron.batch import to_device
from harness.megatron.job import join, runtime
from harness.megatron.model.gpt import build_model
from harness.megatron.weights import find_pretrained
from harness.plan.hf_config import read_hf_config
from harness.plan.layout import ParallelConfig
from harness.plan.model import ModelConfig
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch


def logits(folder: str, *, tp: int, pp: int, sequences: list[list[int]]) -> np.ndarray | None:
    """Return the logits of every model token of a row on the first rank of the last stage, None elsewhere."""
    found = read_hf_config(Path(folder))
    model = replace(ModelConfig(), max_sequence_length=64, init_from=folder, **found.settings)
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    layout = join(parallel, torch.distributed.get_world_size())
    pretrained = find_pretrained(model)
    assert pretrained is not None
    device = torch.device("cpu")
    chunks = build_model(
        model, parallel, vocab_size=pretrained.vocab_size, device=device, fill=pretrained.filler(layout)
    )
    views = [SequenceView(np.array(ids, np.int32), np.zeros(len(ids), np.uint8)) for ids in sequences]
    row = build_thd_batch(views, pad_to_multiple=parallel.pad_to_multiple)
    kept: list[torch.Tensor] = []

    def forward(rows: Iterator[ThdBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
        tensors = to_device(next(rows), device)
        output = chunk(
            input_ids=tensors.tokens,
            position_ids=tensors.position_ids,
            attention_mask=None,
            labels=None,
            packed_seq_params=tensors.packed_seq_params,
        )
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
    return kept[0].numpy()[:, : pretrained.vocab_size] if kept and layout.tp_rank == 0 else None


if __name__ == "__main__":
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port, name, folder, tp, pp, sequences in json.loads(Path(sys.argv[1]).read_text()):
        os.environ["MASTER_PORT"] = str(port)
        with runtime.start("cpu", timeout_s=60):
            result = logits(folder, tp=tp, pp=pp, sequences=sequences)
            if result is not None:
                np.save(Path(sys.argv[2]) / f"{name}.npy", result)
