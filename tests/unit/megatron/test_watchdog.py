"""Which rank holds the others up."""

from __future__ import annotations

from dataclasses import replace

from harness.megatron.watchdog import Beat, find_culprit

TRAINING = Beat(count=10, step=37, doing="training", stood_s=61.0, host="node1", process=4711)


def told(**ranks: Beat) -> dict[int, Beat]:
    return {int(name[1:]): beat for name, beat in ranks.items()}


def later(beats: dict[int, Beat], *silent: int) -> dict[int, Beat]:
    return {rank: beat if rank in silent else replace(beat, count=beat.count + 4) for rank, beat in beats.items()}


def test_a_rank_that_has_stopped_telling_is_named_though_another_reads_data() -> None:
    beats = told(r0=TRAINING, r1=replace(TRAINING, doing="reading data"), r2=replace(TRAINING, step=36, host="node2"))
    rank, sentence = find_culprit(beats, later(beats, 2))
    assert rank == 2
    assert sentence == ("rank 2 is gone or stopped (host node2, process 4711); last heard of in step 36, training")


def test_of_several_silent_ranks_the_first_is_named_and_the_others_are_counted() -> None:
    beats = told(r0=TRAINING, r4=TRAINING, r5=TRAINING)
    rank, sentence = find_culprit(beats, later(beats, 4, 5))
    assert rank == 4
    assert sentence.startswith("rank 4 (and 1 more) is gone or stopped")


def test_the_rank_that_reads_data_holds_those_up_that_train() -> None:
    beats = told(r0=TRAINING, r1=replace(TRAINING, doing="reading data", stood_s=62.4), r2=TRAINING)
    assert find_culprit(beats, later(beats)) == (
        1,
        "rank 1 (host node1, process 4711) has been in step 37, reading data, for 62 s",
    )


def test_the_rank_a_step_behind_holds_the_others_up() -> None:
    beats = told(r0=TRAINING, r1=TRAINING, r2=replace(TRAINING, step=36))
    assert find_culprit(beats, later(beats))[0] == 2


def test_where_all_ranks_train_the_same_step_none_is_named() -> None:
    beats = told(r0=TRAINING, r1=TRAINING)
    assert find_culprit(beats, later(beats)) == (
        None,
        "all 2 ranks are in step 37, training, and none goes on",
    )
