"""A packed row trains exactly what its sequences alone would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from harness.megatron.batch import RowTensors, to_device
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch
from tests.benchmarks.kernels import _Waits

from .conftest import VOCAB, make_sequence

CPU = torch.device("cpu")
LENGTHS = (9, 40, 2, 17, 64)


def sequences() -> list[SequenceView]:
    return [make_sequence(length, seed) for seed, length in enumerate(LENGTHS)]


def losses_of(chunks: list[torch.nn.Module], row: RowTensors) -> torch.Tensor:
    losses: torch.Tensor = chunks[0](
        input_ids=row.tokens,
        position_ids=row.position_ids,
        attention_mask=None,
        labels=row.labels,
        packed_seq_params=row.packed_seq_params,
    )
    return losses


def logits_of(chunks: list[torch.nn.Module], row: RowTensors) -> torch.Tensor:
    """[T, vocabulary]"""
    logits: torch.Tensor = chunks[0](
        input_ids=row.tokens,
        position_ids=row.position_ids,
        attention_mask=None,
        packed_seq_params=row.packed_seq_params,
    )
    return logits[0]


def summed_loss_and_gradients(
    chunks: list[torch.nn.Module], rows: list[ThdBatch]
) -> tuple[float, dict[str, torch.Tensor]]:
    chunks[0].zero_grad_buffer()
    total = 0.0
    for batch in rows:
        row = to_device(batch, CPU)
        loss = (losses_of(chunks, row) * row.loss_mask).sum()
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.main_grad.clone() for name, p in chunks[0].named_parameters()}


@pytest.mark.parametrize("multiple", [1, 8])
def test_loss_and_every_gradient_of_a_packed_row_equal_those_of_its_sequences_alone(chunks, multiple) -> None:
    packed = [build_thd_batch(sequences(), pad_to_multiple=multiple)]
    alone = [build_thd_batch([sequence]) for sequence in sequences()]
    loss, gradients = summed_loss_and_gradients(chunks, packed)
    expected_loss, expected = summed_loss_and_gradients(chunks, alone)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert len(gradients) == len(expected) > 10
    for name, gradient in gradients.items():
        scale = float(expected[name].abs().max())
        assert scale > 0, f"{name} has no gradient, so nothing is compared"
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_changing_one_sequence_leaves_the_logits_of_all_others_bit_identical(chunks, changed) -> None:
    before = sequences()
    after = list(before)
    after[changed] = SequenceView((before[changed].input_ids + 1) % VOCAB, before[changed].loss_mask)
    first, other = build_thd_batch(before, pad_to_multiple=4), build_thd_batch(after, pad_to_multiple=4)
    with torch.no_grad():
        left, right = logits_of(chunks, to_device(first, CPU)), logits_of(chunks, to_device(other, CPU))
    bounds = first.cu_seqlens_padded
    for index in range(len(LENGTHS)):
        same = torch.equal(left[bounds[index] : bounds[index + 1]], right[bounds[index] : bounds[index + 1]])
        assert same == (index != changed)


def test_padding_changes_no_real_token(chunks) -> None:
    batch = build_thd_batch(sequences(), pad_to_multiple=16)
    row = to_device(batch, CPU)
    padding = torch.from_numpy(batch.padding_mask)
    assert padding.sum() > 0
    with torch.no_grad():
        clean = logits_of(chunks, row)
        row.tokens[0, padding] = 7
        dirty = logits_of(chunks, row)
    assert torch.equal(clean[~padding], dirty[~padding])
    assert not torch.equal(clean[padding], dirty[padding])


def test_without_boundaries_sequences_see_each_other(chunks) -> None:
    """A planted defect of the kind that the tests above detect."""
    batch = build_thd_batch(sequences())
    row = to_device(batch, CPU)
    end = int(batch.cu_seqlens[-1])
    whole = torch.tensor([0, end], dtype=torch.int32)
    one_document = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=whole, cu_seqlens_kv=whole, max_seqlen_q=end, max_seqlen_kv=end
    )
    leaking = replace(row, packed_seq_params=one_document)
    with torch.no_grad():
        good, bad = logits_of(chunks, row), logits_of(chunks, leaking)
    first = int(batch.cu_seqlens[1])
    torch.testing.assert_close(good[:first], bad[:first], rtol=1e-5, atol=1e-5)
    assert (good[first:] - bad[first:]).abs().max() > 1e-2


@pytest.mark.parametrize("multiple", [1, 8])
def test_no_layer_reads_the_bounds_of_a_row_from_the_device(chunks, multiple) -> None:
    """On a GPU, the host would wait for everything that is queued, once a layer."""
    row = to_device(build_thd_batch(sequences(), pad_to_multiple=multiple), CPU)
    with _Waits() as waits:
        losses_of(chunks, row).sum().backward()
    assert waits.ours == 0
    row.packed_seq_params.lengths = ()  # as rows of other programs
    with _Waits() as waits:
        losses_of(chunks, row)
    assert waits.ours == len(chunks[0].module.decoder.layers)
