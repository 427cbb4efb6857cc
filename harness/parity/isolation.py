"""No document of a packed row sees another: shown on any layout by changing one and looking at all the rest.

A row is trained once as it is and then once for every document with that document's tokens changed, and once with other
tokens at its padding. On every stage, at every layer, forward and backward, what belongs to the documents that were not
changed must stay the same bit for bit: layer outputs, logits, losses, and the gradients of layer outputs. Before that,
the fields of the batch on every rank are held against a slow reference made from the documents alone: an error inside a
document, such as a wrong position or a mask that is one off, crosses no boundary and shows only there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer

from harness.loader import RankLayout
from harness.megatron.batch import RowTensors, to_device
from harness.plan import ParallelConfig
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch

Prepare = Callable[..., RowTensors]
PADDING = -1


@dataclass(frozen=True)
class Seen:
    """What one place of the model held for one row.

    Attributes:
        place: which layer of which model chunk, forward or backward.
        values: [tokens on this rank, ...].
    """

    place: str
    values: torch.Tensor


class IsolationCheck:
    """Checks one model on one layout; every rank of the job makes the same calls.

    Args:
        chunks: from `build_model`; initial weights of a large standard deviation show more.
        sequences: the documents of the row, two or more.
        pad_to_multiple: each is padded to a multiple of this many tokens.
        vocab_size: changed tokens stay below it.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        sequences: Sequence[SequenceView],
        *,
        parallel: ParallelConfig,
        layout: RankLayout,
        device: torch.device,
        pad_to_multiple: int,
        vocab_size: int,
    ) -> None:
        self._chunks = chunks
        self._sequences = list(sequences)
        self._parallel = parallel
        self._layout = layout
        self._device = device
        self._vocab_size = vocab_size
        self._pad_to_multiple = pad_to_multiple
        self._row = build_thd_batch(self._sequences, pad_to_multiple=pad_to_multiple)

    def run(self, prepare: Prepare = to_device) -> list[str]:
        """Findings of all ranks, in words; empty where every document stays alone.

        Args:
            prepare: makes this rank's tensors of a row; tests plant defects here.
        """
        findings = self._fields(prepare)
        before = self._train(self._row, prepare)
        owners = self._owners()
        for changed in [*range(len(self._sequences)), PADDING]:
            if not (owners == changed).any():
                continue
            findings += self._differences(before, self._train(self._with_changed(changed), prepare), owners, changed)
        rank = torch.distributed.get_rank()
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, [f"rank {rank}: {finding}" for finding in findings])
        return [finding for one in gathered for finding in one]

    def _owners(self) -> npt.NDArray[np.int64]:
        """int64 [T]: the document of each token of the row, PADDING where it is none's."""
        bounds = self._row.cu_seqlens_padded
        owners = np.repeat(np.arange(len(self._sequences)), np.diff(bounds))
        owners[self._row.padding_mask] = PADDING
        return owners

    def _with_changed(self, changed: int) -> ThdBatch:
        if changed == PADDING:
            tokens = np.where(self._row.padding_mask, self._vocab_size - 1, self._row.tokens)
            return replace(self._row, tokens=tokens)
        sequences = list(self._sequences)
        old = sequences[changed]
        sequences[changed] = SequenceView((old.input_ids + 1) % self._vocab_size, old.loss_mask)
        return build_thd_batch(sequences, pad_to_multiple=self._pad_to_multiple)

    def _differences(
        self, before: list[Seen], after: list[Seen], owners: npt.NDArray[np.int64], changed: int
    ) -> list[str]:
        found = []
        what = "padding" if changed == PADDING else f"document {changed}"
        for one, other in zip(before, after, strict=True):
            held = self._held(owners, one.values.shape[0])
            differ = (one.values != other.values).flatten(1).any(dim=1).cpu().numpy()
            # What stands at padding is nobody's; its owner is the document that it follows.
            leaked = np.unique(held[differ & (held != changed) & (held != PADDING)])
            if leaked.size:
                found.append(f"{one.place}: changing {what} changed document(s) {', '.join(map(str, leaked))}")
        return found

    def _held(self, whole: npt.NDArray[Any], tokens: int) -> npt.NDArray[Any]:
        """The part of a row's [T] field that stands where this rank has `tokens` of them, by slow slicing."""
        held = _slices(whole, self._row.cu_seqlens_padded, self._layout.cp_size, self._layout.cp_rank)
        if held.shape[0] == tokens:
            return held
        parts = np.split(held, self._parallel.tensor_parallel_size)  # sequence parallelism
        return np.asarray(parts[self._layout.tp_rank])

    def _fields(self, prepare: Prepare) -> list[str]:
        """Compare the batch on this rank with one made document by document."""
        layout, pad_to_multiple = self._layout, self._pad_to_multiple
        columns: dict[str, list[npt.NDArray[Any]]] = {"tokens": [], "labels": [], "position_ids": [], "loss_mask": []}
        real, padded = [0], [0]
        for sequence in self._sequences:
            length = len(sequence) - 1
            room = -(-length // pad_to_multiple) * pad_to_multiple
            for name, values in (
                ("tokens", sequence.input_ids[:-1]),
                ("labels", sequence.input_ids[1:]),
                ("loss_mask", sequence.loss_mask[:-1]),
            ):
                columns[name].append(np.concatenate([values, np.zeros(room - length, dtype=values.dtype)]))
            columns["position_ids"].append(np.arange(room))
            real.append(real[-1] + length)
            padded.append(padded[-1] + room)
        bounds = np.asarray(padded)
        got = prepare(self._row, self._device, cp_size=layout.cp_size, cp_rank=layout.cp_rank)
        found = []
        for name, parts in columns.items():
            expected = _slices(np.concatenate(parts), bounds, layout.cp_size, layout.cp_rank)
            values = getattr(got, name)[0].cpu().numpy()
            if not np.array_equal(values, expected):
                wrong = np.flatnonzero(values != expected) if values.shape == expected.shape else np.zeros(1, dtype=int)
                found.append(f"field {name}: {wrong.size} value(s) differ, the first at {wrong[0]} of this rank")
        params = got.packed_seq_params
        if params is None:
            return [*found, "field packed_seq_params: missing"]
        ends = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        for name, values, expected_bounds in (("cu_seqlens", params.cu_seqlens_q, real), ("bounds", ends, padded)):
            if values.tolist() != expected_bounds:
                found.append(f"field {name}: {values.tolist()}, expected {expected_bounds}")
        return found

    def _train(self, row: ThdBatch, prepare: Prepare) -> list[Seen]:
        """One forward and backward pass; what every layer held, in an order that is the same every time."""
        layout = self._layout
        for chunk in self._chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        seen: dict[str, list[torch.Tensor]] = {}

        def forward(rows: Iterator[ThdBatch], model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
            tensors = prepare(next(rows), self._device, cp_size=layout.cp_size, cp_rank=layout.cp_rank)
            output = model(
                input_ids=tensors.tokens,
                position_ids=tensors.position_ids,
                attention_mask=None,
                labels=tensors.labels,
                packed_seq_params=tensors.packed_seq_params,
            )

            def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                seen.setdefault("losses", []).append(losses.detach().transpose(0, 1))
                total = (losses.float() * tensors.loss_mask).sum()
                return total, tensors.loss_mask.sum().to(torch.int), total.detach()

            return output, loss

        count = self._parallel.group_size
        iterators = [iter([row] * count) for _ in self._chunks]
        with _watched(self._chunks, seen):
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
                num_microbatches=count,
                seq_length=len(row),
                micro_batch_size=1,
                forward_only=False,
            )
        return [Seen(place, values) for place in sorted(seen) for values in seen[place]]


@contextmanager
def _watched(chunks: list[DistributedDataParallel], seen: dict[str, list[torch.Tensor]]) -> Iterator[None]:
    """Collect outputs of layers and of the last matrix, and the gradients that come back to them."""

    def watch(place: str) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, output: Any) -> None:
            values = output[0] if isinstance(output, tuple) else output
            seen.setdefault(f"{place}, forward", []).append(values.detach().clone())
            if values.requires_grad:
                values.register_hook(
                    lambda gradient: seen.setdefault(f"{place}, backward", []).append(gradient.detach().clone())
                )

        return hook

    handles = []
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if isinstance(module, TransformerLayer) or (
                isinstance(module, ColumnParallelLinear) and name.endswith("output_layer")
            ):
                handles.append(module.register_forward_hook(watch(f"chunk {number}, {name.removeprefix('module.')}")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _slices(whole: npt.NDArray[Any], bounds: npt.NDArray[Any], cp_size: int, cp_rank: int) -> npt.NDArray[Any]:
    """A context-parallel rank's part of a row's [T] field, cut document by document."""
    if cp_size == 1:
        return whole
    parts = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        chunks = np.split(whole[start:stop], 2 * cp_size)
        parts += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
    return np.concatenate(parts)
