"""Megatron-Bridge's own `pretrain` on a CPU: it trains the rows of the loader, and resumes on other ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments import ROOT
from trainers import Trained, Trainer

from harness.formats import open_dataset
from harness.formats.foreign.exporting import export_to_bridge
from harness.loader import Loader, LoaderConfig, RankLayout
from harness.schedule import ScheduleConfig
from harness.thd import ThdBatch, build_thd_batch, pad_row
from tests.benchmarks.integrations import collate_for_bridge

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
PROGRAM = "bridge_pretrain.py"


@pytest.fixture
def bridge(trainer: Callable[[str], Trainer]) -> Trainer:
    return trainer("megatron_bridge")


def settings(data: Path, steps: int, **changes: Any) -> dict[str, Any]:
    named = {"path": str(data / "train"), "loader": {"block_packs": 4}, **changes.pop("dataset", {})}
    return {"global_batch_size": 6, "steps": steps, "dataset": named, **changes}


def rows_of_loader(
    dataset: Path,
    first: int,
    last: int,
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    row_tokens: int | None = None,
    block_packs: int = 4,
) -> list[ThdBatch]:
    """Return the rows of these steps, counted from 1, as the loader gives them to one rank."""
    config = LoaderConfig(global_batch_size=6, num_workers=0, block_packs=block_packs)
    layout = RankLayout(dp_rank=dp_rank, dp_size=dp_size)
    loader = Loader(open_dataset(dataset / "train"), config, schedule=ScheduleConfig("as_packed", 256), layout=layout)
    rows = [row for batch in islice(loader, first - 1, last) for row in batch.rows]
    return rows if row_tokens is None else [pad_row(row, row_tokens) for row in rows]


def assert_same(received: list[dict[str, Any]], expected: list[ThdBatch]) -> None:
    assert len(received) == len(expected)
    for row, ours in zip(received, expected, strict=True):
        for name, value in (
            ("input_ids", ours.tokens),
            ("labels", ours.labels),
            ("position_ids", ours.position_ids),
            ("loss_mask", ours.loss_mask),
        ):
            assert row[name].dtype == value.dtype
            np.testing.assert_array_equal(row[name][0], value)
        np.testing.assert_array_equal(row["cu_seqlens"], ours.cu_seqlens)
        np.testing.assert_array_equal(row.get("cu_seqlens_padded", ours.cu_seqlens), ours.cu_seqlens_padded)
        assert int(row["max_seqlen"]) == ours.max_seqlen


def sft_losses(dataset: Path, folder: Path, steps: int) -> dict[int, float]:
    """Train the same model on the same data with `recipes.sft`, in this process."""
    from harness.config import compose_config
    from harness.plan import SftConfig
    from harness.recipes import sft

    overrides = [
        f"data.path={dataset}",
        f"run_dir={folder}",
        "model.num_layers=4",
        "model.hidden_size=32",
        "model.ffn_hidden_size=64",
        "loader.global_batch_size=6",
        "loader.block_packs=4",
        "loader.num_workers=0",
        "schedule=as_packed",
        "schedule.max_tokens_per_rank=256",
        "optimizer.decay_steps=10",
        "optimizer.warmup_steps=5",
        "trainer.device=cpu",
        f"trainer.steps={steps}",
    ]
    assert sft.main(compose_config("sft", SftConfig, overrides)) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def test_a_run_of_bridge_trains_the_rows_of_the_loader_and_continues_on_two_ranks(
    bridge: Trainer, dataset: Path, tmp_path: Path
) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    kept = {"checkpoints": checkpoints, "save_interval": 4, "dataset": {"dataloader_save": checkpoints}}
    first = bridge.train(PROGRAM, settings(dataset, 4, **kept))
    assert_same(first.rows[0], rows_of_loader(dataset, 1, 4))

    kept["dataset"] = {"dataloader_save": checkpoints}
    second = bridge.train(PROGRAM, settings(dataset, 9, **kept), ranks=2)
    # The seventh step is the last of its epoch: four of its six packs exist, which are two rows on each rank.
    for rank in (0, 1):
        expected = rows_of_loader(dataset, 5, 9, dp_rank=rank, dp_size=2)
        filled = [row for row in second.rows[rank] if row["loss_mask"].any()]
        assert_same(filled, expected)
        assert len(second.rows[rank]) == 5 * 3

    losses = sft_losses(dataset, tmp_path / "sft", 9)
    assert first.losses | second.losses == pytest.approx(losses, rel=1e-5)


def test_rows_of_one_length_and_evaluations_on_the_first_packs(bridge: Trainer, dataset: Path) -> None:
    named = {"seq_length": 256, "valid_path": str(dataset / "validation")}
    trained: Trained = bridge.train(
        PROGRAM, settings(dataset, 2, dataset=named, eval_iters=1, eval_interval=1), ranks=1
    )

    rows = trained.rows[0]
    assert_same([*rows[:6], *rows[12:18]], rows_of_loader(dataset, 1, 2, row_tokens=256))
    first, *others = rows[6:12], rows[18:24], rows[24:30]
    for other in others:
        for row, same in zip(first, other, strict=True):
            np.testing.assert_array_equal(row["input_ids"], same["input_ids"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": {"schedule": "dp_balanced"}}, "Megatron-Bridge fixes the number of microbatches"),
        ({"dataset": {"loader": {"block_pack": 4}}}, "the loader has no setting 'block_pack'"),
        ({"dataset": {"seq_length": 100}}, "more than the 100 of a row"),
        ({"micro_batch_size": 2}, "micro_batch_size is 2"),
        ({"train": {"rampup_batch_size": [2, 2, 4]}}, "where: train.rampup_batch_size"),
    ],
)
def test_what_bridge_cannot_run_is_refused_by_name(
    bridge: Trainer, dataset: Path, changes: dict[str, Any], message: str
) -> None:
    assert message in bridge.run(PROGRAM, {**settings(dataset, 2, **changes), "out": "."}, code=1)


def test_a_checkpoint_without_a_position_is_refused(bridge: Trainer, dataset: Path, tmp_path: Path) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    bridge.train(PROGRAM, settings(dataset, 1, checkpoints=checkpoints, save_interval=1))
    kept = {"checkpoints": checkpoints, "dataset": {"dataloader_load": str(tmp_path / "elsewhere")}}

    printed = bridge.run(PROGRAM, {**settings(dataset, 2, **kept), "out": "."}, code=1)

    assert "training continues after step 1, but its position in the data is missing" in printed
    assert "elsewhere/iter_0000001/train_dataloader_dprank000.pt" in printed


def test_both_stages_of_a_pipeline_receive_the_rows_of_the_loader(bridge: Trainer, dataset: Path) -> None:
    stages = {"pipeline_parallel_size": 2, "static_rows": True}
    named = {"seq_length": 256}
    trained = bridge.train(PROGRAM, settings(dataset, 2, dataset=named, parallel=stages), ranks=2)

    assert_stages(trained.rows, rows_of_loader(dataset, 1, 2, row_tokens=256))


def assert_stages(received: list[list[dict[str, Any]]], expected: list[ThdBatch]) -> None:
    for first, last, ours in zip(*received, expected, strict=True):
        np.testing.assert_array_equal(first["input_ids"][0], ours.tokens)
        np.testing.assert_array_equal(last["labels"][0], ours.labels)
        np.testing.assert_array_equal(last["loss_mask"][0], ours.loss_mask)
        for stage in (first, last):
            np.testing.assert_array_equal(stage["cu_seqlens"], ours.cu_seqlens)


def test_bridges_own_reader_reads_the_files_of_a_conversion(bridge: Trainer, dataset: Path, tmp_path: Path) -> None:
    written = export_to_bridge(dataset / "train", tmp_path / "root")
    out = tmp_path / "read.json"
    bridge.run("bridge_reader.py", {"root": str(tmp_path / "root"), "settings": written.settings, "out": str(out)})

    read = json.loads(out.read_text())
    packs = list(open_dataset(dataset / "train"))
    assert len(read) == len(packs) == 40
    for sample, pack in zip(read, packs, strict=True):
        assert sample["input_ids"] == pack.input_ids.tolist()
        assert sample["loss_mask"] == pack.loss_mask.tolist()
        assert sample["seq_boundaries"] == [*pack.seq_start_id.tolist(), len(pack)]
        row = build_thd_batch(pack.sequences())
        real = len(row)
        assert sample["tokens"][:real] == row.tokens.tolist()
        assert sample["labels"][:real] == row.labels.tolist()
        assert sample["mask"][:real] == row.loss_mask.tolist()
        assert not any(sample["mask"][real:])
        assert sample["cu_seqlens"][: len(row.cu_seqlens)] == row.cu_seqlens.tolist()
        # What the bench measures in its place makes batches of the same shapes and bounds.
        collated = collate_for_bridge([{name: sample[name] for name in ("input_ids", "loss_mask", "seq_boundaries")}])
        assert collated["tokens"].shape[1] == len(sample["tokens"])
        assert collated["cu_seqlens"][0].tolist() == sample["cu_seqlens"]


def test_the_recipe_of_the_page_trains(bridge: Trainer, dataset: Path) -> None:
    text = (ROOT / "docs/trainers.md").read_text()
    (recipe,) = re.findall(r"```python\n(from megatron\.bridge\.recipes.*?)```", text, re.DOTALL)
    sums = bridge.folder / "data/sums"
    sums.parent.mkdir()
    sums.symlink_to(dataset)

    trained = bridge.train(PROGRAM, {**settings(dataset, 2, eval_iters=1, eval_interval=2), "recipe": recipe})

    assert sorted(trained.losses) == [1, 2]
    assert_same(trained.rows[0][:12], rows_of_loader(dataset, 1, 2, block_packs=64))
