"""Digests of a step's data are equal on every layout, and differ when anything that is trained differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.recipes.parity import make_dataset

from harness.errors import FormatError
from harness.formats import open_dataset
from harness.loader import Loader, LoaderConfig, RankBatch, RankLayout
from harness.schedule import ScheduleConfig
from harness.train.digests import (
    DIGESTS_FILE,
    DigestWriter,
    RankRows,
    StepDigests,
    kept_sequence,
    merge_ranks,
    rank_rows,
    read_digests,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("digests") / "data") / "train"


def batch(data: Path, *, dp_rank: int = 0, dp_size: int = 1, pad_to_multiple: int = 1, schedule: str = "dp_balanced"):
    made = Loader(
        open_dataset(data),
        LoaderConfig(global_batch_size=6, num_workers=0),
        schedule=ScheduleConfig(schedule, 512),
        layout=RankLayout(dp_rank=dp_rank, dp_size=dp_size, pad_to_multiple=pad_to_multiple),
        num_steps=1,
    )
    return next(iter(made))


def rows(original: RankBatch, *, process: int = 0, dp_rank: int = 0, first: bool = True, last: bool = True) -> RankRows:
    return rank_rows(original, process=process, dp_rank=dp_rank, is_first_stage=first, is_last_stage=last, keep=True)


def digests(data: Path, dp_size: int = 1, **layout) -> StepDigests:
    batches = [batch(data, dp_rank=rank, dp_size=dp_size, **layout) for rank in range(dp_size)]
    parts = [rows(batch, process=rank, dp_rank=rank) for rank, batch in enumerate(batches)]
    return merge_ranks(1, batches[0], parts)


def test_a_global_batch_has_one_digest_on_any_layout_and_with_any_padding(data) -> None:
    plain = digests(data)
    assert len(plain.rows) >= 2
    assert digests(data, pad_to_multiple=8).digest == plain.digest
    assert digests(data, dp_size=3, pad_to_multiple=4).digest == plain.digest
    assert digests(data, schedule="cost_balanced", dp_size=2).digest == plain.digest
    assert digests(data, schedule="as_packed").digest == plain.digest


@pytest.mark.parametrize("field", ["tokens", "labels", "loss_mask", "position_ids"])
def test_one_other_value_gives_another_digest(data, field) -> None:
    original = batch(data)
    values = getattr(original.rows[1], field).copy()
    values[7] = 1 - values[7] if field == "loss_mask" else values[7] + 1
    other = replace(original, rows=[original.rows[0], replace(original.rows[1], **{field: values}), *original.rows[2:]])
    assert merge_ranks(1, other, [rows(other)]).digest != merge_ranks(1, original, [rows(original)]).digest


def test_pipeline_stages_digest_the_fields_they_read_and_a_rank_with_other_rows_is_named(data) -> None:
    original = batch(data)
    blank = replace(
        original, rows=[replace(row, tokens=row.tokens * 0, labels=row.labels * 0) for row in original.rows]
    )
    parts = [rows(original, process=0, last=False), rows(blank, process=1, first=False, last=False)]
    whole = merge_ranks(1, original, [*parts, rows(original, process=2, first=False)])
    assert (whole.digest, whole.disagreements) == (digests_of(original), [])

    odd = replace(original, rows=[*original.rows[:-1], replace(original.rows[-1], tokens=original.rows[-1].tokens + 1)])
    results = merge_ranks(1, original, [rows(original), rows(odd, process=1)]).disagreements
    last = len(original.rows) - 1
    assert results == [
        f"process 1, microbatch {last}, data-parallel rank 0: tokens of sequence "
        f"{original.sequence_ids[-1][0]} differs from other ranks"
    ]
    short = merge_ranks(
        1, original, [rows(original), RankRows(1, rows(original).rank, ("position_ids",), rows(original).rows[1:])]
    )
    assert short.disagreements == ["processes of data-parallel rank 0 have different microbatches"]


def digests_of(original: RankBatch) -> str:
    return merge_ranks(1, original, [rows(original)]).digest


def test_digests_round_trip_and_a_resumed_run_replaces_the_steps_it_repeats(data, tmp_path) -> None:
    step = digests(data)
    writer = DigestWriter(tmp_path)
    for number in (1, 2, 3):
        writer.write(replace(step, step=number))
    writer.close()
    with (tmp_path / DIGESTS_FILE).open("a") as file:
        file.write('{"step": 4, "cut sho')
    DigestWriter(tmp_path, first_step=3).close()
    read = read_digests(tmp_path)
    assert [(step_read.step, step_read.digest) for step_read in read] == [(1, step.digest), (2, step.digest)]

    row = step.rows[1]
    whole = batch(data).rows[1]
    start, stop = whole.cu_seqlens[1:3].tolist()
    kept = kept_sequence(tmp_path, 2, read[1].rows[1], 1)
    assert np.array_equal(kept["labels"], whole.labels[start:stop])
    assert row.lengths[1] == kept["tokens"].shape[0]
    assert kept_sequence(tmp_path, 9, row, 1) == {}
    (tmp_path / DIGESTS_FILE).write_bytes(b"")  # a power failure, in a run that did not force it to disk
    printed: list[str] = []
    DigestWriter(tmp_path, first_step=3, log=printed.append).close()
    assert "digests.jsonl has no records of 2 of the trained steps 1 to 2" in printed[0]


@pytest.mark.parametrize("content", [b"PK\x03\x04 cut", b"", b"text", b"\x93NUMPY\x01\x00", None])
def test_damaged_batches_are_an_error_with_their_place(data, tmp_path, content) -> None:
    step, writer = digests(data), DigestWriter(tmp_path)
    writer.write(step)
    writer.close()
    (path,) = (tmp_path / "batches").iterdir()
    path.write_bytes(path.read_bytes()[:300] if content is None else content)
    with pytest.raises(FormatError, match="the batches of step 1 cannot be read") as refused:
        kept_sequence(tmp_path, 1, step.rows[0], 0)
    assert refused.value.where == str(path)


def test_a_line_changed_by_hand_and_a_run_without_digests_are_refused(data, tmp_path) -> None:
    with pytest.raises(FormatError, match="recorded no digests"):
        read_digests(tmp_path)
    writer = DigestWriter(tmp_path)
    writer.write(digests(data))
    writer.close()
    path = tmp_path / DIGESTS_FILE
    path.write_text(path.read_text().replace('"packs": [', '"packs": [1, '))
    with pytest.raises(FormatError, match="line 1 is not a step's digests: the digest of step 1 does not match"):
        read_digests(tmp_path)
