"""Tensors of one microbatch row on the device, with the PackedSeqParams that attention and RoPE read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from harness.errors import FormatError
from harness.megatron.compat import packed_seq_params
from harness.megatron.model.media import MediaTensors
from harness.megatron.model.mtp import own_tokens
from harness.thd import RowMedia, ThdBatch, context_parallel_indices, loss_weights, tokens_ahead


@dataclass(frozen=True)
class TokenTensors:
    """This rank's slice of the tokens of a row, padded to T, or of a row of `harness.thd.tokens_ahead`.

    Attributes:
        tokens, labels: int64 [1, T / cp].
        loss_mask: float32 [1, T / cp], weights from `loss_weights`.
        padding_mask: bool [1, T / cp], True at padding.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    padding_mask: torch.Tensor


@dataclass(frozen=True)
class RowTensors(TokenTensors):
    """This rank's slice of one row.

    Attributes:
        position_ids: int64 [1, T / cp].
        divisor: int32, the row's part of the divisor of the summed loss; 0 on all of its context-parallel ranks except
            the first.
        packed_seq_params: boundaries of the whole row, the same on every rank of its context-parallel group, and this
            rank's `TokenTensors` of tokens ahead, for layers that predict them.
        sources: int64 [1, T / cp], number of each token's dataset; None for a row without datasets.
    """

    position_ids: torch.Tensor
    divisor: torch.Tensor
    packed_seq_params: PackedSeqParams
    sources: torch.Tensor | None = None

    def all(self) -> list[torch.Tensor]:
        """Return every tensor, including those of `packed_seq_params`."""
        ahead = [value for fields in self.packed_seq_params.ahead for value in vars(fields).values()]
        media = self.packed_seq_params.media
        seen = [] if media is None else [media.places, media.features, *media.arrays.values()]
        values = [*vars(self).values(), *vars(self.packed_seq_params).values(), *ahead, *seen]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def fill(self, other: RowTensors) -> None:
        """Copy a row of the same shape into these tensors."""
        for mine, new in zip(self.all(), other.all(), strict=True):
            mine.copy_(new, non_blocking=True)


class RowsAhead:
    """Rows of a step, each copied to the device while the previous one is computed.

    Copies run from pinned memory on a separate stream, so that neither the host nor the kernels of a row wait for the
    copies of the next one. On a CPU the copies are made at the same points.
    """

    def __init__(
        self, rows: Iterable[ThdBatch], copy: Callable[[ThdBatch], RowTensors], stream: torch.cuda.Stream | None
    ) -> None:
        self._rows, self._copy, self._stream = iter(rows), copy, stream
        self._begun: tuple[ThdBatch, RowTensors] | None = None

    def take(self) -> tuple[ThdBatch, RowTensors]:
        """Return the next row with its tensors, and start copying the row after it."""
        row, tensors = self._begun or self._begin(next(self._rows))
        if self._stream is not None:
            computing = torch.cuda.current_stream()
            computing.wait_stream(self._stream)
            for tensor in tensors.all():
                # Its memory belongs to the copy stream, which must not reuse it while it is read.
                tensor.record_stream(computing)
        after = next(self._rows, None)
        self._begun = None if after is None else self._begin(after)
        return row, tensors

    def _begin(self, row: ThdBatch) -> tuple[ThdBatch, RowTensors]:
        with torch.cuda.stream(self._stream):  # None changes nothing
            return row, self._copy(row)


def to_device(
    row: ThdBatch,
    device: torch.device,
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_group: Any = None,
    mtp_layers: int = 0,
    is_static: bool = False,
    loss_average: str = "token",
) -> RowTensors:
    """Copy this rank's context-parallel slice of a row to `device`; copies to a GPU are asynchronous.

    The device widens ids and weights and derives labels and positions, so only about 5 bytes per token are copied.

    Args:
        cp_size, cp_rank, cp_group: context-parallel ranks of the row, this rank, and their group if rows differ in it.
    """
    weights, divisor = loss_weights(row, loss_average)
    weighed = replace(row, loss_mask=weights)
    keep: Any = slice(None)
    if cp_size > 1:
        keep = context_parallel_indices(row.cu_seqlens_padded, cp_size=cp_size, cp_rank=cp_rank)
    # Shift tokens before slicing, so that no rank needs another rank's tokens.
    own, *ahead = (
        _copy_tokens(tokens_ahead(weighed, distance) if distance else weighed, keep, device)
        for distance in range(mtp_layers + 1)
    )
    # Kernels take a slower path with padded bounds, so pass them only if they differ.
    is_padded = is_static or not np.array_equal(row.cu_seqlens, row.cu_seqlens_padded)
    cu_seqlens = _copied(row.cu_seqlens, device)
    # The same bounds give positions in sequences for attention and for the rotary embedding.
    bounds = _copied(row.cu_seqlens_padded, device) if is_padded else cu_seqlens
    owners, positions = _find_places(bounds, len(row), cp_size=cp_size, cp_rank=cp_rank)
    position_ids = positions if _counts_up(row) else _copied(row.position_ids[keep].astype(np.int32), device).long()
    grid = None if row.media is None else row.media.positions(row.position_ids, row.cu_seqlens_padded)
    sources = None
    if row.sources is not None:
        named = np.pad(row.sources, (0, len(row.cu_seqlens) - 1 - len(row.sources)))
        sources = _copied(named, device)[owners].unsqueeze(0)
    return RowTensors(
        **vars(own),
        position_ids=position_ids.unsqueeze(0),
        # Context-parallel ranks sum the losses of their slices, so only the first adds the divisor of the row.
        divisor=_copied(np.asarray(divisor if cp_rank == 0 else 0, np.int32), device),
        packed_seq_params=packed_seq_params(
            cu_seqlens=cu_seqlens,
            cu_seqlens_padded=bounds if is_padded else None,
            max_seqlen=row.max_seqlen,
            cp_group=cp_group,
            positions=positions,
            grid=None if grid is None else _copied(np.ascontiguousarray(grid[:, keep]), device),
            lengths=tuple(filter(None, np.diff(row.cu_seqlens_padded).tolist())),
            padding_mask=own.padding_mask,
            ahead=tuple(ahead),
            is_static=is_static,
            media=None if row.media is None else _place_media(row.media, row, keep, device),
        ),
        sources=sources,
    )


def _place_media(media: RowMedia, row: ThdBatch, keep: Any, device: torch.device) -> MediaTensors | None:
    """Return the media that have tokens in a slice of a row, or None."""
    places, owners = media.places(row.cu_seqlens_padded), np.repeat(np.arange(len(media.tokens)), media.tokens)
    if isinstance(keep, np.ndarray):
        held = np.full(len(row), -1, np.int64)
        held[keep] = np.arange(len(keep))
        places = held[places]
    is_held = places >= 0
    used = np.unique(owners[is_held])
    if not len(used):
        return None
    # Features of the used media are numbered consecutively.
    numbers = np.cumsum(np.isin(owners, used)) - 1
    return MediaTensors(
        {name: _copied(array, device) for name, array in media.arrays_of(used).items()},
        places=_copied(places[is_held], device),
        features=_copied(numbers[is_held], device),
        tokens=int(media.tokens[used].sum()),
    )


def _copy_tokens(row: ThdBatch, keep: Any, device: torch.device) -> TokenTensors:
    """Copy tokens, a byte of weight and padding for each, and labels other than the next token, in one transfer."""
    tokens, labels, weights = row.tokens[keep].astype(np.int32), row.labels[keep].astype(np.int32), row.loss_mask[keep]
    # Embeddings on tensor-parallel ranks would silently treat negative ids as tokens of another rank.
    if (low := min(tokens.min(), labels.min())) < 0:
        raise FormatError(f"a token id is {low}", where="a row", fix="write the data again: ids are 0 or more")
    others = np.flatnonzero(labels != np.roll(tokens, -1)).astype(np.int32)
    flags = weights.astype(np.uint8) & np.uint8(127)  # exact unless conversations share their weight
    is_narrow = np.array_equal(flags, weights)
    flags |= row.padding_mask[keep] * np.uint8(128)
    held = np.concatenate([tokens, others, labels[others]]).view(np.uint8)
    copied = _copied(np.concatenate([held, flags]), device)
    ids, places, found = (
        copied[: len(held)].view(torch.int32).long().split_with_sizes([len(tokens), len(others), len(others)])
    )
    bits = copied[len(held) :].unsqueeze(0)
    return TokenTensors(
        tokens=ids.unsqueeze(0),
        labels=ids.roll(-1).index_copy(0, places, found).unsqueeze(0),
        loss_mask=(bits & 127).float() if is_narrow else _copied(weights, device).unsqueeze(0),
        padding_mask=bits > 127,
    )


def _counts_up(row: ThdBatch) -> bool:
    """Return True if positions count up from 0 in every sequence, as in `_find_places`."""
    starts = row.cu_seqlens_padded[:-1][np.diff(row.cu_seqlens_padded) > 0]
    jumps = np.count_nonzero(np.diff(row.position_ids) != 1)
    return not row.position_ids[starts].any() and int(jumps) == len(starts) - 1


def _find_places(bounds: torch.Tensor, total: int, *, cp_size: int, cp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence and position of each token in a rank's slice, [T / cp], without a host synchronization.

    `bounds` are int32 [S + 1], for padded sequences, and `total` is T.
    """
    held = bounds if cp_size == 1 else bounds // cp_size
    owners = torch.repeat_interleave(held.diff(), output_size=total // cp_size)
    positions = torch.arange(total // cp_size, device=bounds.device) - held[owners]
    if cp_size > 1:
        # A rank holds two of the 2 * cp_size chunks of a sequence, as in `context_parallel_indices`.
        chunk = (held.diff() // 2)[owners]
        positions += torch.where(positions < chunk, cp_rank, 2 * cp_size - 2 - cp_rank) * chunk
    return owners, positions


def _copied(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    # A copy to a GPU from memory that is not pinned would wait for all earlier work.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def run_row(
    chunk: Any, row: RowTensors, *, with_labels: bool = True, forward: Callable[..., Any] | None = None
) -> torch.Tensor:
    """Run a row through one chunk of the model; return its losses, logits, or activations for the next stage.

    If `forward` is given, call it instead of the chunk and return its result.
    """
    output: torch.Tensor = (forward or chunk)(
        input_ids=row.tokens,
        position_ids=row.position_ids,
        attention_mask=None,
        labels=row.labels if with_labels else None,
        packed_seq_params=row.packed_seq_params,
        **padding_argument(chunk, row.padding_mask),
    )
    return output


def sum_loss(
    loss_mask: torch.Tensor,
    divisor: torch.Tensor,
    losses: torch.Tensor,
    *,
    sources: torch.Tensor | None = None,
    num_sources: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the summed loss, its divisor, and a report, float64 [3 + 2 * num_sources].

    The report contains the sum, the divisor and the number of trained tokens, then the sum of each source, then the
    weight of each source. The loss is a sum, not a mean: Megatron divides gradients by the divisor of the whole global
    batch, so that the loss does not depend on the placement of sequences.
    """
    weighed = losses.float() * loss_mask
    total, tokens = weighed.sum(), torch.count_nonzero(loss_mask)
    report = torch.stack((total.detach().double(), divisor.double(), tokens.double()))
    if sources is not None:
        zeros = report.new_zeros(2, num_sources)
        values = torch.stack((weighed.detach().double().reshape(-1), loss_mask.double().reshape(-1)))
        report = torch.cat((report, zeros.index_add(1, sources.reshape(-1), values).reshape(-1)))
    return total, divisor, report


def padding_argument(chunk: Any, padding_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the argument that marks padding for a chunk's expert routers; empty for a model without experts.

    Megatron slices the mask, bool [1, T / cp], True at padding, for sequence parallelism only on the first stage.
    """
    config = get_model_config(chunk)
    if config.num_moe_experts is None:
        return {}
    is_first = get_attr_wrapped_model(chunk, "pre_process")
    return {"padding_mask": padding_mask if is_first else own_tokens(padding_mask, config)}
