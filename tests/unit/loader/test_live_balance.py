"""Balanced live steps: every sequence that any rank has read is trained whole, once, where all ranks place it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from harness.loader import RankLayout
from harness.loader.live.balance import packs_in_order, place, send_to_trainers
from harness.loader.live.position import LivePosition
from harness.loader.live.rank import BatchPlan, LivePack, Offer, describe_pack
from harness.loader.plan import row_media
from harness.records import Medium, Pack
from harness.schedule import SequenceCost, measure_imbalance, schedule
from harness.thd import padded_lengths

# Lengths of the sequences of each pack, by rank; the offers of the second rank are of two folders.
READ = [[[5, 9], [7]], [[3, 8, 4]], [[6]]]


def read_pack(rank: int, number: int, lengths: list[int]) -> LivePack:
    ids = [
        np.arange(length, dtype=np.int32) + 1000 * rank + 100 * number + 10 * at for at, length in enumerate(lengths)
    ]
    masks = [(np.arange(length) % (2 + at) == 0).astype(np.uint8) for at, length in enumerate(lengths)]
    starts = np.cumsum([0, *lengths[:-1]])
    names = 100 * rank + 10 * number + np.arange(len(lengths), dtype=np.int64)
    # Two media of the first sequence of each rank's first pack, none of others.
    media = tuple(Medium("image", 2 * at, 1, bytes([rank, at] * (3 + rank + at))) for at in range(2) if number == 0)
    return LivePack(Pack(np.concatenate(ids), np.concatenate(masks), starts, media), names)


def offer(rank: int, packs: list[LivePack], source: int = 0) -> Offer:
    read = [describe_pack(pack, number, rank, COST) for number, pack in enumerate(packs)]
    return Offer(rank, source, read, LivePosition(), None, None, "stream", None, False, None)


COST = SequenceCost(1.0, 1.0, encode=lambda tokens: 40 * tokens)
HELD = [[read_pack(rank, number, lengths) for number, lengths in enumerate(packs)] for rank, packs in enumerate(READ)]
OFFERS = [offer(2, HELD[2]), offer(0, HELD[0][:1]), offer(0, HELD[0][1:], 1), offer(1, HELD[1])]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("as_packed", {}),
        ("as_packed", {"group_size": 2}),
        ("dp_balanced", {}),
        ("dp_balanced", {"group_size": 2}),
        ("cost_balanced", {"cp_size": 2, "pad_to_multiple": 4}),
        ("cost_balanced", {"group_size": 2}),
    ],
)
def test_every_sequence_is_trained_whole_by_the_rank_of_its_place(name, options) -> None:
    order = packs_in_order(OFFERS)
    assert [(pack.number, pack.dp_rank) for pack in order] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    plan = BatchPlan(RankLayout(dp_rank=0, dp_size=3, **options), 4, 24, COST, schedule=name)
    placement = place(order, plan)
    lengths = [5, 9, 3, 8, 4, 6, 7]
    assert (placement.lengths.tolist(), placement.readers.tolist()) == (lengths, [0, 0, 1, 1, 1, 2, 0])
    assert placement.ids.tolist() == [0, 1, 100, 101, 102, 200, 10]
    row, media_cost = plan.max_tokens_per_row, np.array([80.0, 0, 80, 0, 0, 80, 0])
    padded = padded_lengths(placement.lengths, plan.layout.pad_to_multiple)
    work = measure_imbalance(placement.placed, padded, max_tokens_per_row=row, cost=COST, media_cost=media_cost)
    assert placement.imbalance.rank_cost.tolist() == work.rank_cost.tolist()
    if name == "as_packed":
        assert placement.placed.num_microbatches == 2
        rows = [[placement.placed.row(at, rank).tolist() for rank in range(3)] for at in range(2)]
        assert rows == [[[0, 1], [2, 3, 4], [5]], [[6], [], []]]
    else:
        layout, padded = plan.layout, padded_lengths(np.array(lengths), plan.layout.pad_to_multiple)
        sizes = {"dp_size": 3, "cp_size": layout.cp_size, "group_size": layout.group_size}
        limits = {"max_tokens_per_rank": 24 // layout.cp_size, "cost": plan.cost}
        limits["media_cost"] = np.array([80.0, 0, 80, 0, 0, 80, 0])
        expected = schedule(name, padded, pack_offsets=np.array([0, 2, 5, 6, 7]), **sizes, **limits)
        assert placement.placed.order.tolist() == expected.order.tolist()
        assert placement.placed.row_offsets.tolist() == expected.row_offsets.tolist()
    sent: list[list[np.ndarray]] = []

    def keep(outgoing, _):
        sent.append(outgoing)
        raise StopAsyncIteration

    for rank in range(3):
        with pytest.raises(StopAsyncIteration):
            send_to_trainers([*HELD[rank]], placement, rank, keep)
    by_id = {
        int(id_): view
        for packs in HELD
        for pack in packs
        for id_, view in zip(pack.sequence_ids, pack.pack.sequences(), strict=True)
    }
    trained = []
    for rank in range(3):

        def swap(outgoing, expected, rank=rank):
            arriving = [sent[other][rank] for other in range(3)]
            assert [part.shape[0] for part in arriving] == expected
            return arriving

        def features(media):
            return {"data": np.array([(one.kind, len(one.data)) for one in media])}

        for at, row in enumerate(send_to_trainers([*HELD[rank]], placement, rank, swap, features)):
            of_row = placement.placed.row(at, rank)
            assert (row is None) == (not len(of_row))
            if row is not None:
                assert row.sequence_ids.tolist() == placement.ids[of_row].tolist()
                trained += row.sequence_ids.tolist()
                media = [by_id[id_].media for id_ in row.sequence_ids.tolist()]
                assert repr(row.media) == repr(row_media(media, features))
                for id_, view in zip(row.sequence_ids.tolist(), row.pack.sequences(), strict=True):
                    assert view.input_ids.tolist() == by_id[id_].input_ids.tolist()
                    assert view.loss_mask.tolist() == by_id[id_].loss_mask.tolist()
    assert sorted(trained) == sorted(placement.ids.tolist())


def test_text_has_no_cost_of_media_and_needs_no_features() -> None:
    live = LivePack(Pack(np.arange(5), np.zeros(5), [0, 3]), np.arange(2))
    plan = BatchPlan(RankLayout(), 1, 24, COST, schedule="dp_balanced")
    placement = place(packs_in_order([offer(0, [live])]), plan)
    text = measure_imbalance(placement.placed, np.array([2, 1]), max_tokens_per_row=24, cost=COST)
    assert placement.imbalance.rank_cost.tolist() == text.rank_cost.tolist()
    (row,) = send_to_trainers([live], placement, 0, lambda outgoing, _: outgoing)
    assert row is not None
    assert (row.pack, row.sequence_ids.tolist(), row.media) == (live.pack, [0, 1], None)


def test_media_of_eight_rows_are_decoded_at_once() -> None:
    live = [read_pack(0, 0, [4]) for _ in range(32)]
    placement = place(packs_in_order([offer(0, live)]), BatchPlan(RankLayout(), 32, 24, COST))
    together, threads = threading.Barrier(8, timeout=9), set()

    def features(media):
        threads.add(threading.get_ident())
        together.wait()
        return {"data": np.array([len(one.data) for one in media])}

    assert len(send_to_trainers(live, placement, 0, lambda outgoing, _: outgoing, features)) == 32
    assert len(threads) == 8
