from __future__ import annotations

import dataclasses
import pickle
from itertools import islice
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import ConfigError, LoaderError, ScheduleError
from harness.loader import (
    BatchRange,
    Blend,
    EpochOrder,
    Loader,
    LoaderConfig,
    LoaderState,
    RankBatch,
    RankLayout,
    build_batch,
)
from harness.loader import plan as loader_plan
from harness.loader.blend import BlendOrder
from harness.loader.plan import BatchReader, row_media
from harness.records import Int32Array, Int64Array, Medium, Pack
from harness.schedule import DYNAMIC, SCHEDULERS, ScheduleConfig, SequenceCost
from harness.thd import build_thd_batch, context_parallel_indices, padded_lengths, padding_multiple, tokens_ahead
from tests.samples.small_packs import batch_digest


class MemorySource:
    """Packs in a list; remembers which were read."""

    fingerprint = "memory"

    def __init__(self, packs: list[Pack]) -> None:
        self.packs = packs
        self.asked: list[int] = []
        self.pack_offsets: Int64Array = np.cumsum([0, *[pack.num_sequences for pack in packs]])
        self.sequence_lengths: Int32Array = np.concatenate([pack.sequence_lengths for pack in packs])

    def __len__(self) -> int:
        return len(self.packs)

    def read(self, indices: list[int]) -> list[Pack]:
        self.asked += indices
        return [self.packs[index] for index in indices]


def pack(*lengths: int, first_id: int = 1) -> Pack:
    """Token ids count up through the pack; every second label is trained, never the last of a sequence."""
    total = sum(lengths)
    starts = np.cumsum([0, *lengths])
    mask = np.arange(total) % 2
    mask[starts[1:] - 1] = 0
    return Pack(input_ids=np.arange(total) + first_id, loss_mask=mask, seq_start_id=starts[:-1])


def source(num_packs: int = 11, seed: int = 0) -> MemorySource:
    random = np.random.default_rng(seed)
    return MemorySource(
        [pack(*random.integers(2, 12, random.integers(1, 5)), first_id=100 * index + 1) for index in range(num_packs)]
    )


def reader(
    data: MemorySource, name: str = "dp_balanced", *, capacity: int = 40, size: int = 4, **layout: int
) -> BatchReader:
    return BatchReader(
        data,
        LoaderConfig(seed=3, global_batch_size=size, block_packs=2, window_blocks=2),
        schedule=ScheduleConfig(name, capacity),
        layout=RankLayout(**layout, shares_rows=name == DYNAMIC),
    )


def batch(data: MemorySource, step: BatchRange, name: str = "dp_balanced", **layout: int) -> RankBatch:
    made = reader(data, name, **layout)
    return build_batch(made.read(step), layout=RankLayout(**layout), before=LoaderState(seed=3), num_packs=len(data))


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 4])
def test_the_ranks_together_train_the_whole_batch_once(name: str, dp_size: int, multiple: int) -> None:
    data = source()
    step = BatchRange(epoch=1, index=0, start=0, stop=4)
    ranks = [
        batch(data, step, name, dp_rank=rank, dp_size=dp_size, pad_to_multiple=multiple) for rank in range(dp_size)
    ]
    packs = ranks[0].pack_ids
    expected = [
        sequence for index in packs for sequence in range(data.pack_offsets[index], data.pack_offsets[index + 1])
    ]
    # Of ranks that share a row, the first counts it.
    rows = [
        ids
        for number, rank in enumerate(ranks)
        for row, ids in zip(rank.rows, rank.sequence_ids, strict=True)
        if number % row.shared_by == 0
    ]
    assert sorted(id for row in rows for id in row.tolist()) == sorted(expected)
    assert len({rank.num_microbatches for rank in ranks}) == 1
    for rank in ranks:
        assert rank.pack_ids.tolist() == packs.tolist()
        assert rank.num_sequences == len(expected)
        assert rank.num_tokens == sum(len(data.packs[index]) - data.packs[index].num_sequences for index in packs)
        # Without what ranks that share a row pad it with.
        tokens = padded_lengths(data.sequence_lengths, multiple)
        assert rank.imbalance.rank_tokens.tolist() == [
            round(sum(tokens[ids].sum() / row.shared_by for row, ids in zip(one.rows, one.sequence_ids, strict=True)))
            for one in ranks
        ]
        assert all(
            row.shared_by > 1 or len(row) == tokens[ids].sum()
            for row, ids in zip(rank.rows, rank.sequence_ids, strict=True)
            if ids.size
        )


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("laid_out_at_once", [1, 40, 32_768])
def test_rows_hold_the_sequences_that_they_name(name: str, laid_out_at_once: int, monkeypatch) -> None:
    monkeypatch.setattr(loader_plan, "_TOKENS_AT_ONCE", laid_out_at_once)
    data = source()
    views = [view for stored in data.packs for view in stored.sequences()]
    made = batch(data, BatchRange(0, 0, 3, 9), name, dp_rank=1, dp_size=2, pad_to_multiple=2)
    assert sum(ids.size for ids in made.sequence_ids) > 5
    for row, ids in zip(made.rows, made.sequence_ids, strict=True):
        alone = build_thd_batch([views[id] for id in ids], pad_to_multiple=2)
        for field in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded"):
            assert getattr(row, field).tolist() == getattr(alone, field).tolist()


def test_rows_are_laid_out_together_until_their_tokens_reach_the_next_multiple(monkeypatch) -> None:
    together, build = [], loader_plan.rows_from_arrays
    monkeypatch.setattr(loader_plan, "_TOKENS_AT_ONCE", 20)
    monkeypatch.setattr(
        loader_plan, "rows_from_arrays", lambda **given: together.append(len(given["row_lengths"])) or build(**given)
    )
    assert batch(MemorySource([pack(10)] * 5), BatchRange(0, 0, 0, 5), "as_packed").num_microbatches == 5
    assert together == [1, 2, 2]


@settings(deadline=None, max_examples=100)
@given(
    packs=st.lists(st.lists(st.integers(2, 30), min_size=1, max_size=4), min_size=1, max_size=6),
    name=st.sampled_from(sorted(SCHEDULERS)),
    dp_size=st.integers(1, 3),
    cp_size=st.integers(1, 2),
    tp_size=st.integers(1, 2),
)
def test_no_row_of_any_rank_has_padding_only_at_its_end(
    packs: list[list[int]], name: str, dp_size: int, cp_size: int, tp_size: int
) -> None:
    cp_size = 1 if name == DYNAMIC else cp_size
    multiple = padding_multiple(cp_size=cp_size, tp_size=tp_size, sequence_parallel=True)
    size = {"dp_size": dp_size, "cp_size": cp_size, "tp_size": tp_size, "pad_to_multiple": multiple, "capacity": 128}
    data = MemorySource([pack(*lengths) for lengths in packs])
    for rank in range(dp_size):
        layout = RankLayout(dp_rank=rank, dp_size=dp_size, cp_size=cp_size, tp_size=tp_size, pad_to_multiple=multiple)
        raw = reader(data, name, **size, dp_rank=rank).read(BatchRange(0, 0, 0, len(packs)))
        for row in build_batch(raw, layout=layout, before=LoaderState(seed=3), num_packs=len(packs)).rows:
            is_seen = not np.array_equal(row.cu_seqlens[:-1], row.cu_seqlens_padded[:-1])
            assert is_seen == (row.num_tokens < len(row))


def test_a_rank_reads_only_the_packs_of_its_rows() -> None:
    asked = []
    for rank in range(2):
        data = source()
        batch(data, BatchRange(0, 0, 0, 4), "as_packed", dp_rank=rank, dp_size=2)
        asked.append(set(data.asked))
    assert [len(packs) for packs in asked] == [2, 2]
    assert not asked[0] & asked[1]


class PartSource(MemorySource):
    """Packs in a list, of which tokens outside the spans are -1."""

    pack_size = 1 << 30

    def read_parts(self, indices: list[int], spans: list[Int64Array]) -> list[Pack]:
        found = []
        for index, some in zip(indices, spans, strict=True):
            ids = np.full_like(self.packs[index].input_ids, -1)
            for first, end in some.tolist():
                ids[first:end] = self.packs[index].input_ids[first:end]
            found.append(dataclasses.replace(self.packs[index], input_ids=ids))
        return found


@pytest.mark.parametrize(("name", "dp_size", "cp_size"), [("as_packed", 1, 4), ("dp_balanced", 2, 2), (DYNAMIC, 4, 1)])
@pytest.mark.parametrize("mtp_layers", [0, 2])
def test_a_rank_reads_its_chunks_of_shared_rows_and_the_labels_after_them(
    name: str, dp_size: int, cp_size: int, mtp_layers: int
) -> None:
    packs, step, unread = source(seed=4).packs, BatchRange(epoch=0, index=0, start=0, stop=8), 0
    packs += [pack(90), pack(3, 75)]
    for dp_rank, cp_rank in np.ndindex(dp_size, cp_size):
        multiple = padding_multiple(cp_size=cp_size)
        place = {"dp_rank": dp_rank, "dp_size": dp_size, "cp_rank": cp_rank, "cp_size": cp_size}
        place |= {"pad_to_multiple": multiple, "shares_rows": name == DYNAMIC}
        made = []
        for data, ahead in (
            (MemorySource(packs), None),
            (PartSource(packs), None),
            (PartSource(packs), 1 + mtp_layers),
        ):
            layout = RankLayout(**place, reads_ahead=ahead)
            config = LoaderConfig(seed=3, global_batch_size=8, block_packs=2, window_blocks=9)
            read = BatchReader(
                data, config, schedule=ScheduleConfig(name, 24 if name == DYNAMIC else 96 // cp_size), layout=layout
            )
            made.append(build_batch(read.read(step), layout=layout, before=LoaderState(seed=3), num_packs=len(packs)))
        assert batch_digest(made[0]) == batch_digest(made[1])
        for whole, part in zip(made[0].rows, made[2].rows, strict=True):
            own = context_parallel_indices(
                whole.cu_seqlens_padded,
                cp_size=cp_size * whole.shared_by,
                cp_rank=cp_rank if cp_size > 1 else dp_rank % whole.shared_by,
            )
            assert np.array_equal(whole.loss_mask, part.loss_mask)
            for distance in range(mtp_layers + 1):
                for field in ("tokens", "labels"):
                    first, second = (
                        getattr(tokens_ahead(row, distance) if distance else row, field)[own] for row in (whole, part)
                    )
                    assert np.array_equal(first, second), (field, distance)
            unread += np.count_nonzero(part.tokens == -1)
    assert unread > 100


def test_the_work_of_finding_parts_grows_with_the_sequences_and_not_with_their_product_with_packs() -> None:
    class Counted(np.ndarray):  # type: ignore[type-arg]
        seen = 0

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
            Counted.seen += self.size
            return getattr(ufunc, method)(*map(np.asarray, inputs), **options)

    sequences = np.arange(400)
    made, pack_of = reader(PartSource([pack(5, 4)] * 200)), (sequences // 2).view(Counted)
    spans = made._spans(sequences, np.ones(400, np.int64), pack_of, np.arange(200))
    assert [one.tolist() for one in spans or []] == [[[0, 5], [5, 9]]] * 200
    assert Counted.seen < 10 * 400


def test_ranks_without_sequences_train_rows_of_zero_loss() -> None:
    data = MemorySource([pack(5)])
    made = batch(data, BatchRange(0, 0, 0, 1), dp_rank=2, dp_size=3, pad_to_multiple=4)
    assert [len(row) for row in made.rows] == [4]
    assert made.rows[0].num_trained_tokens == 0
    assert made.sequence_ids[0].tolist() == []
    assert made.num_tokens == 4


def test_the_state_after_a_batch_is_where_the_next_begins_and_groups_of_microbatches_are_filled() -> None:
    data = source(11)
    made = batch(data, BatchRange(epoch=2, index=1, start=4, stop=8))
    assert (made.state.epoch, made.state.packs_consumed) == (2, 8)
    assert (made.epoch, made.step_in_epoch) == (2, 1)
    made = batch(data, BatchRange(epoch=2, index=2, start=8, stop=11))
    assert (made.state.epoch, made.state.packs_consumed) == (3, 0)
    assert batch(source(), BatchRange(0, 0, 0, 1), group_size=4).num_microbatches == 4


def test_a_sequence_over_capacity_is_refused_by_name_before_training() -> None:
    data = MemorySource([pack(5, 9), pack(4, 42, 50)])
    reader(data, capacity=49).check()
    with pytest.raises(
        ScheduleError, match=r"sequence 4 of the dataset has 49 model tokens .* more than the 48 of a row"
    ) as caught:
        reader(data, capacity=48).check()
    assert caught.value.where == "pack 1, its sequence 2"
    assert "to 49 or more" in caught.value.fix
    # Padding and context parallelism count: 49 become 52 tokens in a row of 2 * 25.
    with pytest.raises(ScheduleError, match="52 model tokens after padding, more than the 50"):
        reader(data, capacity=25, cp_size=2, pad_to_multiple=4).check()
    reader(data, capacity=26, cp_size=2, pad_to_multiple=4).check()
    packs = MemorySource([pack(17, 17), pack(4, 31)])
    reader(packs, "as_packed", capacity=33).check()
    with pytest.raises(ScheduleError, match=r"pack 1 of the dataset has 33 model tokens .* more than the 32 of a row"):
        reader(packs, "as_packed", capacity=32).check()
    reader(packs, "dp_balanced", capacity=32).check()


def test_rows_are_measured_by_the_tokens_of_their_ranks_and_sequences_placed_by_their_cost() -> None:
    made = reader(MemorySource([pack(50)]), capacity=26, cp_size=2, pad_to_multiple=4)
    _, _, placed, imbalance = made.plan(BatchRange(0, 0, 0, 1))
    assert (placed.num_microbatches, imbalance.fill) == (1, 1.0)
    # 8 tokens in one sequence cost as much as four sequences of 4.
    made = BatchReader(
        MemorySource([pack(9, 5, 5, 5, 5)]),
        LoaderConfig(),
        schedule=ScheduleConfig("cost_balanced", 16),
        layout=RankLayout(dp_size=2),
        cost=SequenceCost(linear=0.0, quadratic=1.0),
    )
    imbalance = made.plan(BatchRange(0, 0, 0, 1))[3]
    assert sorted(imbalance.rank_tokens.tolist()) == [8, 16]
    assert imbalance.rank_cost.tolist() == [64.0, 64.0]


def test_a_row_names_the_ranks_that_share_it() -> None:
    data, step = MemorySource([pack(39), pack(9), pack(9)]), BatchRange(0, 0, 0, 3)
    for dp_size, rank in ((2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)):
        size = {"dp_rank": rank, "dp_size": dp_size}
        made = reader(data, DYNAMIC, capacity=24, **size)
        made.check()
        raw = made.read(step)
        assert raw.shared_by == (dp_size, dp_size // 2)
        rows = build_batch(raw, layout=RankLayout(**size), before=LoaderState(seed=3), num_packs=3).rows
        # 38 tokens become 4 or 8 equal chunks; two of four ranks share each sequence of the other microbatch.
        assert [(row.shared_by, len(row)) for row in rows] == [(dp_size, 40), (dp_size // 2, 8)]
    assert reader(data, capacity=40).read(step).shared_by == ()


def test_a_message_of_model_tokens_is_laid_out_as_it_is() -> None:
    values = {name: np.arange(3) + 10 * number for number, name in enumerate(("tokens", "labels", "loss_mask"))}
    raw = reader(source()).read(BatchRange(0, 0, 0, 4))
    raw = dataclasses.replace(raw, tokens=values, row_lengths=[np.asarray([2, 1])])
    (row,) = build_batch(raw, layout=RankLayout(), before=LoaderState(seed=3), num_packs=11).rows
    assert (row.tokens.tolist(), row.labels.tolist(), row.position_ids.tolist()) == ([0, 1, 2], [10, 11, 12], [0, 1, 0])


def test_a_sequence_of_one_token_and_a_rank_that_does_not_exist_are_refused_by_name() -> None:
    with pytest.raises(ScheduleError, match="sequence 1 of the dataset has 0 model tokens"):
        reader(MemorySource([pack(5, 1, 3)])).check()
    for name in ("dp", "cp", "tp"):
        for rank in (2, -1):
            with pytest.raises(LoaderError, match=f"rank {rank} is out of range for size 2") as refused:
                RankLayout(**{f"{name}_rank": rank, f"{name}_size": 2})
            assert refused.value.fix == f"use a {name}_rank from 0 to 1"


def test_packs_other_than_the_index_says_are_refused() -> None:
    data = MemorySource([pack(5, 9), pack(4)])
    data.packs[0] = pack(6, 8)
    with pytest.raises(LoaderError, match=r"pack 0 holds 2 sequences of 14 tokens, but 2 of 14 in its dataset's index"):
        batch(data, BatchRange(0, 0, 0, 2))

    class Repeating(MemorySource):
        def read(self, indices: list[int]) -> list[Pack]:
            return super().read([*indices, indices[-1]])

    with pytest.raises(ValueError, match="longer"):
        batch(Repeating([pack(5), pack(4)]), BatchRange(0, 0, 0, 2))


def test_a_reader_reads_the_same_after_pickling_and_in_epochs_back_and_forth() -> None:
    data = source()
    made = reader(data, dp_rank=1, dp_size=2)
    step = BatchRange(0, 1, 4, 8)
    before = made.read(step)
    after = pickle.loads(pickle.dumps(made)).read(step)
    assert before.tokens["input_ids"].tolist() == after.tokens["input_ids"].tolist()
    assert [row.tolist() for row in before.sequence_ids] == [row.tolist() for row in after.sequence_ids]
    made = reader(source(11))
    for epoch in (0, 1, 0):
        expected = EpochOrder(LoaderConfig(seed=3, block_packs=2, window_blocks=2), 11, epoch).packs(4, 8)
        assert made.read(BatchRange(epoch, 1, 4, 8)).pack_ids.tolist() == expected.tolist()


def test_a_reader_of_a_blend_reads_what_the_blend_draws() -> None:
    config = LoaderConfig(seed=3, global_batch_size=4)
    blend = Blend(names=("a", "b"), sizes=(8, 3), weights=(1.0, 1.0), epochs=(None, None))
    made = BatchReader(source(11), config, schedule=ScheduleConfig(), layout=RankLayout(), blend=blend)
    found = []
    for step in islice(blend.steps(config, epoch=0, packs_consumed=0), 3):
        found += made.read(step).pack_ids.tolist()
        assert found[-4:] == BlendOrder(config, blend).packs(step).tolist()
    assert sorted(found)[6:] == [8, 8, 9, 9, 10, 10]


def test_the_digest_sees_every_field() -> None:
    made = batch(source(), BatchRange(0, 0, 0, 4), pad_to_multiple=2)
    digests = {batch_digest(made)}
    for field in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded"):
        changed = getattr(made.rows[0], field).copy()
        changed[-1] += 1
        row = dataclasses.replace(made.rows[0], **{field: changed})
        digests.add(batch_digest(dataclasses.replace(made, rows=[row, *made.rows[1:]])))
    digests.add(batch_digest(dataclasses.replace(made, rows=made.rows[::-1])))
    assert len(digests) == 8
    assert batch_digest(batch(source(), BatchRange(0, 0, 0, 4), pad_to_multiple=2)) == batch_digest(made)


@pytest.mark.parametrize("sizes", [(5, 5), (6, 7)])
def test_a_blend_of_other_packs_than_the_dataset_has_is_refused(sizes: tuple[int, int]) -> None:
    blend = Blend(names=("a", "b"), sizes=sizes, weights=None, epochs=(None, None))
    with pytest.raises(ConfigError, match=rf"the blend is of {sum(sizes)} packs, and the dataset has 12"):
        Loader(source(12), LoaderConfig(global_batch_size=4, num_workers=0), blend=blend)


def test_a_loader_takes_a_data_parallel_rank_instead_of_a_layout():
    data = source(12)
    config = LoaderConfig(global_batch_size=4, num_workers=0)
    for rank in range(2):
        with Loader(data, config, dp_rank=rank, dp_size=2, num_steps=3) as by_rank:
            digests = [batch_digest(batch) for batch in by_rank]
        layout = RankLayout(dp_rank=rank, dp_size=2)
        with Loader(data, config, schedule=ScheduleConfig(), layout=layout, num_steps=3) as by_layout:
            assert digests == [batch_digest(batch) for batch in by_layout]
    with pytest.raises(ConfigError, match="together with a layout"):
        Loader(data, config, layout=RankLayout(), dp_rank=1, dp_size=2)


def test_media_of_a_row_have_the_places_of_their_sequences_and_a_file_that_is_shown_twice_counts_once() -> None:
    image, other = Medium("image", 2, 4, b"abc"), Medium("image", 1, 6, b"defgh")
    asked: list[list[Medium]] = []
    again = dataclasses.replace(image, start=9)
    row = row_media([(image,), (), (other, again)], lambda media: asked.append(media) or {"x": 1})
    assert row is not None
    assert (row.sequences.tolist(), row.starts.tolist(), row.tokens.tolist()) == ([0, 2, 2], [2, 1, 9], [4, 6, 4])
    assert row.digests.tolist() == [xxhash.xxh3_64_intdigest(data) for data in (b"abc", b"defgh", b"abc")]
    assert (row.digests.dtype, row.starts.dtype) == (np.uint64, np.int64)
    assert row.num_bytes == len(b"abc" + b"defgh")
    assert (row.arrays, asked) == ({"x": 1}, [[image, other, again]])
    assert row_media([(), ()], lambda media: {}) is None


def test_each_row_of_a_step_gets_its_own_media() -> None:
    raw = reader(MemorySource([pack(30), pack(30)]), capacity=32).read(BatchRange(0, 0, 0, 2))
    media = row_media([(Medium("image", 1, 2, b"abc"),)], lambda media: {})
    raw = dataclasses.replace(raw, media=(None, media))
    made = build_batch(raw, layout=RankLayout(), before=LoaderState(seed=3), num_packs=2)
    assert [row.media for row in made.rows] == [None, media]


class MediaSource(MemorySource):
    """Packs in a list, of which some sequences show images."""

    has_media = True

    def __init__(self, packs: list[Pack], media: dict[int, Medium]) -> None:
        super().__init__(packs)
        self.media = media
        self.read_tokens = super().read

    def read(self, indices: list[int]) -> list[Pack]:
        raise AssertionError("the files of all media would be read")

    def read_media(self, sequences: Int64Array) -> list[tuple[Medium, ...]]:
        return [(self.media[number],) if number in self.media else () for number in sequences.tolist()]

    def media_tokens(self, sequences: Int64Array) -> tuple[Int64Array, Int64Array]:
        shown = [(place, number) for place, number in enumerate(sequences.tolist()) if number in self.media]
        return np.array([place for place, _ in shown]), np.array([self.media[number].tokens for _, number in shown])


def media_reader(layout: RankLayout, cost: SequenceCost | None = None, **given: Any) -> BatchReader:
    image = Medium("image", 1, 4, b"abc")
    data = MediaSource([pack(10)] * 4, {0: image, 2: dataclasses.replace(image, data=b"defgh")})
    config, balanced = LoaderConfig(global_batch_size=4, block_packs=4), ScheduleConfig("cost_balanced", 36)
    return BatchReader(data, config, schedule=balanced, layout=layout, cost=cost, **given)


def test_a_rank_reads_the_media_of_its_own_sequences_and_a_stage_without_encoder_none() -> None:
    files: dict[int, bytes] = {0: b"abc", 2: b"defgh"}
    for rank in (0, 1):
        layout = RankLayout(dp_rank=rank, dp_size=2)
        raw = media_reader(layout, features=lambda media: {"files": [one.data for one in media]}).read(
            BatchRange(0, 0, 0, 4)
        )
        shown = [[files[number] for number in row.tolist() if number in files] for row in raw.sequence_ids]
        assert [media.arrays["files"] if media is not None else [] for media in raw.media] == shown
    later = RankLayout(is_first_stage=False)
    assert media_reader(later).read(BatchRange(0, 0, 0, 4)).media == ()
    with pytest.raises(ConfigError, match="this trainer or model has no encoder for them"):
        media_reader(RankLayout())


def test_a_schedule_weighs_the_work_of_encoding_media() -> None:
    cost = SequenceCost(encode=lambda tokens: 1e9 * (tokens - 3))
    rows = {}
    for name, used in (("without", None), ("with", cost)):
        made = media_reader(RankLayout(dp_size=2), used, features=lambda media: {})
        made._source.media = {0: made._source.media[0]}  # type: ignore[attr-defined]
        _, sequences, placed, _ = made.plan(BatchRange(0, 0, 0, 4))
        rows[name] = sorted(len(placed.row(0, rank)) for rank in (0, 1))
        alone = [sequences[placed.row(0, rank)].tolist() for rank in (0, 1) if len(placed.row(0, rank)) == 1]
    assert rows == {"without": [2, 2], "with": [1, 3]}
    assert alone == [[0]]
