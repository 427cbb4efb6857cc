"""The bench of integrations measures both sides on the same rows, and names what it leaves out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, make_packs
from harness.errors import ConfigError
from harness.integrations import HuggingFaceRow, MegatronRow
from harness.thd import build_thd_batch
from tests.benchmarks import integrations
from tests.benchmarks.__main__ import PEERS
from tests.benchmarks.formats import write_bridge_file
from tests.benchmarks.integrations import (
    bench_integrations,
    bridge_loader,
    trl_loader,
    write_trl_dataset,
)

TINY = Sizes(packs=24, pack_size=64, workers=(0,), global_batch=4, steps=8)


def silent(text: str) -> None:
    pass


def test_every_installed_trainer_is_measured_beside_its_own_data_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = {"torchtitan": ["torchtitan"]}
    monkeypatch.setattr(integrations, "missing_packages", lambda name, *, beside=(): without.get(name, []))
    with Workspace(tmp_path) as workspace:
        report = bench_integrations(TINY, workspace, silent)

    assert [figure.name for figure in report.figures if figure.unit == "x"] == [
        "TRL, ours to theirs, 0 workers",
        "Megatron-Bridge, ours to theirs, 0 workers",
    ]
    assert report.figure("TRL, ours to theirs, 0 workers").of == (
        "TRL, rows of a step, 0 workers",
        "TRL, its packed dataset, 0 workers",
    )
    assert all(figure.value > 0 for figure in report.figures)
    (left_out,) = [note for note in report.notes if "left out" in note]
    assert left_out == "torchtitan is left out: torchtitan not installed; `pip install torchtitan` adds it"


def test_a_trainer_that_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrations, "missing_packages", lambda name, *, beside=(): [name])
    with Workspace(tmp_path) as workspace:
        report = bench_integrations(TINY, workspace, silent)

    assert {figure.name.partition(",")[0] for figure in report.figures} == {"Megatron-Bridge"}
    assert "trl is left out: trl not installed; `pip install trl` adds it" in report.notes


def test_trl_reads_the_rows_that_it_is_compared_with(tmp_path: Path) -> None:
    path = write_trl_dataset(tmp_path / "trl", TINY)
    packs = list(make_packs(TINY.packs, TINY.pack_size))

    rows = list(trl_loader(path, 0, shuffle=False))

    assert len(rows) == len(packs)
    for row, pack in zip(rows, packs, strict=True):
        ours = HuggingFaceRow.of(build_thd_batch(pack.sequences()))
        for name in ("input_ids", "labels", "position_ids", "cu_seq_lens_q"):
            np.testing.assert_array_equal(row[name].numpy(), ours[name], err_msg=name)


def test_the_dataset_for_trl_has_the_columns_that_its_packing_makes(tmp_path: Path) -> None:
    import datasets
    from trl import pack_dataset

    columns = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in ("input_ids", "labels")})
    made = pack_dataset(datasets.Dataset.from_dict({name: [[1, 2], [3]] for name in columns}, features=columns), 4)

    ours = datasets.load_from_disk(str(write_trl_dataset(tmp_path / "trl", TINY)))
    assert set(ours.column_names) == set(made.column_names)
    assert made[0]["seq_lengths"] == [2, 1]
    assert sum(ours[0]["seq_lengths"]) == len(ours[0]["input_ids"])


def test_the_collation_of_bridge_gives_the_rows_that_it_is_compared_with(tmp_path: Path) -> None:
    packs = list(make_packs(8, 64))
    write_bridge_file(tmp_path / "packs.parquet", packs)

    batches: list[dict[str, Any]] = list(bridge_loader(tmp_path / "packs.parquet", 0))

    assert len(batches) == 8
    for batch, pack in zip(batches, packs, strict=True):
        ours = MegatronRow.of(build_thd_batch(pack.sequences()))
        total = ours["tokens"].shape[1]
        assert batch["token_count"] == [total]
        assert batch["tokens"].shape[1] == -(-total // 16) * 16
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(batch[name][:, :total].numpy(), ours[name], err_msg=name)
            assert not batch[name][:, total:].any(), name
        bounds = batch["cu_seqlens"][0].tolist()
        assert bounds[: len(ours["cu_seqlens"])] == ours["cu_seqlens"].tolist()
        assert bounds[-1] == -1
        assert int(batch["cu_seqlens_argmin"]) == len(bounds) - 1


def test_fewer_packs_than_a_round_reads_are_refused() -> None:
    with pytest.raises(ConfigError, match="100 packs are fewer than the 1,232"):
        bench_integrations(replace(PEERS["integrations"].sizes(), packs=100, workers=(0,)), None, silent)
