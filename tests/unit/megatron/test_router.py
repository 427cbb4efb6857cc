"""Routers compute in float32, and are left as they are where settings freeze them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.errors import ConfigError
from harness.loader.datasets import Sources
from harness.megatron.batch import run_row, to_device
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model.fusions import slow_parts
from harness.megatron.model.gpt import build_model, transformer_config
from harness.megatron.model.router import routers, show_sources
from harness.megatron.step import MegatronStep
from harness.plan.layout import ParallelConfig
from harness.plan.model import ModelConfig
from harness.plan.settings import OptimizerConfig
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch, zero_loss_row
from harness.train import StepResult

from .conftest import one_rank

MOE_AGAIN = {"recompute": "selective", "recompute_modules": ["moe"]}
ONE, CPU, VOCAB = ParallelConfig(), torch.device("cpu"), 128
STILL = OptimizerConfig(lr=1e-30, min_lr_ratio=0, warmup_steps=0, weight_decay=0.0, clip_grad=0.0)
SIZES = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_experts": 4}
SIZES |= {"router_score": "sigmoid", "expert_bias": True, "expert_bias_rate": 0.01}


def train_a_step(**settings) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[torch.dtype]]:
    """Return the routers' weights, biases included, before and after a step, and the dtypes of scores and biases."""
    optimizer = OptimizerConfig(lr=0.01, warmup_steps=0)
    with one_rank(ModelConfig(**{**SIZES, **settings}), vocab_size=VOCAB, optimizer=optimizer) as step:

        def state() -> dict[str, torch.Tensor]:
            found = list(routers(step.chunks))
            values = {f"{number} weight": router.weight for number, router in enumerate(found)}
            values |= {f"{number} bias": router.expert_bias for number, router in enumerate(found)}
            return {name: value.detach().clone() for name, value in values.items()}

        before, one = state(), next(routers(step.chunks))
        scores = one.gating(torch.zeros(3, 1, 32, dtype=one.weight.dtype))
        dtypes = [scores.dtype, one.expert_bias.dtype]
        ids = np.arange(65, dtype=np.int32) * 7 % VOCAB
        row = build_thd_batch([SequenceView(ids, np.ones(65, np.uint8))])
        for _ in range(2):  # the rate of the first step may be that of the warm-up
            step.train(SimpleNamespace(rows=[row]))
        return before, state(), dtypes


@pytest.mark.parametrize(
    ("settings", "moving"),
    [
        ({}, {"weight", "bias"}),
        ({"freeze_router": True}, {"bias"}),
        ({"expert_bias_rate": 0}, {"weight"}),
        # Adapters are for a model whose routers are as they were.
        ({"lora_rank": 2}, set()),
    ],
)
def test_a_router_moves_unless_it_is_frozen(settings, moving) -> None:
    before, after, _ = train_a_step(**settings)
    changed = {name.split()[1] for name in before if not torch.equal(before[name], after[name])}
    assert changed == moving


def test_biases_of_experts_belong_to_their_rank_as_their_weights_do_and_move() -> None:
    settings = {"family": "gpt_oss", "router_score": "softmax", "expert_bias": False, "expert_bias_rate": 0}
    model = ModelConfig(**{**SIZES, **settings}, sliding_window=8)
    with one_rank(model, vocab_size=VOCAB, optimizer=OptimizerConfig(lr=0.01, warmup_steps=0)) as step:
        named = list(step.chunks[0].named_parameters())
        biases = [one for name, one in named if ".experts." in name and name.endswith("linear_fc2.bias")]
        before = [one.detach().clone() for one in biases]
        step.train(
            SimpleNamespace(rows=[build_thd_batch([SequenceView(np.arange(65) % VOCAB, np.ones(65, np.uint8))])])
        )
    assert len(biases) == 2 * SIZES["num_experts"]
    assert all(one.tensor_model_parallel and not one.sequence_parallel for one in biases)
    assert not any(map(torch.equal, before, biases))


def test_experts_are_drawn_from_the_seed_and_a_validation_has_the_load_that_a_step_on_it_has() -> None:
    rows = [build_thd_batch([SequenceView(np.arange(65) * 7 % VOCAB, np.ones(65, np.uint8))], pad_to_multiple=16)]
    with one_rank(ModelConfig(**SIZES, init_std=0.3), vocab_size=VOCAB, optimizer=STILL) as step:
        validated = step.evaluate([SimpleNamespace(rows=rows)])
        experts = step.train(SimpleNamespace(rows=rows)).experts
        assert validated.expert_load == pytest.approx(experts["load"])
        assert validated.expert_load > 1
        assert experts["bias_tokens"] == experts["routed_tokens"] == 2 * 64
        assert 0.9 < experts["aux_loss"] < 1.5  # 1 where experts are even
        # Weights that a seed draws are the same in every version.
        drawn = step.chunks[0].module.decoder.layers[1].mlp.experts.local_experts[2]
        assert drawn.linear_fc1.weight[0, :3].tolist() == pytest.approx([-0.1349, 0.1113, -0.1486], abs=1e-4)
        assert drawn.linear_fc2.weight[0, :3].tolist() == pytest.approx([0.2248, -0.0232, 0.1321], abs=1e-4)


def test_a_dispatcher_without_its_kernels_is_refused() -> None:
    layout = ParallelConfig(expert_parallel_size=2, expert_dispatcher="flex")
    for device in (CPU, torch.device("cuda")) if find_spec("deep_ep") is None else (CPU,):
        with pytest.raises(ConfigError, match="DeepEP's kernels require GPUs and the package deep_ep"):
            transformer_config(ModelConfig(**SIZES), layout, device)


def test_grouped_products_are_refused_where_they_cannot_run_and_left_out_where_they_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def groups(**settings) -> bool:
        return bool(transformer_config(ModelConfig(**SIZES, **settings), ONE, CPU).moe_grouped_gemm)

    assert not groups()
    assert not groups(grouped_gemm="off")
    with pytest.raises(ConfigError, match="grouped_gemm is on, but layers use PyTorch"):
        groups(grouped_gemm="on")
    for settings, reason in (({"lora_rank": 2}, "experts have LoRA adapters"), ({"attention": "torch"}, "require")):
        with pytest.raises(ConfigError, match=reason):
            ModelConfig(**SIZES, **settings, grouped_gemm="on")
    off = {"fuse_weight_gradient": "off", "fuse_permutation": "off", "fuse_router": "off"}
    model = ModelConfig(**SIZES, dtype="bfloat16", **off)
    gpu = torch.device("cuda")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert slow_parts(model, ONE, gpu, has_engine=True) == []
    assert slow_parts(replace(model, grouped_gemm="off"), ONE, gpu, has_engine=True) == []
    (slow,) = slow_parts(replace(model, lora_rank=2), ONE, gpu, has_engine=True)
    assert slow.startswith("model.grouped_gemm is auto, but experts have LoRA")
    assert slow.endswith("experts are computed one after another")
    assert "layers do not use Transformer Engine" in slow_parts(model, ONE, gpu, has_engine=False)[1]


@pytest.mark.parametrize("average", ["token", "conversation"])
@pytest.mark.parametrize("recompute", ["none", "full", "of the first layer", "moe"])
def test_tokens_of_a_source_have_the_load_and_the_loss_that_they_have_alone(recompute, average) -> None:
    """Whatever is computed again, and however sources and padding lie in the rows of a step."""
    lengths = {0: 9, 1: 30, 2: 18, 3: 43}  # of sequences; the first two are of one source
    views = {
        number: SequenceView(
            (np.arange(length, dtype=np.int32) * (number + 3)) % VOCAB, (np.arange(length) % 3 != 0).astype(np.uint8)
        )
        for number, length in lengths.items()
    }

    def train(rows: list[list[int]], *, sources: Sources | None = None) -> StepResult:
        again = {"recompute": "none" if recompute == "none" else "full"}
        if recompute == "of the first layer":
            again["recompute_layers"] = 1
        elif recompute == "moe":
            again = MOE_AGAIN
        model = ModelConfig(**SIZES, **again, init_std=0.3)
        options = {"pad_rows_to": 160, "loss_average": average}
        step = MegatronStep(model, ONE, layout, device=CPU, vocab_size=VOCAB, **options)
        step.sources = sources
        made = [
            build_thd_batch([views[one] for one in row], pad_to_multiple=16) if row else zero_loss_row() for row in rows
        ]
        return step.train(SimpleNamespace(rows=made, sequence_ids=[np.asarray(row, np.int64) for row in rows]))

    with runtime.start("cpu"):
        layout = join(ONE, 1)
        both = train([[2, 0], [1, 3], []], sources=Sources(("a", "b", "none"), np.asarray([0, 2, 4])))
        alone = {"a": train([[0, 1]]), "b": train([[3], [2]])}
    assert both.source_expert_loads == pytest.approx(
        {name: one.experts["load"] for name, one in alone.items()}, rel=1e-12
    )
    assert both.source_expert_loads["a"] != pytest.approx(both.source_expert_loads["b"], rel=0.01)
    assert both.source_losses == pytest.approx({name: one.loss for name, one in alone.items()}, rel=1e-6)
    assert both.source_losses["a"] != pytest.approx(both.source_losses["b"], rel=1e-3)
    assert alone["a"].source_expert_loads == alone["a"].source_losses == {}


@pytest.mark.parametrize("again", [{"recompute": "none"}, {"recompute": "full"}, MOE_AGAIN])
def test_a_row_that_is_computed_again_after_another_counts_its_own_sources(again) -> None:
    """As in a pipeline, where other rows come before the backward pass of a row."""
    lengths = (30, 21)
    views = [
        SequenceView(np.arange(length, dtype=np.int32) * 3 % VOCAB, np.ones(length, np.uint8)) for length in lengths
    ]
    rows = [build_thd_batch([views[0]]), build_thd_batch([views[1]], pad_to_multiple=16)]

    def counts(*, one_by_one: bool) -> tuple[torch.Tensor, torch.Tensor]:
        model = ModelConfig(**SIZES, **again, init_std=0.3)
        chunks = build_model(model, ONE, vocab_size=VOCAB, device=CPU)
        losses = []
        for source, row in enumerate(rows):
            show_sources(chunks[0], torch.full((1, len(row.tokens)), source), 2)
            losses.append(run_row(chunks[0], to_device(row, CPU)).sum())
            if one_by_one:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        found = list(routers(chunks))
        return torch.stack([one.source_counts for one in found]), torch.stack([one.counts for one in found])

    with runtime.start("cpu"):
        join(ONE, 1)
        expected, found = counts(one_by_one=True), counts(one_by_one=False)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[0].sum(dim=-1).tolist() == [[2 * (length - 1) for length in lengths]] * len(found[0])


@pytest.mark.parametrize("loss", ["aux_loss", "aux_loss of sequences", "z_loss"])
def test_the_losses_of_a_router_have_the_gradient_of_their_mean_over_real_tokens(loss) -> None:
    """However few tokens are trained, and however rows are padded: compared with the formula and plain autograd."""
    lengths = {0: [9, 30], 1: [18]}  # of the sequences of each row
    rows = []
    for number, row in lengths.items():
        ids = [(np.arange(length, dtype=np.int32) * (7 + number)) % VOCAB for length in row]
        views = [SequenceView(one, (np.arange(len(one)) % 4 == 0).astype(np.uint8)) for one in ids]
        rows.append(build_thd_batch(views, pad_to_multiple=16))

    def gradient(coefficient: float) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return the gradient of the last router, its weight, and states of the tokens of each row or sequence."""
        experts = {**SIZES, "router_score": "softmax", "expert_bias": False, loss.split()[0]: coefficient}
        if coefficient and "sequences" in loss:
            experts["aux_loss_scope"] = "sequence"
        with one_rank(ModelConfig(**experts, init_std=0.3), vocab_size=VOCAB, optimizer=STILL) as step:
            router, states = list(routers(step.chunks))[-1], []
            router.register_forward_hook(lambda _, given, made: states.append(given[0].detach().reshape(-1, 32)))
            step.train(SimpleNamespace(rows=rows))
            real = [all_of[~row.padding_mask] for all_of, row in zip(states, rows, strict=True)]
            if "sequences" in loss:
                real = [part for one, row in zip(real, rows, strict=True) for part in one.split(sizes_of(row))]
            return router.weight.main_grad.clone(), router.weight.detach().clone(), real

    def sizes_of(row: ThdBatch) -> list[int]:
        return np.diff(row.cu_seqlens).tolist()

    (without, weight, states), (found, *_) = gradient(0.0), gradient(0.5)
    weight.requires_grad_()
    total = torch.zeros(())
    for one in states:
        logits = one @ weight.t()
        if loss == "z_loss":
            total = total + logits.logsumexp(dim=1).square().sum()
        else:
            scores = logits.softmax(dim=1)
            chosen = torch.zeros_like(scores).scatter(1, scores.topk(2, dim=1).indices, 1.0)
            total = total + 4 * (chosen.mean(dim=0) / 2 * scores.mean(dim=0)).sum() * len(one)
    (0.5 * total / sum(map(len, states))).backward()
    assert weight.grad.norm() > 0.01
    torch.testing.assert_close(found - without, weight.grad, rtol=1e-4, atol=1e-6)


def test_scores_and_biases_are_float32_in_a_bfloat16_model() -> None:
    """Biases also before the first step, when weights are read into them."""
    _, _, dtypes = train_a_step(dtype="bfloat16")
    assert dtypes == [torch.float32, torch.float32]
