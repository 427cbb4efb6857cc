"""Every check of a parity report can fail: a deliberate defect is planted, and the report names its place.

A real run of `recipes.sft` is the reference. A defect of the data goes through real writers, readers and loaders; a
defect of the training is written into the records of the run.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.recipes.parity import make_dataset

from harness.formats import Provenance, open_dataset, open_writer
from harness.loader import Loader, LoaderConfig, RankBatch
from harness.parity.compare import IDENTICAL, compare_runs
from harness.parity.locate import recorded_run
from harness.parity.result import Check, Difference
from harness.records import Pack
from harness.schedule import ScheduleConfig
from harness.train.digests import BATCHES, DIGESTS_FILE, DigestWriter, merge_ranks, rank_rows
from harness.train.metrics import METRICS_FILE

from ..distributed.conftest import run_command

STEPS = 6
SETTINGS = ("loader.global_batch_size=8", "loader.block_packs=4", "schedule.max_tokens_per_rank=256")
LOADING = LoaderConfig(global_batch_size=8, block_packs=4, num_workers=0)
MODEL = ("num_layers=2", "hidden_size=32", "ffn_hidden_size=64", "num_attention_heads=4", "num_query_groups=2")
Plant = Callable[[list[RankBatch]], list[RankBatch]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("faults") / "data")


@pytest.fixture(scope="module")
def reference(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "run"
    model = [f"model.{setting}" for setting in MODEL]
    code, output = run_command(
        [
            *(sys.executable, "-m", "harness.recipes.sft", f"data.path={data}", f"run_dir={folder}", *SETTINGS, *model),
            *("loader.num_workers=1", f"trainer.steps={STEPS}", "trainer.eval_interval=3", "trainer.device=cpu"),
            "trainer.record_batches=true",
        ]
    )
    assert code == 0, output
    return folder


@pytest.fixture
def copy(reference: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reference, tmp_path / "run"))


def trained(folder: Path, source: Path, plant: Plant = list, loading: LoaderConfig = LOADING) -> None:
    """Put the data records of a run on `source` into `folder`."""
    loader = Loader(open_dataset(source), loading, schedule=ScheduleConfig("dp_balanced", 256), num_steps=STEPS)
    record(folder, plant(list(loader)))


def record(folder: Path, batches: Iterable[RankBatch]) -> None:
    (folder / DIGESTS_FILE).unlink()
    shutil.rmtree(folder / BATCHES)
    writer = DigestWriter(folder)
    for step, batch in enumerate(batches, start=1):
        own = rank_rows(batch, process=0, dp_rank=0, is_first_stage=True, is_last_stage=True, keep=True)
        writer.write(merge_ranks(step, batch, [own]))
    writer.close()


def failed(reference: Path, found: Path) -> dict[str, Check]:
    made = compare_runs(recorded_run(reference), recorded_run(found), IDENTICAL, same_layout=True)
    return {check.name: check for check in made if not check.passed}


def first(reference: Path, found: Path) -> Difference:
    checks = failed(reference, found)
    assert checks, "the defect was not found"
    difference = next(iter(checks.values())).difference
    assert difference is not None
    return difference


def rewritten(data: Path, target: Path, change: Callable[[int, Pack], Iterable[Pack]], format: str = "parquet") -> Path:
    """Write the training set again with the packs that `change(number, pack)` returns."""
    reader = open_dataset(data / "train")
    with open_writer(target, format=format, pack_size=256, provenance=Provenance(counts={"vocab_size": 300})) as writer:
        for number in range(len(reader)):
            for pack in change(number, reader[number]):
                writer.append(pack)
    return target


def third_batch(data: Path) -> RankBatch:
    batches = Loader(open_dataset(data / "train"), LOADING, schedule=ScheduleConfig("dp_balanced", 256), num_steps=3)
    return list(batches)[2]


def victim(data: Path) -> tuple[int, int, int, int]:
    """Find a sequence of step 3 with more than 20 tokens: microbatch, sequence id, pack, first sequence of the pack."""
    offsets = open_dataset(data / "train").pack_offsets
    batch = third_batch(data)
    for microbatch, (row, sequences) in enumerate(zip(batch.rows, batch.sequence_ids, strict=True)):
        for place, sequence in enumerate(sequences.tolist()):
            if microbatch and place and row.cu_seqlens[place + 1] - row.cu_seqlens[place] > 20:
                pack = int(np.searchsorted(offsets, sequence, side="right")) - 1
                return microbatch, sequence, pack, int(offsets[pack])
    raise AssertionError("no such sequence")


def changed(data: Path, edit: Callable[[Pack, int], Pack]) -> Callable[[int, Pack], Iterator[Pack]]:
    """Return a change that applies `edit(pack, start)` to the pack where the victim begins at `start`."""
    _, sequence, wanted, offset = victim(data)

    def change(number: int, pack: Pack) -> Iterator[Pack]:
        yield edit(pack, int(pack.seq_start_id[sequence - offset])) if number == wanted else pack

    return change


def test_the_same_data_gives_no_difference_in_any_format(reference, copy, data, tmp_path) -> None:
    trained(copy, rewritten(data, tmp_path / "memmap", lambda number, pack: [pack], "memmap"))
    assert failed(reference, copy) == {}


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_one_token_changed_in_one_format_is_named_to_its_position(reference, copy, data, tmp_path, format) -> None:
    def edit(pack: Pack, start: int) -> Pack:
        ids = pack.input_ids.copy()
        ids[start + 5] = 299
        return replace(pack, input_ids=ids)

    microbatch, sequence, pack, offset = victim(data)
    stored = open_dataset(data / "train")[pack].sequence(sequence - offset)
    trained(copy, rewritten(data, tmp_path / "other", changed(data, edit), format))
    difference = first(reference, copy)
    assert difference == Difference(
        f"step 3, microbatch {microbatch}, rank 0, sequence {sequence}: tokens at position 5 is 299, not "
        f"{stored.input_ids[5]}",
        step=3,
        microbatch=microbatch,
        rank=0,
        sequence=sequence,
        field="tokens",
        position=5,
        expected=int(stored.input_ids[5]),
        found=299,
    )


def test_positions_are_found_in_the_datasets_where_only_digests_were_recorded(reference, copy, data, tmp_path) -> None:
    def edit(pack: Pack, start: int) -> Pack:
        return replace(pack, input_ids=np.where(np.arange(len(pack)) == start + 7, 298, pack.input_ids))

    other = rewritten(data, tmp_path / "other" / "train", changed(data, edit))
    trained(copy, other)
    shutil.rmtree(copy / BATCHES)
    settings = copy / "config.yaml"
    settings.write_text(settings.read_text().replace(str(data), str(other.parent)))
    bare = shutil.copytree(reference, tmp_path / "bare")
    shutil.rmtree(bare / BATCHES)
    difference = first(bare, copy)
    assert (difference.step, difference.sequence, difference.position) == (3, victim(data)[1], 7)
    assert difference.found == 298
    shutil.rmtree(other)  # without the dataset the position is unknown, and the sequence is still named
    difference = first(bare, copy)
    assert (difference.step, difference.sequence, difference.field, difference.position) == (
        *(3, victim(data)[1], "tokens"),
        None,
    )
    assert len(difference.found) == 16


def test_a_dropped_pack_is_named(reference, copy, data) -> None:
    lost = third_batch(data)

    def drop(batches: list[RankBatch]) -> list[RankBatch]:
        batches[2] = replace(
            lost, pack_ids=lost.pack_ids[:-1], rows=lost.rows[:-1], sequence_ids=lost.sequence_ids[:-1]
        )
        return batches

    trained(copy, data / "train", drop)
    difference = first(reference, copy)
    assert (difference.step, difference.field, difference.position) == (3, "packs", 7)
    assert (difference.expected, difference.found) == (int(lost.pack_ids[-1]), None)
    assert difference.sequence == int(lost.sequence_ids[-1][0])
    assert "is not trained" in difference.message


def test_two_packs_swapped_in_a_global_batch_are_named(reference, copy, data) -> None:
    def swap(batches: list[RankBatch]) -> list[RankBatch]:
        ids = batches[1].pack_ids.copy()
        ids[[2, 5]] = ids[[5, 2]]
        batches[1] = replace(batches[1], pack_ids=ids)
        return batches

    trained(copy, data / "train", swap)
    difference = first(reference, copy)
    assert (difference.step, difference.field, difference.position) == (2, "packs", 2)
    assert list(failed(reference, copy)) == ["data"]


def edited_rows(step: int, edit: Callable[[RankBatch], RankBatch]) -> Plant:
    return lambda batches: [edit(batch) if number == step else batch for number, batch in enumerate(batches, start=1)]


def test_positions_that_do_not_restart_and_labels_that_are_not_shifted_are_named(reference, copy, data) -> None:
    def continued(batch: RankBatch) -> RankBatch:
        row = batch.rows[1]
        return replace(batch, rows=[batch.rows[0], replace(row, position_ids=np.arange(len(row))), *batch.rows[2:]])

    trained(copy, data / "train", edited_rows(4, continued))
    difference = first(reference, copy)
    assert (difference.step, difference.microbatch, difference.field, difference.position) == (4, 1, "position_ids", 0)
    assert (difference.expected, difference.found > 0) == (0, True)

    def unshifted(batch: RankBatch) -> RankBatch:
        return replace(batch, rows=[replace(batch.rows[0], labels=batch.rows[0].tokens), *batch.rows[1:]])

    trained(copy, data / "train", edited_rows(2, unshifted))
    difference = first(reference, copy)
    assert (difference.step, difference.microbatch, difference.field) == (2, 0, "labels")


def test_a_lost_boundary_is_named(reference, copy, data) -> None:
    def lose(batch: RankBatch) -> RankBatch:
        row = batch.rows[1]
        kept = [np.delete(bounds, 1) for bounds in (row.cu_seqlens, row.cu_seqlens_padded)]
        return replace(
            batch,
            rows=[batch.rows[0], replace(row, cu_seqlens=kept[0], cu_seqlens_padded=kept[1]), *batch.rows[2:]],
        )

    trained(copy, data / "train", edited_rows(4, lose))
    difference = first(reference, copy)
    assert (difference.step, difference.microbatch, difference.field) == (4, 1, "boundaries")
    assert difference.position == difference.expected < difference.found
    assert list(failed(reference, copy)) == ["data"]


def test_a_sequence_trained_twice_and_rows_in_another_order_are_named(reference, copy, data) -> None:
    def twice(batch: RankBatch) -> RankBatch:
        return replace(
            batch, rows=[*batch.rows, batch.rows[0]], sequence_ids=[*batch.sequence_ids, batch.sequence_ids[0]]
        )

    trained(copy, data / "train", edited_rows(5, twice))
    difference = first(reference, copy)
    assert (difference.step, difference.microbatch, difference.field) == (5, 0, "sequences")
    assert (difference.expected, difference.found) == (1, 2)

    def other_order(batch: RankBatch) -> RankBatch:
        return replace(batch, rows=batch.rows[::-1], sequence_ids=batch.sequence_ids[::-1])

    trained(copy, data / "train", edited_rows(5, other_order))
    checks = failed(reference, copy)
    assert list(checks) == ["placement"]
    assert checks["placement"].difference.step == 5


def edit_metrics(folder: Path, edit: Callable[[dict], dict | None]) -> None:
    path = folder / METRICS_FILE
    lines = [edit(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))


@pytest.mark.parametrize(
    ("column", "change", "check"),
    [
        ("loss", lambda value: float(np.nextafter(value, 9)), "loss"),
        ("grad_norm", lambda value: value * 1.5, "grad_norm"),
        ("tokens", lambda value: value + 1, "trained_tokens"),
        ("validation_loss", lambda value: 1.0, "validation_loss"),
    ],
)
def test_a_metric_that_drifted_at_one_step_is_named(reference, copy, column, change, check) -> None:
    edit_metrics(copy, lambda line: {**line, column: change(line[column])} if line["step"] == 4 else line)
    checks = failed(reference, copy)
    assert list(checks) == [check]
    assert (checks[check].difference.step, checks[check].difference.field) == (4, column)


def test_missing_steps_and_missing_digests_are_named(reference, copy) -> None:
    edit_metrics(copy, lambda line: None if line["step"] == 4 else line)
    checks = failed(reference, copy)
    assert checks["steps"].difference.message == f"{STEPS - 1} of {STEPS} steps were completed, step 4 is missing"

    shutil.copy(reference / METRICS_FILE, copy / METRICS_FILE)
    lines = (copy / DIGESTS_FILE).read_text().splitlines(keepends=True)
    (copy / DIGESTS_FILE).write_text("".join(lines[:4] + lines[5:]))
    checks = failed(reference, copy)
    assert checks["data"].difference.message == "step 5: the run recorded no digests of it"
    (copy / DIGESTS_FILE).unlink()
    assert "recorded no digests" in failed(reference, copy)["data"].difference.message


def test_a_rank_whose_rows_differ_from_those_of_its_group_is_named(reference, copy, data) -> None:
    batches = list(
        Loader(open_dataset(data / "train"), LOADING, schedule=ScheduleConfig("dp_balanced", 256), num_steps=STEPS)
    )
    (copy / DIGESTS_FILE).unlink()
    writer = DigestWriter(copy)
    for step, batch in enumerate(batches, start=1):
        odd = replace(batch, rows=[replace(row, tokens=row.tokens + (step == 3)) for row in batch.rows])
        parts = [
            rank_rows(one, process=process, dp_rank=0, is_first_stage=True, is_last_stage=True)
            for process, one in enumerate((batch, odd))
        ]
        writer.write(merge_ranks(step, batch, parts))
    writer.close()
    difference = first(reference, copy)
    assert (difference.step, difference.field) == (3, "ranks")
    assert "process 1, microbatch 0, data-parallel rank 0: tokens" in difference.message
