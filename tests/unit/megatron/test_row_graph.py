"""Rows that are replayed from a CUDA graph train as those that are computed one by one."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.random import get_all_rng_states
from recorded_graphs import Launches, recorded_graphs

from harness.errors import ConfigError, ScheduleError
from harness.formats import Provenance, open_writer
from harness.loader import DataConfig, LiveConfig, LoaderConfig
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model import gpt
from harness.megatron.model.attention import VarlenAttention
from harness.megatron.run.fine_tuning import open_fine_tuning
from harness.megatron.run.training import run_training
from harness.megatron.step import MegatronStep
from harness.megatron.unproven.row_graph import RowGraph
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.plan.settings import SftConfig, TrainerConfig
from harness.records import Pack
from harness.schedule import ScheduleConfig
from harness.thd import ThdBatch, build_thd_batch, zero_loss_row
from harness.train import METRICS_FILE, read_metrics

from .conftest import VOCAB, make_sequence

MODEL = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, num_query_groups=1)
TOTAL, MOST = 48, 5
# By step and row. The last row of all is full; a row of no sequences is one token of zero loss.
LENGTHS = [[(9, 20), (31,)], [(2, 3, 40)], [(12, 12, 13), (), (30, 7, 8)], [(49,), (10, 11, 10, 11, 11)]]


def rows_of(step: int) -> list[ThdBatch]:
    rows = [[make_sequence(length, 7 * step + length) for length in lengths] for lengths in LENGTHS[step]]
    return [build_thd_batch(row) if row else zero_loss_row() for row in rows]


def make(job: runtime.Runtime, model: ModelConfig = MODEL, *, graphs: bool = True) -> MegatronStep:
    parallel = ParallelConfig(static_rows=True, cuda_graphs=graphs)
    return MegatronStep(
        model,
        parallel,
        join(parallel, 1),
        device=job.device,
        vocab_size=VOCAB,
        optimizer=OptimizerConfig(lr=0.01, min_lr_ratio=1, warmup_steps=0),
        pad_rows_to=TOTAL,
        max_sequences=MOST,
    )


def train(model: ModelConfig, *, graphs: bool) -> list[tuple[float, ...]]:
    """Return loss, gradient norm and trained tokens of each step, and the loss of a validation after it."""
    with runtime.start("cpu") as job:
        step, results = make(job, model, graphs=graphs), []
        for number in range(len(LENGTHS)):
            one = step.train(rows_of(number))
            validated = step.evaluate([SimpleNamespace(rows=[build_thd_batch([make_sequence(20 + number, 1)])])])
            results.append((one.loss, one.grad_norm, one.trained_tokens, validated.loss))
    return results


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"family": "qwen3", "head_dim": 32, "recompute": "full", "tie_embeddings": False}, marks=pytest.mark.nightly
        ),
        pytest.param({"lora_rank": 4}, marks=pytest.mark.nightly),
    ],
)
def test_replayed_rows_give_the_losses_and_gradient_norms_of_computed_ones(changes) -> None:
    model = replace(MODEL, **changes)
    with recorded_graphs() as graphs:
        replayed = train(model, graphs=True)
        (graph,) = graphs  # one, of the second step, for rows of any lengths
        assert graph.replays == sum(len(rows) for rows in LENGTHS[1:])
        with mock.patch.object(RowGraph, "_capture"):
            computed = train(model, graphs=True)
        assert len(graphs) == 1
    assert replayed == computed
    plain = train(model, graphs=False)
    assert np.array(replayed) == pytest.approx(np.array(plain), rel=1e-4)
    assert len({round(one[0], 6) for one in plain}) == len(plain)


def test_a_run_of_the_recipe_replays_its_rows(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    counts = Provenance(counts={"vocab_size": VOCAB})
    with open_writer(tmp_path / "data", format="parquet", pack_size=64, provenance=counts) as writer:
        for number in range(12):
            parts = [make_sequence(length, number) for length in (5 + number, 20 - number, 30)[: 1 + number % 3]]
            starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
            fields = ([getattr(part, name) for part in parts] for name in ("input_ids", "loss_mask"))
            writer.append(Pack(*map(np.concatenate, fields), starts))
    metrics = {}
    for graphs in (True, False):
        config = SftConfig(
            model=replace(MODEL, num_layers=1),
            data=DataConfig(path=str(tmp_path / "data")),
            loader=LoaderConfig(global_batch_size=5, num_workers=0),
            schedule=ScheduleConfig(max_tokens_per_rank=64),
            parallel=ParallelConfig(static_rows=True, cuda_graphs=graphs),
            trainer=TrainerConfig(steps=4, checkpoint_interval=0),
            run_dir=str(tmp_path / str(graphs)),
        )
        with recorded_graphs() as made:
            assert run_training(config, open_fine_tuning) == 0
        steps = read_metrics(tmp_path / str(graphs) / METRICS_FILE)
        assert [graph.replays for graph in made] == [sum(one.num_microbatches for one in steps[1:])] * graphs
        metrics[graphs] = [(one.loss, one.grad_norm) for one in steps]
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    assert np.array(metrics[True]) == pytest.approx(np.array(metrics[False]), rel=1e-4)
    assert len(metrics[True]) == 4


def test_a_replayed_row_launches_nothing_but_copies_of_its_values() -> None:
    with runtime.start("cpu") as job, recorded_graphs() as graphs:
        step = make(job)
        step.train(rows_of(0))
        step.train(rows_of(1))
        counts = []
        for rows in (rows_of(0)[:1], rows_of(2)):
            with Launches(graphs) as launches:
                step.train(rows)
            counts.append(launches.counts)
        (graph,) = graphs
        # Two rows more. Their values are copied, their positions are counted from their bounds, and their sums added.
        more, places = counts[1] - counts[0], {"slice", "sub", "repeat_interleave", "arange", "index"}
        labels_and_flags = {"view", "split_with_sizes", "roll", "index_copy", "bitwise_and", "gt"}
        moved = {"copy_", "add_", "unsqueeze", "select", "lift_fresh", "_to_copy", "detach"}
        assert set(more) <= {*moved, *places, *labels_and_flags}
        assert more["add_"] == 2
        assert len(graph.operations) > 300
        # What Megatron's generators and gradient functions need.
        assert graph.generators == list(get_all_rng_states().values())
        assert graph.stream is step.chunks[0].capture_stream


def test_gradient_functions_are_made_on_the_stream_of_the_capture(monkeypatch) -> None:
    entered = []

    class Wrapped(gpt.DistributedDataParallel):
        def __init__(self, *arguments, **options) -> None:
            entered.append("wrap")
            super().__init__(*arguments, **options)

    with runtime.start("cpu") as job, recorded_graphs():
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered.append(stream) or mock.MagicMock())
        monkeypatch.setattr(gpt, "DistributedDataParallel", Wrapped)
        step = make(job)
    assert entered == [step.chunks[0].capture_stream, "wrap"]
    # Nothing that Python decides row by row: exchanges behind layers, and what Transformer Engine does in a first row.
    assert not step.chunks[0].ddp_config.overlap_grad_reduce
    assert step.config.disable_parameter_transpose_cache


def test_attention_that_reads_a_bound_on_the_host_cannot_be_captured(monkeypatch) -> None:
    with runtime.start("cpu") as job, recorded_graphs():
        step = make(job)
        step.train(rows_of(0))
        monkeypatch.setattr(VarlenAttention, "_forward_as_one", lambda self, q, k, v, b: q[: int(b[1])])
        with pytest.raises(ConfigError, match=r"cannot be captured: CUDA error: .* when stream is capturing"):
            step.train(rows_of(1))


def test_rows_that_the_graph_is_not_for_are_refused() -> None:
    with runtime.start("cpu") as job, recorded_graphs():
        step = make(job)
        with pytest.raises(ScheduleError, match="6 sequences, and its CUDA graph is for 5"):
            step.train([build_thd_batch([make_sequence(3, 0)] * 6)])
        with pytest.raises(ScheduleError, match="52 tokens and cannot be padded to 48"):
            step.train([build_thd_batch([make_sequence(53, 0)])])
        row = build_thd_batch([make_sequence(9, 0)])
        row.tokens[3] = VOCAB
        with pytest.raises(ConfigError, match=f"a token id is {VOCAB}"):
            step.train([row])


def test_runs_without_a_graph_are_refused_before_they_start(monkeypatch) -> None:
    parallel = ParallelConfig(static_rows=True, cuda_graphs=True)
    with pytest.raises(ConfigError, match=r"trainer\.device is cpu"):
        SftConfig(parallel=parallel, trainer=TrainerConfig(device="cpu")).check(1)
    live = DataConfig(live=LiveConfig(path="chunks"))
    with pytest.raises(ConfigError, match="unknown for live data"):
        SftConfig(parallel=parallel, data=live).check(1)
    SftConfig(parallel=parallel).check(1)
    build = partial(gpt.build_chunks, MODEL, parallel, vocab_size=VOCAB, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"cuda_graphs is true, but the device is cpu"):
        build()
    monkeypatch.setattr(gpt.compat, "has_streams", lambda _: True)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "expandable_segments:True")
            with pytest.raises(ConfigError, match=f"{name} has expandable_segments:True, and NCCL_GRAPH_REGISTER is 1"):
                build()
    monkeypatch.setattr(gpt, "engine_layers", lambda *_: True)
    monkeypatch.setattr(gpt.compat, "engine_compares_bounds", lambda: True)
    with pytest.raises(ConfigError, match="cannot inform this version of Transformer Engine that rows are padded"):
        build()


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (5, False), (5, True), (None, True)])
def test_empty_sequences_and_a_mask_of_the_whole_row_leave_attention_as_it_is(window, sinks) -> None:
    attention = VarlenAttention.__new__(VarlenAttention)
    torch.nn.Module.__init__(attention)
    attention.scale, attention.window, attention.cp_group = 0.3, window, None
    torch.manual_seed(0)
    attention.softmax_offset = torch.nn.Parameter(torch.randn(4)) if sinks else None
    query, key, value = (torch.randn(24, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    weights = torch.randn(24, 32)

    def attend(bounds: list[int], *, is_static: bool = False) -> list[torch.Tensor]:
        bounds_of = torch.tensor(bounds, dtype=torch.int32)
        fields = {"cu_seqlens_q_padded": bounds_of, "is_static": is_static, "cp_group": None}
        out = attention(query, key, value, packed_seq_params=SimpleNamespace(**fields))
        inputs = [query, key, value, *attention.parameters()]
        return [out, *torch.autograd.grad((out * weights).sum(), inputs)]

    plain, padded = attend([0, 9, 10, 24]), attend([0, 9, 10, 24, 24, 24])
    assert all(map(torch.equal, plain, padded))
    for one, other in zip(plain, attend([0, 9, 10, 24, 24, 24], is_static=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain[0], attend([0, 10, 11, 24], is_static=True)[0], atol=1e-2)
