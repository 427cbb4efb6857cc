"""Rows for trainers that fix the number of microbatches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.errors import ConfigError, LoaderError
from harness.formats import PackReader, open_dataset, open_writer
from harness.integrations import FixedRows, RankStream, as_packed_rows, require_as_packed
from harness.loader import LoaderConfig, RankLayout
from harness.records import Pack


@pytest.fixture
def reader(tmp_path: Path) -> PackReader:
    """Five packs of 4 to 8 tokens, in two sequences each."""
    with open_writer(tmp_path / "data", pack_size=8) as writer:
        for number in range(5):
            ids = np.arange(10 * number, 10 * number + 4 + number)
            writer.append(Pack(ids, np.r_[[1, 0], [1] * (len(ids) - 3), 0], [0, 2]))
    return open_dataset(tmp_path / "data")


def rows_of(reader: PackReader, *, dp_rank: int = 0, dp_size: int = 1, **settings: object) -> FixedRows:
    layout = RankLayout(dp_rank=dp_rank, dp_size=dp_size)
    config = LoaderConfig(global_batch_size=4, num_workers=0, shuffle=False)
    schedule = as_packed_rows(
        reader.pack_offsets, reader.sequence_lengths, layout, pad_rows_to=None, setting="seq_length"
    )
    stream = RankStream(reader, config, schedule=schedule, layout=layout)
    return FixedRows(stream, rows_per_step=4 // dp_size, **settings)  # type: ignore[arg-type]


def first_tokens(rows: FixedRows, count: int) -> list[int]:
    return [int(next(rows).tokens[0]) for _ in range(count)]


def test_a_pack_is_a_row_and_the_end_of_an_epoch_is_filled_with_rows_that_train_nothing(reader: PackReader) -> None:
    rows = rows_of(reader)

    assert first_tokens(rows, 4) == [0, 10, 20, 30]
    last = [next(rows) for _ in range(4)]
    assert int(last[0].tokens[0]) == 40
    assert [row.num_trained_tokens for row in last] == [6, 0, 0, 0]
    assert rows.state_dict()["epoch"] == 1
    assert len(list(rows_of(reader, one_epoch=True))) == 8


def test_ranks_share_the_packs_of_a_step_and_run_as_many_microbatches(reader: PackReader) -> None:
    ranks = [rows_of(reader, dp_rank=rank, dp_size=2) for rank in (0, 1)]

    assert [first_tokens(rows, 2) for rows in ranks] == [[0, 20], [10, 30]]
    assert [[next(rows).num_trained_tokens for _ in range(2)] for rows in ranks] == [[6, 0], [0, 0]]
    padded = [next(rows_of(reader, dp_rank=rank, dp_size=2, pad_rows_to=8)) for rank in (0, 1)]
    assert [row.cu_seqlens.tolist() for row in padded] == [[0, 1, 2, 2, 2], [0, 1, 3, 3, 3]]
    assert [row.cu_seqlens_padded.tolist() for row in padded] == [[0, 1, 2, 8, 8], [0, 1, 3, 8, 8]]


def test_a_position_is_taken_between_steps_and_loaded_on_other_ranks(reader: PackReader) -> None:
    rows = rows_of(reader)
    first_tokens(rows, 4)
    position = rows.state_dict()
    next(rows)

    with pytest.raises(LoaderError, match="within a step: 1 of its 4 rows were read"):
        rows.state_dict()
    rows.load_state_dict(position)  # the rows left of a step are read again
    assert first_tokens(rows, 1) == [40]
    other = rows_of(reader, dp_rank=1, dp_size=2)
    other.load_state_dict(position)
    assert [next(other).num_trained_tokens for _ in range(2)] == [0, 0]
    assert first_tokens(other, 2) == [10, 30]


def test_a_row_length_that_a_pack_exceeds_or_the_layout_cannot_cut_is_refused(reader: PackReader) -> None:
    with pytest.raises(ConfigError, match="pack 4 of the dataset requires 6 tokens, but a row holds 5") as caught:
        as_packed_rows(
            reader.pack_offsets, reader.sequence_lengths, RankLayout(), pad_rows_to=5, setting="training.seq_len"
        )

    assert caught.value.where == "training.seq_len"
    assert "6 or more" in caught.value.fix
    with pytest.raises(ConfigError, match="is 10, but this layout pads to multiples of 4"):
        as_packed_rows(
            reader.pack_offsets,
            reader.sequence_lengths,
            RankLayout(cp_size=2, pad_to_multiple=4),
            pad_rows_to=10,
            setting="dataset.seq_length",
        )


@pytest.mark.parametrize("schedule", ["dp_balanced", "cost_balanced"])
def test_balanced_schedules_are_refused_by_name(schedule: str) -> None:
    with pytest.raises(ConfigError, match=f"Megatron-Bridge fixes the number of microbatches.*schedule is {schedule}"):
        require_as_packed(schedule, trainer="Megatron-Bridge", setting="dataset.schedule")


def test_closing_within_a_step_loses_no_row_of_it(reader: PackReader) -> None:
    rows = rows_of(reader)
    first_tokens(rows, 4)
    position = rows.state_dict()
    assert first_tokens(rows, 1) == [40]
    rows.close()

    assert rows.state_dict() == position
    assert first_tokens(rows, 1) == [40]
