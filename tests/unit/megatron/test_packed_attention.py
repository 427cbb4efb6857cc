"""A packed row trains exactly what its sequences alone would."""

from __future__ import annotations

import pytest
import torch

from harness.megatron.batch import RowTensors, to_device
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch
from tests.benchmarks.kernels import _Waits

from .conftest import make_sequence

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
