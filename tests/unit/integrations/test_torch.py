"""Rows as PyTorch datasets: the loader's own batches, an exact position, and no second way to split them."""

from __future__ import annotations

import json
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from harness import Loader, LoaderConfig, open_dataset, open_writer
from harness.errors import ConfigError, LoaderError
from harness.integrations import DialectError, HuggingFaceRow, MegatronRow, RankStream, Row
from harness.integrations.torch import PackedDataset, StoredRows
from harness.loader import Blend, RunData
from harness.records import Pack
from harness.schedule import ScheduleConfig


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten packs of two or three sequences."""
    folder = tmp_path_factory.mktemp("data") / "packs"
    with open_writer(str(folder), format="memmap", pack_size=64) as writer:
        for number in range(10):
            sizes = [3 + number % 5, 4 + number % 3, *[2] * (number % 2)]
            ends = np.cumsum(sizes)
            mask = (np.arange(ends[-1]) % 3 > 0).astype(np.uint8)
            mask[ends - 1] = 0
            writer.append(Pack(np.arange(ends[-1]) + 100 * number, mask, ends - sizes))
    return str(folder)


def packed(path: str, *, rank: int = 0, ranks: int = 1, workers: int = 0, **more: object) -> PackedDataset:
    config = LoaderConfig(global_batch_size=4, seed=3, num_workers=workers)
    schedule = ScheduleConfig("dp_balanced", max_tokens_per_rank=32)
    stream = RankStream(path, config, schedule=schedule, dp_rank=rank, dp_size=ranks)
    return PackedDataset(stream, **{"dialect": "megatron", **more})  # type: ignore[arg-type]


def tokens(rows: list[Row]) -> list[list[int]]:
    return [row["tokens"][0].tolist() for row in rows]


def test_rows_are_those_of_the_loader_as_tensors(path: str) -> None:
    schedule = ScheduleConfig("dp_balanced", max_tokens_per_rank=32)
    config = LoaderConfig(global_batch_size=4, seed=3, num_workers=0)
    loader = Loader(open_dataset(path), config, schedule=schedule, dp_rank=1, dp_size=2, num_epochs=1)
    expected = [row for batch in loader for row in batch.rows]
    data = packed(path, rank=1, ranks=2)
    rows = list(data)

    assert len(data) == len(rows) == len(expected)
    assert tokens(rows) == [row.tokens.tolist() for row in expected]
    assert rows[0]["labels"].dtype == torch.int64
    assert rows[0]["loss_mask"].dtype == torch.float32
    assert rows[0]["cu_seqlens"].dtype == torch.int32


def test_each_pass_is_the_next_epoch(path: str) -> None:
    data = packed(path)
    first, second = tokens(list(data)), tokens(list(data))

    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second))
    assert data.state_dict()["epoch"] == 2


@pytest.mark.parametrize("device", [None, "cpu"])
def test_only_another_process_repeats_a_step_that_was_read_in_part(path: str, device: str | None) -> None:
    schedule = ScheduleConfig("as_packed", max_tokens_per_rank=32)
    config = LoaderConfig(global_batch_size=4, num_workers=0)

    def rows() -> PackedDataset:
        return PackedDataset(RankStream(path, config, schedule=schedule), dialect="huggingface", device=device)

    whole = [row["input_ids"].tolist() for row in rows()]
    data = rows()
    read = [row["input_ids"].tolist() for row in islice(data, 6)]
    assert data.state_dict()["packs_consumed"] == 4
    other = rows()
    other.load_state_dict(data.state_dict())

    assert [row["input_ids"].tolist() for row in islice(other, 2)] == read[4:]
    # The same process has the gradients of the first two rows of the step.
    again = [row["input_ids"].tolist() for row in islice(data, 2)]
    assert sorted(map(str, read[4:] + again)) == sorted(map(str, whole[4:8]))
    assert data.state_dict()["packs_consumed"] == 8


def test_steps_hold_the_rows_of_one_optimizer_step_across_epochs(path: str) -> None:
    data = packed(path)
    steps = list(islice(data.steps(), 4))

    assert [(step.epoch, step.step_in_epoch) for step in steps] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert tokens([row for step in steps[:3] for row in step.rows]) == tokens(list(packed(path)))
    assert steps[0].num_trained_tokens == sum(int(row["loss_mask"].sum()) for row in steps[0].rows)
    assert data.state_dict()["packs_consumed"] == 4


def test_a_resume_with_other_ranks_and_workers_reads_the_same_sequences(path: str) -> None:
    whole = tokens(list(packed(path)))
    first = packed(path, rank=1, ranks=2)
    begun = [*next(first.steps()).rows, *next(packed(path, ranks=2).steps()).rows]
    rest = []
    for rank in range(3):
        second = packed(path, rank=rank, ranks=3, workers=1)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest += list(second)
        second.close()

    def real(rows: list[list[int]]) -> list[int]:
        return sorted(token for row in rows for token in row if row != [0])

    assert real(tokens(begun + rest)) == real(whole)


def test_a_dataloader_without_workers_gives_the_same_rows_and_one_with_workers_is_refused(path: str) -> None:
    rows = list(DataLoader(packed(path, dialect="huggingface"), batch_size=None))

    assert all(isinstance(row, HuggingFaceRow) for row in rows)
    assert [row["input_ids"].tolist() for row in rows] == [
        row["input_ids"].tolist() for row in packed(path, dialect="huggingface")
    ]
    with pytest.raises(LoaderError, match="read in a worker of a DataLoader with 1 workers"):
        next(iter(DataLoader(packed(path), batch_size=None, num_workers=1)))


@pytest.mark.parametrize("dialect", ["megatron", "huggingface"])
def test_rows_that_a_dataloader_puts_into_a_batch_are_refused_by_name(path: str, dialect: str) -> None:
    for data in (packed(path, dialect=dialect), StoredRows(path, dialect=dialect)):
        for rows in (1, 2):
            with pytest.raises(ConfigError, match=f"collates {rows} rows into a batch, but each row") as refused:
                next(iter(DataLoader(data, batch_size=rows)))
            assert "batch_size=None" in refused.value.fix
        assert next(iter(DataLoader(data, batch_size=None))).dialect == dialect


def test_a_loader_that_accelerate_prepared_is_refused_by_name(path: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    data = packed(path, dialect="huggingface")
    accelerator = accelerate.Accelerator(cpu=True)
    for dispatch_batches in (None, False):
        accelerator.dataloader_config.dispatch_batches = dispatch_batches
        prepared = accelerator.prepare(DataLoader(data, batch_size=None))
        with pytest.raises(LoaderError, match="a loader that accelerate prepared"):
            next(iter(prepared))
    del prepared
    accelerator.free_memory()
    assert len(list(data)) == len(data)


def test_a_path_is_taken_by_the_stream_alone_and_a_blend_without_end_has_no_length(path: str) -> None:
    assert len(StoredRows(Path(path), dialect="megatron")) == 10
    assert RankStream(Path(path), LoaderConfig()).num_steps_per_epoch == 2
    with pytest.raises(ConfigError, match="not a stream"):
        PackedDataset(path, dialect="megatron")  # type: ignore[arg-type]
    reader = open_dataset(path)
    blend = Blend(names=("a",), sizes=(10,), weights=(1.0,), epochs=(None,))
    data = PackedDataset(
        RankStream(RunData(reader, None, None, blend=blend), LoaderConfig(num_workers=0)), dialect="megatron"
    )

    with pytest.raises(TypeError, match="no length"):
        len(data)


def test_a_stored_row_is_its_pack_in_either_dialect(path: str) -> None:
    pack = open_dataset(path)[3]
    rows = StoredRows(path, dialect="huggingface")

    assert len(rows) == 10
    assert rows[3]["input_ids"].tolist() == [pack.input_ids.tolist()]
    assert rows[-7]["input_ids"].tolist() == [pack.input_ids.tolist()]
    assert isinstance(StoredRows(path, dialect="megatron")[0], MegatronRow)
    for outside in (10, -11, -20):
        with pytest.raises(IndexError):
            rows[outside]


def test_stored_rows_are_joined_without_what_a_trainer_removed(path: str) -> None:
    pytest.importorskip("transformers")
    from harness.integrations.huggingface import join_rows

    rows = StoredRows(path, dialect="huggingface")
    kept = [{key: rows[at][key] for key in ("input_ids", "labels", "position_ids")} for at in (2, 5)]
    joined = join_rows(kept)  # type: ignore[arg-type]
    packs = open_dataset(path).read([2, 5])

    assert joined["input_ids"].tolist() == [[*packs[0].input_ids, *packs[1].input_ids]]
    assert joined["cu_seq_lens_q"].tolist() == [0, 5, 11, 14, 20, 22]
    assert joined["max_length_k"] == 6
    with pytest.raises(DialectError):
        join_rows([StoredRows(path, dialect="megatron")[0]])


def test_a_state_of_torchdata_is_the_position(path: str) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    whole = tokens(list(packed(path)))
    loader = torchdata.StatefulDataLoader(packed(path), batch_size=None)
    read = tokens(list(islice(loader, 2)))
    again = torchdata.StatefulDataLoader(packed(path, workers=1), batch_size=None)
    again.load_state_dict(loader.state_dict())

    assert read + tokens(list(again)) == whole
    with pytest.raises(LoaderError, match="num_workers=0"):
        next(iter(torchdata.StatefulDataLoader(packed(path), batch_size=None, num_workers=1)))
