"""GPU runs, in bfloat16 and with Transformer Engine if installed: the same losses, isolation, slices."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.recipes.parity import make_dataset

from harness.parity.running import free_ports
from harness.records import SequenceView
from harness.thd import build_thd_batch, context_parallel_indices

from ..distributed.conftest import launcher, run_command, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "losses_cpu.json"
GPUS = torch.cuda.device_count()
WITH_ENGINE = ("attention-flash", "attention-fused", "attention-unfused", "fusions")
# Every attention that this machine can run.
ATTENTIONS = ["torch", *(["transformer_engine"] if importlib.util.find_spec("transformer_engine") else [])]
LAYOUTS = {
    1: ["data"],
    2: ["data_distributed", "tp2_sp", "pp2", "pp2_vpp2", "cp2"],
    4: ["tp2_pp2", "pp2_cp2", "cp4"],
    8: ["tp2_pp2_cp2", "tp4_sp", "pp4_vpp2", "data_distributed"],
}


def run(folder: Path, data: Path, *overrides: str, ranks: int = 1) -> list[dict[str, Any]]:
    golden = json.loads(GOLDEN.read_text())
    settings = [one for one in golden["settings"] if not one.startswith("trainer.device")]
    own = [f"data.path={data}", f"run_dir={folder}", *settings, "trainer.device=cuda", *overrides]
    return train(folder, own, ranks=ranks)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("gpu") / "data")


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("dtype", "nearness"), [("float32", 2e-3), ("bfloat16", 2e-2)])
def test_all_attentions_train_to_similar_losses_from_one_checkpoint(tmp_path, data, attention, dtype, nearness) -> None:
    """Kernels and TF32 round differently, so the losses of a GPU's kernels are close, not equal."""
    start = tmp_path / "start"
    run(start, data, f"model.dtype={dtype}", "model.attention=torch", "trainer.steps=1")
    losses = {}
    for name in ("torch", attention):
        folder = tmp_path / f"{name}-{len(losses)}"
        _copy(start, folder)
        steps = run(folder, data, f"model.dtype={dtype}", f"model.attention={name}", "resume=true")
        losses[folder.name] = [one["loss"] for one in steps]
    one, other = losses.values()
    assert len(one) == len(other) == 8
    assert other == pytest.approx(one, rel=nearness)
    assert one[-1] < one[0]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(
    ("ranks", "layout"), [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]
)
def test_layouts_train_in_bfloat16_like_one_gpu(tmp_path, data, attention, ranks, layout) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    if attention == "torch" and "cp" in layout:
        pytest.skip("context parallelism on GPUs goes through Transformer Engine")
    dtype = ("model.dtype=bfloat16", f"model.attention={attention}", "model.num_query_groups=4", "model.num_layers=8")
    start = tmp_path / "start"
    run(start, data, *dtype, "trainer.steps=1")
    for name in ("one", "many"):
        _copy(start, tmp_path / name)
    one = run(tmp_path / "one", data, *dtype, "resume=true")
    many = run(tmp_path / "many", data, *dtype, f"parallel={layout}", "resume=true", ranks=ranks)
    assert [step["trained_tokens"] for step in many] == [step["trained_tokens"] for step in one]
    assert [step["loss"] for step in many] == pytest.approx([step["loss"] for step in one], rel=5e-3)
    assert [step["grad_norm"] for step in many] == pytest.approx([step["grad_norm"] for step in one], rel=5e-2)


@pytest.mark.parametrize("choice", ["optimizer.offload=0.5", "optimizer.offload=1", "optimizer.moments_dtype=bfloat16"])
def test_a_smaller_optimizer_trains_like_the_whole_one_which_resumes_from_it(tmp_path, data, choice) -> None:
    if "moments" in choice and "transformer_engine" not in ATTENTIONS:
        pytest.skip("needs Transformer Engine's Adam")
    settings = ["model.dtype=bfloat16", "parallel=data_distributed", "model.attention=torch"]
    whole = run(tmp_path / "whole", data, *settings)
    small = run(tmp_path / "small", data, *settings, choice, "trainer.steps=5")
    again = run(tmp_path / "small", data, *settings, "resume=true")
    assert again[: len(small)] == small
    assert [step["step"] for step in again] == [step["step"] for step in whole]
    assert [step["loss"] for step in again] == pytest.approx([step["loss"] for step in whole], rel=1e-2)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("ranks", "layout"), [(1, "data"), (2, "data_distributed"), (2, "tp2_sp")])
def test_rows_replayed_from_a_graph_train_like_computed_ones(tmp_path, data, attention, ranks, layout) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    settings = [f"model.attention={attention}", f"parallel={layout}", "parallel.static_rows=true"]
    start = tmp_path / "start"
    run(start, data, *settings, "trainer.steps=1", ranks=ranks)
    losses = {}
    for graphs in ("false", "true"):
        _copy(start, tmp_path / graphs)
        steps = run(tmp_path / graphs, data, *settings, f"parallel.cuda_graphs={graphs}", "resume=true", ranks=ranks)
        losses[graphs] = [(step["loss"], step["grad_norm"]) for step in steps]
    assert len(losses["true"]) == len(losses["false"]) == 8
    # PyTorch's attention has another kernel for a whole row than for its sequences.
    assert np.array(losses["true"]) == pytest.approx(np.array(losses["false"]), rel=2e-2)


@pytest.mark.skipif(GPUS < 2 or "transformer_engine" not in ATTENTIONS, reason="needs 2 GPUs and Transformer Engine")
def test_exchanges_that_overlap_with_products_train_like_those_that_do_not(tmp_path, data) -> None:
    settings = ["parallel=tp2_sp", "parallel.static_rows=true", "model.attention=transformer_engine"]
    start = tmp_path / "start"
    run(start, data, *settings, "trainer.steps=1", ranks=2)
    losses = {}
    for overlaps in ("false", "true"):
        folder = tmp_path / overlaps
        _copy(start, folder)
        steps = run(folder, data, *settings, f"parallel.overlap_tensor_parallel={overlaps}", "resume=true", ranks=2)
        losses[overlaps] = [(step["loss"], step["grad_norm"]) for step in steps]
    assert len(losses["true"]) == len(losses["false"]) == 8
    assert np.array(losses["true"]) == pytest.approx(np.array(losses["false"]), rel=2e-2)


ROUTERS = {
    "softmax": ["model.aux_loss=0.01", "model.z_loss=0.001"],
    "softmax of all, by sequences": [
        *("model.router_normalize=false", "model.aux_loss=0.01", "model.aux_loss_scope=sequence"),
    ],
    "sigmoid": ["model.router_score=sigmoid", "model.expert_bias=true", "model.router_scale=2.5"],
}


@pytest.mark.skipif("transformer_engine" not in ATTENTIONS, reason="needs Transformer Engine")
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("fusion", ["fuse_router", "fuse_permutation"])
def test_fused_parts_of_experts_train_like_plain_ones(tmp_path, data, fusion, router) -> None:
    others = [f"model.{name}=off" for name in ("fuse_router", "fuse_permutation") if name != fusion]
    settings = ["model.dtype=bfloat16", "model.num_experts=8", "model.experts_per_token=2", *ROUTERS[router], *others]
    start = tmp_path / "start"
    run(start, data, *settings, f"model.{fusion}=off", "trainer.steps=1")
    losses = {}
    for choice in ("off", "on"):
        _copy(start, tmp_path / choice)
        steps = run(tmp_path / choice, data, *settings, f"model.{fusion}={choice}", "resume=true")
        losses[choice] = [step["loss"] for step in steps]
    assert len(losses["on"]) == len(losses["off"]) == 8
    assert losses["on"] == pytest.approx(losses["off"], rel=2e-2)


@pytest.mark.skipif(GPUS < 4, reason="needs 4 GPUs")
def test_weights_gathered_during_a_step_train_like_those_gathered_in_the_next(tmp_path, data) -> None:
    settings = ["parallel=pp2_vpp2", "parallel.distributed_optimizer=true", "model.dtype=bfloat16"]
    start = tmp_path / "start"
    run(start, data, *settings, "trainer.steps=1", ranks=4)
    losses = {}
    for choice in ("false", "true"):
        _copy(start, tmp_path / choice)
        own = f"parallel.overlap_weights_with_step={choice}"
        steps = run(tmp_path / choice, data, *settings, own, "resume=true", ranks=4)
        losses[choice] = [(step["loss"], step["grad_norm"]) for step in steps]
    assert len(losses["true"]) == len(losses["false"]) == 8
    assert np.array(losses["true"]) == pytest.approx(np.array(losses["false"]), rel=2e-2)


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_rows_computed_while_tokens_travel_to_experts_train_like_rows_one_after_another(tmp_path, data) -> None:
    settings = ["parallel.expert_parallel_size=2", "model.family=qwen3_moe", "model.num_experts=4"]
    settings += ["model.experts_per_token=2", "loader.global_batch_size=8"]
    start = tmp_path / "start"
    run(start, data, *settings, "trainer.steps=1", ranks=2)
    overlapped, delayed = "parallel.overlap_experts=true", "parallel.delay_weight_gradients=true"
    ways = {"plain": [], "overlapped": [overlapped]}
    ways |= {"delayed": [overlapped, delayed]} if "transformer_engine" in ATTENTIONS else {}
    losses = {}
    for name, way in ways.items():
        _copy(start, tmp_path / name)
        steps = run(tmp_path / name, data, *settings, *way, "resume=true", ranks=2)
        losses[name] = [(step["loss"], step["grad_norm"]) for step in steps]
    for found in losses.values():
        assert len(found) == 8
        assert np.array(found) == pytest.approx(np.array(losses["plain"]), rel=2e-2)


def test_first_contact_measures_every_part_that_this_machine_can(tmp_path) -> None:
    bench = [sys.executable, "-m", "harness", "bench", "gpu", "size=tiny", "device=cuda", f"out={tmp_path}"]
    code, output = run_command(bench)
    assert code == 0, output
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    without = {name for name, part in parts.items() if part["status"] == "missing"}
    assert "environment" in parts.keys() - without
    assert without == {
        *(name for name in WITH_ENGINE if "transformer_engine" not in ATTENTIONS),
        *(f"layouts-{ranks}" for ranks in LAYOUTS if ranks > GPUS),
        *(["links"] if GPUS < 2 else []),
    }


@pytest.mark.parametrize(("ranks", "layout"), [(1, "data"), (2, "tp2_sp"), (2, "pp2"), (2, "cp2"), (8, "tp2_pp2_cp2")])
def test_documents_are_isolated_on_gpus(tmp_path, ranks, layout) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    jobs, out = tmp_path / "jobs.json", tmp_path / "found.jsonl"
    jobs.write_text(json.dumps([[free_ports(1)[0], layout]]))
    code, output = run_command([*launcher(ranks), "tests.distributed.isolation_ranks", str(jobs), str(out), "cuda"])
    assert code == 0, output
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["found"].pop("") == []
    assert all(findings for findings in line["found"].values())


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_context_parallel_slices_are_those_of_transformer_engine(cp_size) -> None:
    tex = pytest.importorskip("transformer_engine_torch")
    documents = [SequenceView(np.arange(n, dtype=np.int32), np.zeros(n, dtype=np.uint8)) for n in (10, 38, 3, 21)]
    row = build_thd_batch(documents, pad_to_multiple=2 * cp_size)
    bounds = torch.from_numpy(row.cu_seqlens_padded).cuda()
    for cp_rank in range(cp_size):
        theirs = tex.thd_get_partitioned_indices(bounds, len(row), cp_size, cp_rank)
        ours = context_parallel_indices(row.cu_seqlens_padded, cp_size=cp_size, cp_rank=cp_rank)
        assert np.array_equal(theirs.cpu().numpy(), ours)


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
