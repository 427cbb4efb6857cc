"""Megatron-Bridge's own `pretrain` on a CPU: it trains the rows of the loader, and resumes on other ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments import ROOT
from trainers import Trained, Trainer, rows_of_loader

from harness.formats import open_dataset
from harness.formats.foreign import BridgeFiles, export_to_bridge, import_dataset
from harness.records import Pack
from harness.thd import ThdBatch, build_thd_batch

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
PROGRAM = "bridge_pretrain.py"


@pytest.fixture
def bridge(trainer: Callable[[str], Trainer]) -> Trainer:
    return trainer("megatron_bridge")


def settings(data: Path, steps: int, **changes: Any) -> dict[str, Any]:
    named = {"path": str(data / "train"), "loader": {"block_packs": 4}, **changes.pop("dataset", {})}
    return {"global_batch_size": 6, "steps": steps, "dataset": named, **changes}


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


def sft_losses(dataset: Path, folder: Path, steps: int, *, stages: int = 1) -> dict[int, float]:
    """Train the same model on the same data with `recipes.sft`."""
    overrides = [
        *(f"data.path={dataset}", f"run_dir={folder}", f"trainer.steps={steps}", "trainer.device=cpu"),
        *("model.num_layers=4", "model.hidden_size=32", "model.ffn_hidden_size=64", "loader.global_batch_size=6"),
        *("loader.block_packs=4", "loader.num_workers=0", "schedule=as_packed", "schedule.max_tokens_per_rank=256"),
        *("optimizer.decay_steps=10", "optimizer.warmup_steps=5", f"parallel.pipeline_parallel_size={stages}"),
    ]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(stages)]
    subprocess.run([sys.executable, *launch, "-m", "harness.recipes.sft", *overrides], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.parametrize("folder", [None, "positions"])
def test_a_run_of_bridge_trains_the_rows_of_the_loader_and_continues_on_more_and_on_fewer_ranks(
    bridge: Trainer, dataset: Path, tmp_path: Path, folder: str | None
) -> None:
    named = {} if folder is None else {"dataloader_save": str(tmp_path / folder)}
    kept = {"checkpoints": str(tmp_path / "checkpoints"), "save_interval": 4}
    first = bridge.train(PROGRAM, settings(dataset, 4, **kept, dataset=named))
    assert_same(first.rows[0], rows_of_loader(dataset, 1, 4))
    where = tmp_path / (folder or "checkpoints/energon")
    assert len([*where.rglob("iter_0000004/train_dataloader_dprank*.pt")]) == 1

    # With the folder named for loading, too, where Bridge's own loading would find no file for the second rank.
    again = named | ({} if folder is None else {"dataloader_load": str(tmp_path / folder)})
    second = bridge.train(PROGRAM, settings(dataset, 8, **kept, dataset=again), ranks=2)
    # The seventh step is the last of its epoch: four of its six packs exist, which are two rows on each rank.
    for rank in (0, 1):
        expected = rows_of_loader(dataset, 5, 8, dp_rank=rank, dp_size=2)
        filled = [row for row in second.rows[rank] if row["loss_mask"].any()]
        assert_same(filled, expected)
        assert len(second.rows[rank]) == 4 * 3

    third = bridge.train(PROGRAM, settings(dataset, 9, **kept, dataset=named))
    assert_same(third.rows[0], rows_of_loader(dataset, 9, 9))
    losses = sft_losses(dataset, tmp_path / "sft", 9)
    assert first.losses | second.losses | third.losses == pytest.approx(losses, rel=1e-5)


def test_rows_of_one_length_and_evaluations_on_the_first_packs(bridge: Trainer, dataset: Path) -> None:
    named = {"seq_length": 256, "valid_path": str(dataset / "validation")}
    trained: Trained = bridge.train(
        PROGRAM, settings(dataset, 2, dataset=named, validation={"eval_iters": 1, "eval_interval": 1}), ranks=1
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
        ({"dataset": {"seq_length": 100}}, "but a row holds 100"),
        ({"of_bridge": True}, "this forward step requires a HarnessDataset"),
        ({"forward_step": "gpt_step"}, "from harness.integrations.megatron_bridge import forward_step"),
        ({"model": {"mtp_layers": 1, "tie_embeddings": False}}, "where: model.mtp_num_layers"),
        ({"micro_batch_size": 2}, "Micro batch size should be 1"),  # says Bridge
        ({"train": {"rampup_batch_size": [2, 2, 4]}}, "where: train.rampup_batch_size"),
    ],
)
def test_what_bridge_cannot_run_is_refused_by_name(bridge, dataset, changes, message) -> None:
    assert message in bridge.run(PROGRAM, {**settings(dataset, 2, **changes), "out": "."}, code=1)


def test_a_checkpoint_without_a_position_is_refused(bridge: Trainer, dataset: Path, tmp_path: Path) -> None:
    kept = {"checkpoints": str(tmp_path / "checkpoints"), "save_interval": 1}
    bridge.train(PROGRAM, settings(dataset, 1, **kept))
    elsewhere = {"dataloader_load": str(tmp_path / "elsewhere")}

    printed = bridge.run(PROGRAM, {**settings(dataset, 2, **kept, dataset=elsewhere), "out": "."}, code=1)

    assert "training continues after step 1, but its position in the data is missing" in printed
    assert "set dataset.dataloader_load to the folder of the positions" in printed


@pytest.mark.parametrize("stages", [2, 4])
def test_every_stage_of_a_pipeline_receives_the_bounds_of_the_loader(bridge, dataset, tmp_path, stages) -> None:
    parallel = {"pipeline_parallel_size": stages, "static_rows": True}
    named = {"seq_length": 256}
    trained = bridge.train(PROGRAM, settings(dataset, 3, dataset=named, parallel=parallel), ranks=stages)

    expected = rows_of_loader(dataset, 1, 3, row_tokens=256)
    for received in trained.rows:
        for row, ours in zip(received, expected, strict=True):
            np.testing.assert_array_equal(row["cu_seqlens"], ours.cu_seqlens)
            np.testing.assert_array_equal(row["cu_seqlens_padded"], ours.cu_seqlens_padded)
    for first, last, ours in zip(trained.rows[0], trained.rows[-1], expected, strict=True):
        np.testing.assert_array_equal(first["input_ids"][0], ours.tokens)
        np.testing.assert_array_equal(last["labels"][0], ours.labels)
        np.testing.assert_array_equal(last["loss_mask"][0], ours.loss_mask)
    assert trained.losses == pytest.approx(sft_losses(dataset, tmp_path / "sft", 3, stages=stages), rel=1e-5)


def test_padding_does_not_change_how_megatron_balances_experts(bridge: Trainer, dataset: Path) -> None:
    model = {"num_experts": 4, "expert_ffn_hidden_size": 32, "aux_loss": 0.5}
    padded, short = (
        bridge.train(PROGRAM, settings(dataset, 4, model=model, own_routers=True, dataset={"seq_length": size}))
        for size in (256, None)
    )

    assert padded.losses == pytest.approx(short.losses, rel=1e-5)
    for row, ours in zip(padded.rows[0], rows_of_loader(dataset, 1, 4, row_tokens=256), strict=True):
        np.testing.assert_array_equal(row["padding_mask"][0], ours.padding_mask)


def read_with_bridge(bridge: Trainer, settings: str, out: Path) -> list[dict[str, Any]]:
    bridge.run("bridge_reader.py", {"settings": settings, "out": str(out)})
    return json.loads(out.read_text())


@pytest.mark.parametrize("file_format", ["parquet", "npy"])
def test_bridges_own_reader_reads_the_files_of_a_conversion(bridge, dataset, tmp_path, file_format) -> None:
    written = export_to_bridge(dataset / "train", tmp_path / "root", files=BridgeFiles(file_format=file_format))
    read = read_with_bridge(bridge, written.settings, tmp_path / "read.json")

    packs = list(open_dataset(dataset / "train"))
    assert len(read) == len(packs) == 40
    for sample, pack in zip(read, packs, strict=True):
        assert_same_pack(sample, pack)
        row = build_thd_batch(pack.sequences())
        real = len(row)
        assert sample["tokens"][:real] == row.tokens.tolist()
        assert sample["labels"][:real] == row.labels.tolist()
        assert sample["mask"][:real] == row.loss_mask.tolist()
        assert not any(sample["mask"][real:])
        assert sample["cu_seqlens_q"][: len(row.cu_seqlens)] == row.cu_seqlens.tolist()


def assert_same_pack(sample: dict[str, Any], pack: Pack) -> None:
    assert sample["input_ids"] == pack.input_ids.tolist()
    assert sample["loss_mask"] == pack.loss_mask.tolist()
    assert sample["seq_boundaries"] == [*pack.seq_start_id.tolist(), len(pack)]


def test_the_files_that_bridge_packs_are_imported_as_its_reader_reads_them(bridge: Trainer, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with (root / "training.jsonl").open("w") as file:
        for number in range(40):
            question, answer = [str(3 + number)] * (1 + number % 7), ["5", "6", "7"][: 1 + number % 3]
            print(json.dumps({"input": " ".join(question), "output": " ".join(answer)}), file=file)
    specs = "PackedSequenceSpecs(packed_sequence_size=32, num_tokenizer_workers=1)"
    read = read_with_bridge(
        bridge,
        f"GPTSFTDatasetConfig(dataset_root={str(root)!r}, seq_length=32, do_validation=False, do_test=False, "
        f"enable_offline_packing=True, offline_packing_specs={specs})",
        tmp_path / "read.json",
    )

    (packed,) = root.rglob("training_32.idx.parquet")
    manifest = import_dataset(packed, tmp_path / "imported", convention="megatron_bridge")
    assert len(read) == manifest.num_packs > 5
    changed = 0
    for sample, pack in zip(read, open_dataset(tmp_path / "imported"), strict=True):
        lasts = [stop - 1 for stop in sample["seq_boundaries"][1:]]
        changed += sum(sample["loss_mask"][last] for last in lasts)
        for last in lasts:  # it has no next token in its sequence
            sample["loss_mask"][last] = 0
        assert_same_pack(sample, pack)
    assert manifest.provenance.counts.get("import_cleared_last_positions", 0) == changed


def test_the_recipe_of_the_page_trains(bridge: Trainer, dataset: Path) -> None:
    text = (ROOT / "docs/trainers.md").read_text()
    (recipe,) = re.findall(r"```python\n(from megatron\.bridge\.recipes.*?)```", text, re.DOTALL)
    sums = bridge.folder / "data/sums"
    sums.parent.mkdir()
    sums.symlink_to(dataset)

    trained = bridge.train(PROGRAM, {**settings(dataset, 2), "recipe": recipe})

    assert sorted(trained.losses) == [1, 2]
    assert_same(trained.rows[0][:12], rows_of_loader(dataset, 1, 2, block_packs=64))
