"""The loader that Megatron-LM's pretrain takes as an external one, without Megatron's loop."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.errors import CheckpointError, ConfigError, ScheduleError
from harness.formats import open_writer
from harness.integrations import RankStream
from harness.integrations.megatron_lm import ExternalLoader, data_loader, datasets_provider
from harness.loader import LoaderConfig, RankLayout
from harness.records import Pack
from harness.schedule import ScheduleConfig


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten packs of one sequence of 3 to 12 tokens."""
    folder = tmp_path_factory.mktemp("data") / "packs"
    with open_writer(str(folder), format="memmap", pack_size=16) as writer:
        for number in range(10):
            mask = np.ones(number + 3, np.uint8)
            mask[-1] = 0
            writer.append(Pack(np.arange(number + 3) + 20 * number, mask, [0]))
    return str(folder)


def loader(
    path: str, *, dp_rank: int = 0, dp_size: int = 1, size: int = 4, seed: int = 3, **more: Any
) -> ExternalLoader:
    config = LoaderConfig(global_batch_size=size, seed=seed, num_workers=0)
    schedule = ScheduleConfig("as_packed", 16)
    stream = RankStream(path, config, schedule=schedule, dp_rank=dp_rank, dp_size=dp_size)
    return ExternalLoader(stream, num_microbatches=size // dp_size, **more)


def lengths(one: ExternalLoader, rows: int) -> list[int]:
    return [next(one)["tokens"].shape[1] for _ in range(rows)]


def test_rows_are_those_of_the_stream_and_the_end_of_an_epoch_is_filled_with_rows_of_zero_loss(path: str) -> None:
    one = loader(path)
    stream = iter(one.stream.__class__(path, one.stream.config, schedule=ScheduleConfig("as_packed", 16)))
    planned = [len(row) for _ in range(4) for row in next(stream).rows]

    read = lengths(one, 16)

    # Ten packs are two batches of four and one of two, which gets two rows of one token.
    assert read == [*planned[:10], 1, 1, *planned[10:]]
    assert sorted(read[:10]) == list(range(2, 12))


def test_a_position_saved_by_two_ranks_is_restored_on_one(path: str) -> None:
    whole = lengths(loader(path), 12)
    ranks = [loader(path, dp_rank=rank, dp_size=2) for rank in range(2)]
    for rank in ranks:
        lengths(rank, 2)
    positions = [rank.save_state() for rank in ranks]

    resumed = loader(path)
    resumed.restore_state(positions[1])

    assert positions[0] == positions[1]
    assert lengths(resumed, 8) == whole[4:]


def test_a_batch_whose_rows_were_not_all_read_is_read_again(path: str) -> None:
    one = loader(path)
    before = one.save_state()
    lengths(one, 3)

    assert one.save_state() == before
    lengths(one, 1)
    assert one.save_state() != before


def arguments(**changes: Any) -> SimpleNamespace:
    settings = dict.fromkeys(("rampup_batch_size", "mtp_num_layers", "load", "virtual_pipeline_model_parallel_size"))
    settings |= {"dataloader_type": "external", "micro_batch_size": 1, "calculate_per_token_loss": True}
    settings |= {"full_validation": False, "eval_iters": 0, "multiple_validation_sets": False}
    settings |= {"iteration": 3, "consumed_train_samples": 12}
    return SimpleNamespace(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"dataloader_type": "single"}, "--dataloader-type external"),
        ({"micro_batch_size": 2}, "--micro-batch-size 1"),
        ({"calculate_per_token_loss": False}, "--calculate-per-token-loss"),
        ({"rampup_batch_size": [2, 2, 8]}, "--rampup-batch-size"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"full_validation": True}, "--eval-iters N"),
        ({"eval_iters": 1, "multiple_validation_sets": True}, "--valid-data-path"),
    ],
)
def test_arguments_that_train_packed_rows_wrongly_are_refused_with_the_flag(changes: dict[str, Any], flag: str) -> None:
    data_loader._check(arguments())
    with pytest.raises(ConfigError) as caught:
        data_loader._check(arguments(**changes))
    assert flag in caught.value.fix


def test_the_position_is_that_of_the_checkpoint_that_was_loaded(path: str, tmp_path: Path) -> None:
    one = loader(path)
    lengths(one, 4)
    for iteration, rank in ((2, 0), (3, 1)):
        folder = tmp_path / f"iter_{iteration:07d}" / "mp_rank_00"
        folder.mkdir(parents=True)
        torch.save({"dataloader_state_dict": one.save_state()}, folder / f"train_dataloader_dprank{rank:03d}.pt")
        lengths(one, 4)

    assert data_loader._saved_position(arguments(load=str(tmp_path)), loader(path))["packs_consumed"] == 8
    assert data_loader._saved_position(arguments(iteration=0), loader(path)) is None


def test_a_checkpoint_without_a_position_or_with_a_damaged_one_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="after step 3, but its position in the data is missing") as caught:
        data_loader._saved_position(arguments(load=str(tmp_path)), loader(path))
    assert "--finetune" in caught.value.fix
    folder = tmp_path / "iter_0000003" / "mp_rank_00"
    folder.mkdir(parents=True)
    (folder / "train_dataloader_dprank000.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        data_loader._saved_position(arguments(load=str(tmp_path)), loader(path))


def test_a_pack_longer_than_megatrons_sequences_is_refused_with_the_flag(path: str) -> None:
    of = arguments(seq_length=8, padded_vocab_size=None, pipeline_model_parallel_size=1)

    with pytest.raises(ScheduleError, match="more than the 8 of a row") as caught:
        data_loader._open(path, LoaderConfig(global_batch_size=4, num_workers=0), RankLayout(), of)
    assert (caught.value.where, "--seq-length" in caught.value.fix) == ("--seq-length 8", True)


def test_virtual_pipeline_stages_resume_by_the_number_of_samples(path: str) -> None:
    """Three batches of four are an epoch of ten packs and its ragged end."""
    of = arguments(virtual_pipeline_model_parallel_size=2, consumed_train_samples=16)

    state = data_loader._saved_position(of, loader(path))

    assert (state["epoch"], state["packs_consumed"]) == (1, 4)
    with pytest.raises(CheckpointError, match="15 samples"):
        data_loader._saved_position(arguments(**{**vars(of), "consumed_train_samples": 15}), loader(path))


@pytest.mark.skipif(importlib.util.find_spec("megatron.training") is not None, reason="megatron.training is here")
def test_a_version_without_a_training_loop_is_named() -> None:
    with pytest.raises(ConfigError, match=r"megatron\.training") as caught:
        datasets_provider()
    assert "pip install" in caught.value.fix


def test_a_middle_stage_of_a_pipeline_reads_bounds_alone_and_has_the_same_position(path: str) -> None:
    of = arguments(seq_length=16, padded_vocab_size=None, pipeline_model_parallel_size=3)
    middle = RankLayout(is_first_stage=False, is_last_stage=False)
    first, other = (
        data_loader._open(path, LoaderConfig(global_batch_size=4, num_workers=0), layout, of)
        for layout in (RankLayout(is_last_stage=False), middle)
    )

    rows = [(next(first), next(other)) for _ in range(4)]
    assert all(torch.equal(one["cu_seqlens"], two["cu_seqlens"]) for one, two in rows)
    other.restore_state(first.save_state())
    assert other.save_state()["packs_consumed"] == 4
