"""The CPU reference of Mamba-2: transformers' own path, and documents that stay apart."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from harness.megatron.model.scan_reference import GroupedRMSNorm, mamba_split_conv1d_scan_combined

# Bounds on, one before and one after the edges of chunks of 8; documents of one token; rows shorter than a chunk.
ROWS = [[8, 16], [7, 9], [9, 7, 1], [1, 1, 1, 20], [5], [1], [33], [40, 2, 3, 31], [8, 8, 8]]
SHARED_ROWS = [[9, 8, 7], [1, 1, 2], [3, 70, 40], [33, 4, 60]]


def seq_idx_of(*rows: list[int]) -> torch.Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]).int()


def mixer_inputs(
    batch: int, length: int, groups: int, *, heads: int = 4, head_dim: int = 3, state: int = 5, width: int = 4
) -> dict[str, torch.Tensor]:
    """Random inputs of type float64, the same for the same numbers."""
    channels, conv = heads * head_dim, heads * head_dim + 2 * groups * state
    shapes = {"zxbcdt": (batch, length, channels + conv + heads), "conv1d_weight": (conv, width)}
    shapes |= {"conv1d_bias": (conv,), "dt_bias": (heads,), "A": (heads,), "D": (heads,), "rmsnorm_weight": (channels,)}
    generator = torch.Generator().manual_seed(length)
    made = {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64)
        for name, shape in {**shapes, "outproj_weight": (6, channels)}.items()
    }
    return {name: value.requires_grad_() for name, value in {**made, "A": -made["A"].exp()}.items()}


def mix_by_chunks(inputs: dict[str, torch.Tensor], groups: int, rows: list[list[int]], **options: Any) -> torch.Tensor:
    heads = len(inputs["A"])
    channels = inputs["zxbcdt"].shape[-1] - heads - len(inputs["conv1d_weight"])
    settings = {"chunk_size": 8, "headdim": channels // heads, "ngroups": groups, "seq_idx": seq_idx_of(*rows)}
    norm = GroupedRMSNorm(channels, options.pop("eps", 1e-6), group_size=channels // groups)
    weights = {name: inputs[name] for name in inputs if not name.startswith(("rms", "outproj"))}
    mixed = mamba_split_conv1d_scan_combined(**weights, **{**settings, **options})
    normed = torch.func.functional_call(norm, {"weight": inputs["rmsnorm_weight"]}, mixed)
    return functional.linear(normed, inputs["outproj_weight"])


def gradients(output: torch.Tensor, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return torch.autograd.grad(output, list(inputs.values()), weights)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-6)).item()


def drawn(seed: int) -> tuple[list[list[int]], int, dict[str, int], int]:
    """Return random rows, groups, sizes and a size of chunks."""
    draw = random.Random(seed)
    groups, length = draw.randint(1, 3), draw.randint(4, 40)
    cuts = [sorted(draw.sample(range(1, length), draw.randint(0, 3))) for _ in range(draw.randint(1, 3))]
    rows = [[end - start for start, end in zip([0, *cut], [*cut, length], strict=True)] for cut in cuts]
    sizes = {"heads": groups * draw.randint(1, 2), "head_dim": draw.randint(1, 5), "state": draw.randint(1, 6)}
    return rows, groups, {**sizes, "width": draw.randint(1, 5)}, draw.choice([1, 3, 8, 256])


@pytest.mark.parametrize(
    ("rows", "groups", "sizes", "chunk_size"),
    [*(([row], groups, {}, 8) for row in ROWS for groups in (1, 2)), *map(drawn, range(6))],
)
def test_a_packed_row_equals_its_documents_alone(rows, groups, sizes, chunk_size) -> None:
    inputs = mixer_inputs(len(rows), sum(rows[0]), groups, **sizes)
    output = mix_by_chunks(inputs, groups, rows, chunk_size=chunk_size)
    for number, row in enumerate(rows):
        parts = inputs["zxbcdt"][number : number + 1].split(row, dim=1)
        alone = [
            mix_by_chunks(inputs | {"zxbcdt": part}, groups, [[part.shape[1]]], chunk_size=chunk_size) for part in parts
        ]
        assert distance(output[number], torch.cat(alone, dim=1)[0]) < 1e-10
    single = {name: value.detach().float() for name, value in inputs.items()}
    rounded = mix_by_chunks(single, groups, rows, chunk_size=chunk_size)
    assert rounded.dtype == torch.float32
    assert distance(rounded, output) < 1e-5


def test_mixer_equals_that_of_transformers() -> None:
    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=24, num_heads=6, head_dim=8, state_size=5, n_groups=2, expand=2, conv_kernel=4, chunk_size=8,
        num_hidden_layers=1,
    )  # fmt: skip
    mixer = Mamba2Mixer(config, layer_idx=0).eval()
    hidden = torch.randn(2, 37, 24)
    inputs = {"zxbcdt": mixer.in_proj(hidden), "conv1d_weight": mixer.conv1d.weight[:, 0], "dt_bias": mixer.dt_bias}
    inputs |= {"conv1d_bias": mixer.conv1d.bias, "A": -mixer.A_log.exp(), "D": mixer.D}
    inputs |= {"rmsnorm_weight": mixer.norm.weight, "outproj_weight": mixer.out_proj.weight}
    options = {"eps": config.layer_norm_epsilon}

    found = mix_by_chunks(inputs, 2, [[37], [37]], **options)
    torch.testing.assert_close(found, mixer(hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("content", [0.0, 1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("lengths", SHARED_ROWS, ids=str)
def test_a_document_has_the_same_bits_whatever_the_others_contain(lengths: list[int], content: float) -> None:
    kept = slice(lengths[0], lengths[0] + lengths[1])
    inputs = {name: value.detach().float() for name, value in mixer_inputs(1, sum(lengths), 2).items()}
    foreign = torch.full_like(inputs["zxbcdt"], content)
    foreign[:, kept] = inputs["zxbcdt"][:, kept]
    rows = [{"zxbcdt": row.requires_grad_()} for row in (inputs["zxbcdt"], foreign)]
    one, two = (mix_by_chunks(inputs | row, 2, [lengths]) for row in rows)

    assert torch.equal(one[:, kept], two[:, kept])
    assert torch.equal(gradients(one, rows[0])[0][:, kept], gradients(two, rows[1])[0][:, kept])
    (grad,) = torch.autograd.grad(mix_by_chunks(inputs | rows[0], 2, [lengths])[:, kept].sum(), inputs["zxbcdt"])
    assert grad.count_nonzero() == grad[:, kept].count_nonzero() > 0


def test_strong_decay_and_bfloat16_stay_finite() -> None:
    inputs = {name: value.detach().bfloat16() for name, value in mixer_inputs(1, 50, 1).items()}
    inputs["zxbcdt"].requires_grad_()
    output = mix_by_chunks(inputs | {"A": torch.full([4], -1e4)}, 1, [[50]], chunk_size=64)
    (grad,) = torch.autograd.grad(output.sum(), inputs["zxbcdt"])

    assert output.dtype == torch.bfloat16
    assert output.isfinite().all()
    assert grad.isfinite().all()
