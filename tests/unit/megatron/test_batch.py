"""Rows reach the device one ahead of the computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.megatron.batch import RowsAhead, padding_argument, to_device
from harness.megatron.job import join, runtime
from harness.megatron.model import build_model
from harness.plan import ModelConfig, ParallelConfig
from harness.records import SequenceView
from harness.thd import build_thd_batch


def row(length: int):
    return build_thd_batch([SequenceView(np.arange(length + 1, dtype=np.int32), np.ones(length + 1, dtype=np.uint8))])


def test_a_row_is_copied_before_the_one_before_it_is_computed() -> None:
    events = []

    def copy(one):
        events.append(f"copy {len(one)}")
        return to_device(one, torch.device("cpu"))

    rows = RowsAhead([row(3), row(4), row(5)], copy, None)
    for _ in range(3):
        arrays, tensors = rows.take()
        assert tensors.tokens[0].tolist() == arrays.tokens.tolist()
        events.append(f"compute {len(arrays)}")
    assert events == ["copy 3", "copy 4", "compute 3", "copy 5", "compute 4", "compute 5"]
    with pytest.raises(StopIteration):
        rows.take()


def test_rows_without_tensors_are_the_rows_themselves() -> None:
    given = [row(3), row(4)]
    assert list(RowsAhead(given, to_device, None)) == given


def test_every_tensor_of_a_row_is_known_to_the_stream_that_reads_it() -> None:
    tensors = to_device(row(3), torch.device("cpu"))
    assert len(tensors.all()) == 5 + 3  # cu_seqlens twice, for queries and for keys, and the positions


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_has_the_padding_of_its_own_tokens_on_every_stage(rank) -> None:
    """The first stage has that of the whole row, which Megatron cuts together with the embedded tokens."""
    parallel = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=2)
    experts = {"family": "qwen3_moe", "num_experts": 2, "expert_ffn_hidden_size": 8}
    model = ModelConfig(num_layers=2, hidden_size=16, ffn_hidden_size=16, **experts)
    mask = torch.arange(8).view(1, 8) >= 5
    with runtime.alone(rank, 4) as job:
        layout = join(parallel, 4)
        (chunk,) = build_model(model, parallel, vocab_size=32, device=job.device)
        given = padding_argument(chunk, mask)["padding_mask"]
    expected = mask if layout.is_first_stage else mask[:, 4 * layout.tp_rank : 4 * layout.tp_rank + 4]
    assert given.tolist() == expected.tolist()
