"""The rotary embedding of a packed row: Megatron's own figures, and as many kernels for many sequences as for few."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from torch.utils._python_dispatch import TorchDispatchMode

from harness.megatron.batch import to_device
from harness.megatron.compat import PackedRow
from harness.megatron.model.rotary import rotate
from harness.thd import build_thd_batch

from .conftest import make_sequence
from .test_packed_attention import losses_of

CPU = torch.device("cpu")
VIEWS = {"view", "_unsafe_view", "t", "transpose", "permute", "slice", "split", "split_with_sizes", "unsqueeze"}
VIEWS |= {"squeeze", "expand", "detach", "alias", "select", "as_strided", "reshape"}


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def kernels(self) -> int:
        return sum(count for name, count in self.calls.items() if name not in VIEWS)


def row_of(lengths: list[int], multiple: int = 1):
    return build_thd_batch(
        [make_sequence(length, seed) for seed, length in enumerate(lengths)], pad_to_multiple=multiple
    )


class OneOfTwo:
    """A context-parallel group of two, seen from one of its ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self._rank


class OneAlone(OneOfTwo):
    def size(self) -> int:
        return 1


@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_heads_and_their_gradients_equal_megatrons(chunks, cp_size, cp_rank, dtype) -> None:
    row = to_device(row_of([9, 40, 2, 17, 65], multiple=4), CPU, cp_size=cp_size, cp_rank=cp_rank)
    params = row.packed_seq_params
    model = chunks[0].module
    freqs = model.rotary_pos_emb(params.max_seqlen_q, packed_seq=True)
    heads = torch.randn(row.tokens.shape[1], 2, 16).to(dtype)
    ours, theirs = (heads.clone().requires_grad_() for _ in range(2))
    group = OneAlone(0) if cp_size == 1 else OneOfTwo(cp_rank)
    expected = apply_rotary_pos_emb(
        theirs, freqs[..., :16], config=model.config, cu_seqlens=params.cu_seqlens_q_padded, cp_group=group
    )
    assert isinstance(params, PackedRow)
    cos, sin = params.angles(freqs[..., :16], dtype, mscale=1.0)
    rotated = rotate(ours.unsqueeze(1), cos, sin).squeeze(1)
    assert torch.equal(rotated, expected)
    up = torch.randn(rotated.shape).to(dtype)
    rotated.backward(up)
    expected.backward(up)
    assert torch.equal(ours.grad, theirs.grad)


def test_the_number_of_kernels_does_not_depend_on_the_number_of_sequences(chunks) -> None:
    def count(lengths: list[int]) -> int:
        row = to_device(row_of(lengths), CPU)
        for layer in chunks[0].module.decoder.layers:
            layer.self_attention.core_attention = Attention()
        with Counted() as counted:
            losses_of(chunks, row).sum().backward()
        return counted.kernels

    few, many = count([64] * 8), count([9] * 57)
    assert few == many
    # 20 for the queries and keys of a layer, forward and backward, beside the whole rest of a small model.
    assert few < 400


class Attention(torch.nn.Module):
    """A core attention of one kernel a row, as Transformer Engine's is."""

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        shape = query.shape[1] // key.shape[1]
        return (query + (key + value).repeat_interleave(shape, dim=1)).flatten(1)
