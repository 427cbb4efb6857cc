"""A deliberate defect of the data goes through real writers, readers and loaders, and the report names its place.

A real run of `recipes.sft` is the reference. Of differences in its metrics, `tests/unit/parity` has the tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.recipes.parity import make_dataset
from small_packs import TINY, write_packs

from harness.formats import Provenance, open_dataset
from harness.loader import Loader, LoaderConfig, RankBatch
from harness.parity.compare import IDENTICAL, compare_runs
from harness.parity.locate import recorded_run
from harness.parity.result import Check, Difference
from harness.plan import SftConfig
from harness.recipes import sft
from harness.records import Pack
from harness.schedule import ScheduleConfig
from harness.train.digests import BATCHES, DIGESTS_FILE, DigestWriter, merge_ranks, rank_rows

from ..distributed.conftest import run_here

STEPS = 6
SETTINGS = ("loader.global_batch_size=8", "loader.block_packs=4", "schedule.max_tokens_per_rank=256")
LOADING = LoaderConfig(global_batch_size=8, block_packs=4, num_workers=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("faults") / "data")


@pytest.fixture(scope="module")
def reference(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "run"
    trainer = (f"steps={STEPS}", "eval_interval=3", "device=cpu", "record_batches=true")
    settings = [f"data.path={data}", f"run_dir={folder}", *SETTINGS, *TINY]
    run_here(sft, SftConfig, [*settings, "loader.num_workers=1", *(f"trainer.{one}" for one in trainer)])
    return folder


@pytest.fixture
def copy(reference: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reference, tmp_path / "run"))


def batches_of(source: Path, steps: int = STEPS) -> list[RankBatch]:
    schedule = ScheduleConfig("dp_balanced", 256)
    return list(Loader(open_dataset(source), LOADING, schedule=schedule, num_steps=steps))


def record(folder: Path, steps: Iterable[Sequence[RankBatch]]) -> None:
    """Put the data records of a run into a folder, with the batches of each of its processes."""
    (folder / DIGESTS_FILE).unlink()
    shutil.rmtree(folder / BATCHES)
    writer = DigestWriter(folder)
    for step, processes in enumerate(steps, start=1):
        parts = [
            rank_rows(one, process=process, dp_rank=0, is_first_stage=True, is_last_stage=True, keep=True)
            for process, one in enumerate(processes)
        ]
        writer.write(merge_ranks(step, processes[0], parts))
    writer.close()


def failed(reference: Path, found: Path) -> dict[str, Check]:
    made = compare_runs(recorded_run(reference), recorded_run(found), IDENTICAL, same_layout=True)
    return {check.name: check for check in made if not check.passed}


def first(reference: Path, found: Path) -> Difference:
    checks = failed(reference, found)
    assert checks, "the defect was not found"
    return next(iter(checks.values())).difference


def rewritten(data: Path, target: Path, change: Callable[[int, Pack], Iterable[Pack]], format: str = "parquet") -> Path:
    """Write the training set again with the packs that `change(number, pack)` returns."""
    packs = (pack for number, stored in enumerate(open_dataset(data / "train")) for pack in change(number, stored))
    return write_packs(target, packs, format=format, pack_size=256, provenance=Provenance(counts={"vocab_size": 300}))


def victim(data: Path) -> tuple[int, int, int, int]:
    """Find a sequence of step 3 with more than 20 tokens: microbatch, sequence id, pack, first sequence of the pack."""
    offsets = open_dataset(data / "train").pack_offsets
    batch = batches_of(data / "train", 3)[2]
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
    record(copy, zip(batches_of(rewritten(data, tmp_path / "memmap", lambda number, pack: [pack], "memmap"))))
    assert failed(reference, copy) == {}


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_one_token_changed_in_one_format_is_named_to_its_position(reference, copy, data, tmp_path, format) -> None:
    def edit(pack: Pack, start: int) -> Pack:
        ids = pack.input_ids.copy()
        ids[start + 5] = 299
        return replace(pack, input_ids=ids)

    microbatch, sequence, pack, offset = victim(data)
    stored = open_dataset(data / "train")[pack].sequence(sequence - offset)
    record(copy, zip(batches_of(rewritten(data, tmp_path / "other", changed(data, edit), format))))
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


def test_a_sequence_is_named_without_a_position_where_only_digests_were_recorded(
    reference, copy, data, tmp_path
) -> None:
    def edit(pack: Pack, start: int) -> Pack:
        return replace(pack, input_ids=np.where(np.arange(len(pack)) == start + 7, 298, pack.input_ids))

    other = rewritten(data, tmp_path / "other" / "train", changed(data, edit))
    record(copy, zip(batches_of(other)))
    shutil.rmtree(copy / BATCHES)
    bare = shutil.copytree(reference, tmp_path / "bare")
    shutil.rmtree(bare / BATCHES)
    difference = first(bare, copy)
    assert (difference.step, difference.sequence, difference.field, difference.position) == (
        *(3, victim(data)[1], "tokens"),
        None,
    )
    assert len(difference.found) == 16


def with_row(batch: RankBatch, place: int, **changes: object) -> RankBatch:
    rows = list(batch.rows)
    rows[place] = replace(rows[place], **changes)
    return replace(batch, rows=rows)


def without_a_boundary(batch: RankBatch) -> RankBatch:
    bounds = {name: np.delete(getattr(batch.rows[1], name), 1) for name in ("cu_seqlens", "cu_seqlens_padded")}
    return with_row(batch, 1, **bounds)


def without_the_last(batch: RankBatch) -> RankBatch:
    return replace(batch, **{name: getattr(batch, name)[:-1] for name in ("pack_ids", "rows", "sequence_ids")})


# The step, what is done to its batch, the check that fails first, and what the difference says.
DEFECTS: dict[str, tuple[int, Callable[[RankBatch], RankBatch], str, dict[str, object]]] = {
    "a pack dropped": (3, without_the_last, "data", {"field": "packs", "position": 7, "found": None}),
    "positions that do not restart": (
        4,
        lambda batch: with_row(batch, 1, position_ids=np.arange(len(batch.rows[1]))),
        "data",
        {"microbatch": 1, "field": "position_ids", "position": 0, "expected": 0},
    ),
    "a boundary lost": (4, without_a_boundary, "data", {"microbatch": 1, "field": "boundaries"}),
    "a row trained twice": (
        5,
        lambda batch: replace(batch, rows=batch.rows * 2, sequence_ids=batch.sequence_ids * 2),
        "data",
        {"microbatch": 0, "field": "sequences", "expected": 1, "found": 2},
    ),
    "rows in another order": (
        5,
        lambda batch: replace(batch, rows=batch.rows[::-1], sequence_ids=batch.sequence_ids[::-1]),
        "placement",
        {},
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_a_global_batch_is_named(reference, copy, data, defect) -> None:
    step, edit, check, values = DEFECTS[defect]
    batches = batches_of(data / "train")
    right = batches[step - 1]
    batches[step - 1] = edit(right)
    record(copy, zip(batches))
    checks = failed(reference, copy)
    assert next(iter(checks)) == check
    difference = checks[check].difference
    assert {name: getattr(difference, name) for name in values} == values
    assert difference.step == step
    if defect == "a pack dropped":
        assert (difference.expected, difference.sequence) == (right.pack_ids[-1], right.sequence_ids[-1][0])
        assert "is not trained" in difference.message
    if defect == "a boundary lost":
        assert difference.position == difference.expected < difference.found
        assert list(checks) == ["data"]


def test_missing_digests_are_named(reference, copy) -> None:
    lines = (copy / DIGESTS_FILE).read_text().splitlines(keepends=True)
    (copy / DIGESTS_FILE).write_text("".join(lines[:4] + lines[5:]))
    assert failed(reference, copy)["data"].difference.message == "step 5: the run recorded no digests of it"
    (copy / DIGESTS_FILE).unlink()
    assert "recorded no digests" in failed(reference, copy)["data"].difference.message


def test_a_rank_whose_rows_differ_from_those_of_its_group_is_named(reference, copy, data) -> None:
    batches = batches_of(data / "train")
    odd = [replace(batch, rows=[replace(row, tokens=row.tokens + 1) for row in batch.rows]) for batch in batches]
    record(copy, zip(batches, [*batches[:2], odd[2], *batches[3:]], strict=True))
    difference = first(reference, copy)
    assert (difference.step, difference.field) == (3, "ranks")
    assert "process 1, microbatch 0, data-parallel rank 0: tokens" in difference.message
