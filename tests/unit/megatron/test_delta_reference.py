"""The CPU reference of the gated delta rule: transformers' path, and documents that stay apart."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as slow

from harness.megatron.model.scan_reference import causal_conv1d, chunk_gated_delta_rule

# Bounds on, one before and one after the edges of chunks of 32; documents of one token, and empty ones.
ROWS = [[32, 64], [31, 33], [33, 31, 1], [1, 1, 0, 70], [5], [1], [40, 2, 3, 31], [96, 0]]


def bounds_of(row: list[int]) -> torch.Tensor:
    return torch.tensor([0, *row]).cumsum(0)


def inputs_of(length: int, *, heads: int = 3, key: int = 5, value: int = 7) -> dict[str, torch.Tensor]:
    """Random inputs of type float64, the same for the same length."""
    torch.manual_seed(length)
    made = {name: torch.randn(1, length, heads, key, dtype=torch.float64) for name in ("q", "k")}
    made["v"] = torch.randn(1, length, heads, value, dtype=torch.float64)
    made["g"] = -2 * torch.rand(1, length, heads, dtype=torch.float64)
    made["beta"] = torch.rand(1, length, heads, dtype=torch.float64)
    return {name: each.requires_grad_() for name, each in made.items()}


def by_chunks(inputs: dict[str, torch.Tensor], row: list[int]) -> torch.Tensor:
    return chunk_gated_delta_rule(**inputs, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds_of(row))[0]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_packed_row_is_what_its_documents_are_alone(row) -> None:
    inputs = inputs_of(sum(row))
    alone, end = [], 0
    for length in filter(None, row):
        alone.append(by_chunks({name: each[:, end : end + length] for name, each in inputs.items()}, [length]))
        end += length
    torch.testing.assert_close(by_chunks(inputs, row), torch.cat(alone, dim=1), rtol=0, atol=1e-12)


def test_one_document_is_what_transformers_computes() -> None:
    inputs = {name: each.detach().float() for name, each in inputs_of(150).items()}
    right, _ = slow.torch_chunk_gated_delta_rule(
        *(inputs[name] for name in ("q", "k", "v")), g=inputs["g"], beta=inputs["beta"], use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(by_chunks(inputs, [150]), right, rtol=0, atol=1e-5)
    filters = torch.randn(21, 4)
    mixed = inputs["v"].flatten(2)
    right = slow.causal_conv1d_fn(mixed.transpose(1, 2), filters, None, activation="silu").transpose(1, 2)
    found, _ = causal_conv1d(mixed, filters, None, activation="silu", cu_seqlens=bounds_of([150]))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_bits_of_a_document_do_not_depend_on_the_others_not_even_on_their_nan(seed) -> None:
    chosen = random.Random(seed)
    row = [chosen.randint(1, 80) for _ in range(4)]
    own = chosen.randrange(4)
    start, stop = bounds_of(row)[own : own + 2].tolist()

    def run(others: float | None) -> list[torch.Tensor]:
        inputs = {name: each.detach().float() for name, each in inputs_of(sum(row)).items()}
        for each in inputs.values():
            if others is not None:
                each[:, :start], each[:, stop:] = others, others
            each.requires_grad_()
        found = by_chunks(inputs, row)[:, start:stop]
        return [found, *(part[:, start:stop] for part in torch.autograd.grad(found.sum(), list(inputs.values())))]

    for others in (0.5, float("nan"), float("inf")):
        assert all(torch.equal(one, other) for one, other in zip(run(None), run(others), strict=True))
