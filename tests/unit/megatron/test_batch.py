"""Rows reach the device one ahead of the computation, whole, and their losses are summed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.megatron.batch import RowsAhead, padding_argument, run_row, sum_loss, to_device
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model.gpt import build_model
from harness.plan import ModelConfig, ParallelConfig
from harness.records import SequenceView
from harness.thd import (
    RowMedia,
    build_thd_batch,
    context_parallel_indices,
    loss_weights,
    static_row,
    tokens_ahead,
    zero_loss_row,
)
from tests.benchmarks.kernels import _Waits


def row(length: int):
    return build_thd_batch([SequenceView(np.arange(length + 1, dtype=np.int32), np.ones(length + 1, dtype=np.uint8))])


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("is_static", [False, True])
def test_a_scan_has_each_token_in_order_with_the_number_of_its_sequence(cp_size, is_static) -> None:
    views = [SequenceView(np.arange(n + 1, dtype=np.int32), np.ones(n + 1, np.uint8)) for n in (5, 16, 1, 8)]
    whole = build_thd_batch(views, pad_to_multiple=8)
    if is_static:
        whole = static_row(whole, total=64, num_sequences=7)
    slices = [
        context_parallel_indices(whole.cu_seqlens_padded, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)
    ]
    tensors = to_device(whole, torch.device("cpu"), cp_size=cp_size, cp_rank=cp_size - 1, is_static=is_static)
    bounds, owners, order = tensors.packed_seq_params.scan_order(cp_size)
    lengths = np.diff(whole.cu_seqlens_padded)
    assert owners.tolist() == [np.repeat(np.arange(len(lengths)), lengths).tolist()]
    assert bounds.tolist() == whole.cu_seqlens_padded.tolist()
    assert (bounds.dtype, owners.dtype) == (torch.int64, torch.int32)
    # The tokens of all ranks, one slice after the other, come back in the order of the row.
    assert order is None if cp_size == 1 else np.concatenate(slices)[order.numpy()].tolist() == list(range(len(whole)))
    assert tensors.packed_seq_params.scan_order(cp_size)[1] is owners  # once for all layers
    assert tensors.sources is None


# Images of 4, 2 and 6 tokens, of which each token has two parts.
MEDIA = RowMedia(
    sequences=np.array([0, 1, 1]),
    starts=np.array([2, 1, 5]),
    tokens=np.array([4, 2, 6]),
    digests=np.arange(3, dtype=np.uint64),
    arrays={"pixels": np.arange(24).reshape(24, 1)},
)


@pytest.mark.parametrize(
    ("cp_size", "cp_rank", "places", "features", "tokens", "pixels"),
    [
        (1, 0, [2, 3, 4, 5, 9, 10, *range(13, 19)], [*range(12)], 12, [*range(24)]),
        (2, 0, [5, 6, 7, 8], [0, 1, 6, 7], 8, [*range(8, 24)]),
        (2, 1, [0, 1, 2, 3, 6, 7, 8, 9], [*range(8)], 10, [*range(8), *range(12, 24)]),
    ],
)
def test_a_slice_of_a_row_has_the_media_that_it_shows_and_where(
    cp_size, cp_rank, places, features, tokens, pixels
) -> None:
    views = [SequenceView(np.arange(n + 1, dtype=np.int32), np.ones(n + 1, np.uint8)) for n in (8, 12)]
    whole = replace(build_thd_batch(views, pad_to_multiple=4), media=MEDIA)
    params = to_device(whole, torch.device("cpu"), cp_size=cp_size, cp_rank=cp_rank).packed_seq_params
    assert params.media.places.tolist() == places
    assert params.media.features.tolist() == features
    assert params.media.tokens == tokens
    assert params.media.arrays["pixels"].ravel().tolist() == pixels


def test_a_slice_that_shows_no_media_has_none_and_each_slice_has_its_padding() -> None:
    first = {name: getattr(MEDIA, name)[:1] for name in ("sequences", "starts", "tokens", "digests")}
    media = RowMedia(**first, arrays={"pixels": np.arange(8).reshape(8, 1)})
    views = [SequenceView(np.arange(n + 1, dtype=np.int32), np.ones(n + 1, np.uint8)) for n in (8, 3)]
    whole = replace(build_thd_batch(views, pad_to_multiple=4), media=media)
    ranks = [to_device(whole, torch.device("cpu"), cp_size=2, cp_rank=rank).packed_seq_params for rank in (0, 1)]
    assert [rank.media is None for rank in ranks] == [True, False]
    assert [rank.padding_mask.flatten().tolist() for rank in ranks] == [[False] * 5 + [True], [False] * 6]


@pytest.mark.parametrize(("cp_rank", "kept"), [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])
def test_a_slice_of_a_row_has_the_rows_and_columns_of_its_images(cp_rank: int, kept: list[int]) -> None:
    first = {name: getattr(MEDIA, name)[:1] for name in ("sequences", "starts", "tokens", "digests")}
    media = RowMedia(**first, arrays={"image_grid_thw": np.array([[1, 4, 4]])})
    grid = to_device(
        replace(row(8), media=media), torch.device("cpu"), cp_size=2, cp_rank=cp_rank
    ).packed_seq_params.grid
    # Two tokens of text, two by two of the image, and two of text.
    whole = np.array([[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]])
    assert grid.tolist() == whole[:, kept].tolist()


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


def test_copies_go_through_a_stream_of_their_own_for_which_the_computation_waits(monkeypatch) -> None:
    """The order of calls, which is the same with streams that are stood in for."""
    events: list[tuple[str, object]] = []

    @contextmanager
    def through(stream):
        events.append(("through", stream))
        yield
        events.append(("end", stream))

    def copy(one):
        events.append(("copy", len(one)))
        tensor = SimpleNamespace(record_stream=lambda stream: events.append(("keep for", stream)))
        return SimpleNamespace(all=lambda: [tensor])

    computing = SimpleNamespace(wait_stream=lambda stream: events.append(("wait for", stream)))
    monkeypatch.setattr(torch.cuda, "stream", through)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: computing)
    assert len(RowsAhead([row(3), row(4)], copy, "copies").take()[0]) == 3
    begun = [[("through", "copies"), ("copy", length), ("end", "copies")] for length in (3, 4)]
    assert events == [*begun[0], ("wait for", "copies"), ("keep for", computing), *begun[1]]


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("is_static", [False, True])
def test_the_ranks_of_a_row_hold_each_of_its_tokens_with_all_that_belongs_to_it(cp_size, is_static) -> None:
    views = [SequenceView(np.arange(n, n + n, dtype=np.int32), np.arange(n, dtype=np.uint8) % 2) for n in (4, 9, 3)]
    whole = build_thd_batch(views, pad_to_multiple=4)
    whole = replace(whole, sources=np.asarray([2, 0]))
    expected = {
        name: getattr(whole, name) for name in ("tokens", "labels", "position_ids", "loss_mask", "padding_mask")
    } | {"sources": np.asarray([2] * 4 + [0] * 12)}
    ahead = [tokens_ahead(whole, distance) for distance in (1, 2)]
    for rank in range(cp_size):
        held = context_parallel_indices(whole.cu_seqlens_padded, cp_size=cp_size, cp_rank=rank)
        copied = to_device(whole, torch.device("cpu"), cp_size=cp_size, cp_rank=rank, mtp_layers=2, is_static=is_static)
        for name, values in expected.items():
            assert getattr(copied, name).tolist() == [values[held].tolist()], name
        params = copied.packed_seq_params
        for fields, values in zip(params.ahead, ahead, strict=True):
            for name in ("tokens", "labels", "loss_mask", "padding_mask"):
                assert getattr(fields, name).tolist() == [getattr(values, name)[held].tolist()], name
        assert params.positions.tolist() == whole.position_ids[held].tolist()
        assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == whole.cu_seqlens.tolist()
        assert params.cu_seqlens_q_padded.tolist() == whole.cu_seqlens_padded.tolist()
        assert (params.max_seqlen_q, params.is_static) == (8, is_static)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["padded", "static", "other positions", "nobody's", "shared weights", "one"])
def test_a_row_is_on_the_device_what_its_arrays_are(cp_size, kind) -> None:
    numbers = np.random.default_rng(0)
    lengths = [1] if kind == "one" else [5, 1, 40, 8, 3, 16]
    # Weights of all the bits that one byte has beside padding.
    drawn = ((numbers.integers(0, 2**31 - 1, n + 1), 127 - numbers.integers(0, 101, n + 1)) for n in lengths)
    views = [SequenceView(ids.astype(np.int32), weights.astype(np.uint8)) for ids, weights in drawn]
    multiple = 2 * cp_size if cp_size > 1 else 1
    whole = zero_loss_row(multiple) if kind == "nobody's" else build_thd_batch(views, pad_to_multiple=multiple)
    if kind == "static":
        whole = static_row(whole, total=128, num_sequences=9)
    if kind == "other positions":
        whole = replace(whole, position_ids=whole.position_ids[::-1].copy())
    average = "conversation" if kind == "shared weights" else "token"
    weights, divisor = loss_weights(whole, average)
    counted = np.arange(len(whole)) - np.repeat(whole.cu_seqlens_padded[:-1], np.diff(whole.cu_seqlens_padded))
    for rank in range(cp_size):
        keep = context_parallel_indices(whole.cu_seqlens_padded, cp_size=cp_size, cp_rank=rank)
        with _Waits() as waits:
            made = to_device(whole, torch.device("cpu"), cp_size=cp_size, cp_rank=rank, loss_average=average)
        for tensor, values in (
            (made.tokens, whole.tokens),
            (made.labels, whole.labels),
            (made.position_ids, whole.position_ids),
            (made.padding_mask, whole.padding_mask),
            (made.loss_mask, weights),
            (made.packed_seq_params.positions, counted.astype(np.int64)),
        ):
            expected = torch.from_numpy(values[keep])
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected.reshape(tensor.shape))
            assert tensor.shape[-1] == len(keep)
        held = np.diff(whole.cu_seqlens_padded)
        assert made.packed_seq_params.lengths == tuple(held[held > 0])
        assert made.divisor.item() == (divisor if rank == 0 else 0)
        # Ids of four bytes, and a byte of weight and padding; the rest is a few bytes a sequence and an end of a chunk.
        a_token = 5 + 4 * (kind == "shared weights") + 4 * (kind == "other positions" and len(whole) > 1)
        few = 4 + (8 + 8 * 3) * len(whole.cu_seqlens)
        assert a_token * len(keep) < waits.copied_bytes <= a_token * len(keep) + few
        assert waits.ours == waits.others == 0


@pytest.mark.parametrize("positions", [[0, 2, 4, 0, 2], [3, 4, 5, 3, 4], [0, 1, 2, 3, 4]])
def test_positions_that_do_not_count_from_0_in_every_sequence_are_kept(positions) -> None:
    views = [SequenceView(np.arange(n, dtype=np.int32), np.ones(n, np.uint8)) for n in (4, 3)]
    whole = replace(build_thd_batch(views), position_ids=np.asarray(positions))
    made = to_device(whole, torch.device("cpu"))
    assert made.position_ids.tolist() == [positions]
    assert made.packed_seq_params.positions.tolist() == [0, 1, 2, 0, 1]


def test_a_row_counts_itself_once_and_names_the_ranks_that_share_it() -> None:
    made = to_device(row(4), torch.device("cpu"))
    assert (made.divisor.item(), made.packed_seq_params.cp_group) == (4, None)
    group = SimpleNamespace(size=lambda: 2)
    shared = to_device(row(4), torch.device("cpu"), cp_size=2, cp_group=group).packed_seq_params
    assert (shared.cp_group, shared.local_cp_size) == (group, 2)


def test_every_tensor_of_a_row_is_on_the_device_that_is_asked_for() -> None:
    assert {one.device.type for one in to_device(row(3), torch.device("meta"), mtp_layers=1).all()} == {"meta"}


def test_padded_bounds_are_passed_where_they_differ_or_a_graph_reads_them() -> None:
    assert to_device(row(3), torch.device("cpu")).packed_seq_params.cu_seqlens_q_padded is None
    fixed = to_device(row(3), torch.device("cpu"), is_static=True)
    assert fixed.packed_seq_params.cu_seqlens_q_padded.tolist() == [0, 3]
    assert to_device(row(3), torch.device("cpu")).packed_seq_params.ahead == ()


def test_a_row_is_filled_with_another_of_its_shape() -> None:
    first, second = (to_device(one, torch.device("cpu"), mtp_layers=1) for one in (row(3), row(3)))
    second.tokens.add_(7)
    second.packed_seq_params.ahead[0].labels.add_(5)
    first.fill(second)
    assert [one.tolist() for one in first.all()] == [one.tolist() for one in second.all()]
    with pytest.raises(ValueError, match="shorter"):
        first.fill(to_device(row(3), torch.device("cpu")))


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


@pytest.mark.parametrize("experts", [{}, {"family": "qwen3_moe", "num_experts": 2, "expert_ffn_hidden_size": 8}])
def test_a_chunk_gets_all_of_a_row_and_its_labels_only_where_losses_are_asked_for(experts) -> None:
    model = ModelConfig(num_layers=1, hidden_size=16, ffn_hidden_size=16, **experts)
    views = [SequenceView(np.arange(n, dtype=np.int32), np.ones(n, dtype=np.uint8)) for n in (4, 6)]
    seen: dict[str, object] = {}
    with runtime.alone(0, 1) as job:
        join(ParallelConfig(), 1)
        (chunk,) = build_model(model, ParallelConfig(), vocab_size=128, device=job.device)
        chunk.register_forward_pre_hook(lambda _, __, named: seen.update(named), with_kwargs=True)
        given = to_device(build_thd_batch(views, pad_to_multiple=4), job.device)
        losses = run_row(chunk, given)
        assert seen.pop("labels") is given.labels
        logits = run_row(chunk, given, with_labels=False)
    assert (losses.shape, logits.shape) == ((1, 12), (1, 12, 128))
    real = ~given.padding_mask
    expected = torch.nn.functional.cross_entropy(logits[real], given.labels[real], reduction="none")
    torch.testing.assert_close(losses[real], expected)
    assert seen.pop("labels") is None
    assert seen.pop("attention_mask") is None
    assert seen.pop("padding_mask", None) is (given.padding_mask if experts else None)
    names = {"input_ids": "tokens", "position_ids": "position_ids", "packed_seq_params": "packed_seq_params"}
    assert {name: seen[name] is getattr(given, field) for name, field in names.items()} == dict.fromkeys(names, True)
    assert seen.keys() == names.keys()


def test_a_row_s_loss_is_the_weighted_sum_over_its_tokens_and_its_report_is_exact_and_without_gradient() -> None:
    losses = torch.tensor([[2.0, 3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0, 0.5]])
    total, divisor, report = sum_loss(mask, torch.tensor(3, dtype=torch.int), losses)
    total.backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [[1.0, 0.0, 0.5]]
    assert (total.item(), divisor.item(), report.tolist()) == (4.5, 3, [4.5, 3.0, 2.0])
    assert (divisor.dtype, report.dtype, report.requires_grad) == (torch.int32, torch.float64, False)


def test_the_report_of_a_row_has_the_loss_and_the_weight_of_each_source() -> None:
    losses, mask = torch.tensor([[2.0, 3.0, 5.0]]), torch.tensor([[1.0, 0.0, 0.5]])
    sources = torch.tensor([[2, 1, 2]])
    report = sum_loss(mask, torch.tensor(3), losses, sources=sources, num_sources=4)[2]
    assert report.tolist() == [4.5, 3, 2, 0, 0, 4.5, 0, 0, 0, 1.5, 0]
