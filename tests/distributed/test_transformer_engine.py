"""Checkpoints on a machine where Transformer Engine can be imported and has no kernels."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import megatron.core
import numpy as np
import pytest
from engine_backends import ask, compile_gpu, folder, golden, is_built, is_made, python

from harness.records import SequenceView
from harness.thd import build_thd_batch, context_parallel_indices

from . import conftest
from .conftest import ROOT, forked, found_by, run_command, run_ranks


@pytest.fixture
def engine(monkeypatch) -> None:
    """Give the processes of this test the stub of Transformer Engine."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "engine_stub")])
    before = conftest.environment()
    monkeypatch.setattr(conftest, "environment", lambda: {**before, "PYTHONPATH": path})


# Newer ones load a GPU's driver when they are imported with a stand-in for their extension.
WHEEL = "2.14.1"
BUILT = "2.20.2"


def _need(version: str) -> None:
    if not is_made(version):
        pytest.skip(f"needs Transformer Engine {version}: python tests/samples/engine_backends.py make {version}")


HYBRID = ("nemotron_h", "qwen3_5", "qwen3_next")
ALL = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", *HYBRID)


def loaded(families: tuple[str, ...]) -> dict[str, object]:
    """Return what is found where all weights come back; one of two layers of a hybrid model has attention."""
    same = {"forgotten": 0, "same": True, "optimizer": "AdamW"}
    return {family: {"attentions": 1 if family in HYBRID else 2, **same} for family in families}


@pytest.mark.parametrize(
    ("tp_size", "families"),
    [
        pytest.param(1, ("qwen3", "qwen3_moe", "qwen3_next"), marks=pytest.mark.submission),
        pytest.param(1, ALL, marks=pytest.mark.nightly),
        pytest.param(2, ALL, marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_of_pytorch_s_layers_loads_into_those_of_transformer_engine_and_back(
    tmp_path, engine, tp_size, families
) -> None:
    run_ranks(tp_size, "engine_ranks", tmp_path, tp_size, *families)
    assert json.loads((tmp_path / "found.json").read_text()) == loaded(families)


def test_attention_exchanges_with_the_ranks_of_each_row(tmp_path, engine) -> None:
    run_ranks(2, "engine_shared_ranks", tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        # With a stream for the exchange, and none for a row of its own.
        assert found == {"rank": rank, "calls": [[[0, 1], True], [None, False], [[0, 1], True]]}


@pytest.fixture
def run_with_engine(tmp_path, monkeypatch) -> Callable[..., tuple[int, str]]:
    """run_with_engine(ranks, module, *arguments, built=False, megatron=None): a module on ranks that have an engine.

    It is the one with a built extension, or the wheel with a stand-in for its extension. Megatron-Core is that of the
    other interpreter, 0.19, unless a folder with another is given.
    """

    def run(ranks: int, *module: str, built: bool = False, megatron: Path | None = None) -> tuple[int, str]:
        path, known = [*filter(None, [megatron]), ROOT], {}
        if built:
            if not is_built(BUILT):
                pytest.skip(f"needs its extension: python tests/samples/engine_backends.py build {BUILT}")
            path += [folder(BUILT)]
        else:
            _need(WHEEL)
            path += [ROOT / "tests/engine_wheel", ROOT / "tests/samples", folder(WHEEL)]
            known["ENGINE_OPENER"] = str(compile_gpu(tmp_path))
        known["PYTHONPATH"] = os.pathsep.join(map(str, path))
        before = conftest.environment()
        monkeypatch.setattr(conftest, "environment", lambda: {**before, **known})
        return run_command([python(), *forked(ranks)[1:], *module])

    return run


@pytest.mark.nightly
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("built", [False, True])
def test_checkpoints_load_into_the_layers_of_an_engine_and_back(tmp_path, run_with_engine, tp_size, built) -> None:
    program = ("tests.distributed.engine_ranks", str(tmp_path), str(tp_size), *ALL)
    code, output = run_with_engine(tp_size, *program, built=built)
    assert code == 0, output
    assert json.loads((tmp_path / "found.json").read_text()) == loaded(ALL)


@pytest.mark.nightly
@pytest.mark.parametrize("is_older", [False, True])
def test_adam_keeps_its_moments_in_bfloat16_and_every_optimizer_loads_them(tmp_path, run_with_engine, is_older) -> None:
    """Adam is the wheel's, and its kernel PyTorch's operations (`samples/engine_extension.py`)."""
    older = None
    if is_older:  # the Megatron-Core of this environment
        older = tmp_path / "older"
        older.mkdir()
        (older / "megatron").symlink_to(Path(megatron.core.__file__).parents[1])
    code, output = run_with_engine(2, "tests.distributed.moments_ranks", str(tmp_path), megatron=older)
    assert code == 0, output
    for found in found_by(tmp_path):
        assert found["adam"] == "transformer_engine"
        assert found["stored"] == ["bfloat16", "float32"]
        moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), "torch.bfloat16")
        assert found["dtypes"] == {"master_param": "torch.float32", **moments}
        held, planned = found["bytes"]
        assert held == pytest.approx(planned, rel=2e-3)  # a rank's share ends inside a weight
        assert 0 < found["differ"] < 1e-2
        assert [found["resumed"], found["loaded"], found["rounded"]] == [True, True, True]
        assert found["others"] == dict.fromkeys(("float32", "host", "bfloat16 gradients", "plain"), True)
        whole, host, plain = (found["following"][name] for name in ("float32", "host", "plain"))
        assert host == pytest.approx(whole, rel=1e-5)
        assert plain == pytest.approx(whole, rel=1e-5)


OVERLAPS = {
    "qkv": ["ub_bulk_dgrad", "ub_bulk_wgrad", "ub_overlap_ag"],
    "fc1": ["ub_bulk_dgrad", "ub_bulk_wgrad", "ub_overlap_ag"],
    "proj": ["ub_overlap_ag", "ub_overlap_rs"],
    "fc2": ["ub_overlap_ag", "ub_overlap_rs"],
}


def test_exchanges_that_overlap_have_buffers_of_a_whole_row_and_are_refused_elsewhere(tmp_path, engine) -> None:
    run_ranks(1, "user_buffers", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert "the device is cpu" in found["on a cpu"]
    assert "2 tensor-parallel ranks are on several nodes of 1" in found["on two nodes"]
    assert found["made before"] == 0
    assert found["made"] == [[[24, 64], "torch.bfloat16", 2, ["NONE"], False]] * 2  # of 48 tokens on two CP ranks
    assert found["older"] is False
    assert "Transformer Engine cannot create communication buffers here: no" in found["without multicast"]
    assert {name: found[name] for name in OVERLAPS} == OVERLAPS


@pytest.mark.nightly
def test_a_wheel_makes_the_buffers_that_its_layers_look_for(tmp_path, run_with_engine) -> None:
    code, output = run_with_engine(1, "tests.distributed.user_buffers", str(tmp_path / "found.json"))
    assert code == 0, output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["made"] == [[[48, 64], "torch.bfloat16", 2, False]] * 12 * 2
    assert found["qkv"] == found["fc1"] == ["ub_bulk_dgrad", "ub_bulk_wgrad", "ub_overlap_ag_fprop"]
    assert found["proj"] == found["fc2"] == ["ub_overlap_ag_dgrad", "ub_overlap_rs_fprop"]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_a_cpu_is_the_same_where_transformer_engine_can_be_imported(tmp_path, sft, request, ranks) -> None:
    settings = ["trainer.steps=4", "trainer.eval_interval=2", "model.dtype=bfloat16"]
    settings += ["parallel=tp2_sp"] if ranks == 2 else []
    without = sft(tmp_path / "without", *settings, ranks=ranks)
    request.getfixturevalue("engine")
    found = sft(tmp_path / "with", *settings, ranks=ranks)
    assert (without.code, found.code) == (0, 0), without.output + found.output
    for name in ("loss", "grad_norm"):
        assert found.column(name) == without.column(name)
    assert len(found.column("loss")) == 4
    # Its checkpoint is written, exported and loaded there too.
    again = [*forked(1), "harness", "export", str(tmp_path / "with"), str(tmp_path / "exported")]
    code, output = run_command(again)
    assert code == 0, output
    assert (tmp_path / "exported" / "config.json").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize("version", golden()["versions"])
def test_transformer_engine_chooses_the_attention_of_the_golden_table(version) -> None:
    _need(version)
    questions = {name: one for name, one in golden()["questions"].items() if one is not None}
    assert ask(version, questions) == golden()["versions"][version]


@pytest.mark.nightly
@pytest.mark.parametrize("version", [WHEEL, BUILT])
def test_context_parallel_slices_of_every_size_are_those_of_transformer_engine(version) -> None:
    _need(version)
    rows, sizes = {}, (2, 4, 8, 16, 64, 512)
    for size in sizes:
        lengths = np.random.default_rng(size).integers(1, 6 * size, 20)
        documents = [SequenceView(np.arange(n, dtype=np.int32), np.zeros(n, dtype=np.uint8)) for n in lengths + 1]
        rows[size] = build_thd_batch(documents, pad_to_multiple=2 * size).cu_seqlens_padded
    found = ask(version, {str(size): row.tolist() for size, row in rows.items()}, "engine_partition.py")["answers"]
    for size, row in rows.items():
        ours = [context_parallel_indices(row, cp_size=size, cp_rank=rank).tolist() for rank in range(size)]
        assert found[str(size)] == ours
