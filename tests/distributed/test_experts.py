"""A mixture of experts trains as on one rank and in plain PyTorch, padding never counts, planted faults are named.

As a program on ranks, `JOBS.json`: runs of `recipes.sft` in the same processes, some faulty. A job is a fault,
overrides, a folder, and the one that it is first copied from.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from harness.recipes.parity import ParityConfig
from parity_reports import read_report

from harness.config import compose_config
from harness.formats import open_dataset
from harness.loader import Loader, RankBatch
from harness.megatron import prepare_process
from harness.megatron.export.folder import export_checkpoint
from harness.parity.compare import Tolerances, compare_runs
from harness.parity.locate import recorded_run
from harness.parity.result import REPORT_FILE, Check
from harness.plan import SftConfig
from harness.plan.hf_config import MTP_SETTINGS
from harness.recipes import sft
from harness.thd import ThdBatch
from harness.train import StepMetrics

from .conftest import overrides_of, run_command, run_here, run_jobs
from .forked import jobs_of
from .test_weights import MODELS, SIZES, settings_of, tensors

STEPS = ("optimizer.decay_steps=4", "trainer.eval_interval=2", "trainer.eval_batches=1", "trainer.record_digests=true")
SMALLER = ("model.num_layers=2", "loader.num_workers=0", "resume=auto", "trainer.checkpoint_interval=0")
# It has most parts: latent attention, a bias of experts, shared ones, and further tokens.
KIND = "deepseek_like"
# Fault, layout, and what names it.
FAULTS = {
    "MTP rolled at unpadded bounds": ("tp2_ep2", "mtp_tokens"),
    "expert bias sees padding": ("tp2_ep2", "bias_tokens"),
    "shared expert skipped on one rank": ("ep2", "shared_tokens"),
}


def steps_of(fault: str | None) -> int:
    """Return the last step of a run: a fault shows in the one after the start."""
    return 4 if fault is None else 2


Compare = Callable[["str | None"], dict[str, Check]]


def differences(checks: dict[str, Check]) -> list[str]:
    assert "experts" in checks
    return [check.difference.message for check in checks.values() if check.difference is not None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def compare(dataset: Path, place: Path) -> Compare:
    """compare(fault): the checks of a run on two ranks against the same run on one; all have been made together."""
    # A blend, whose sources have loads of their own.
    blend = f"data.blend=[{{path: {dataset}}}, {{path: {dataset / 'validation'}}}]"

    def overrides(folder: Path, steps: int) -> list[str]:
        kind = compose_config("parity", ParityConfig).kinds[KIND].split()
        return overrides_of(dataset, folder, *kind, *SMALLER, *STEPS, blend, f"trainer.steps={steps}")

    start, one = place / "start", place / "one"
    run_here(sft, SftConfig, overrides(start, 1))
    shutil.copytree(start, one)
    run_here(sft, SftConfig, overrides(one, 4))
    folders = {fault: place / str(fault).replace(" ", "_") for fault in (None, *FAULTS)}
    jobs = [
        [
            fault,
            [*overrides(folder, steps_of(fault)), f"parallel={FAULTS.get(fault, ['tp2_ep2'])[0]}"],
            str(folder),
            str(start),
        ]
        for fault, folder in folders.items()
    ]
    run_jobs(2, "test_experts", place, jobs)

    def compare(fault: str | None) -> dict[str, Check]:
        found = recorded_run(folders[fault])
        assert len(found.steps) == steps_of(fault)
        return {check.name: check for check in compare_runs(recorded_run(one), found, Tolerances())}

    return compare


@pytest.mark.submission
def test_two_ranks_train_experts_from_the_checkpoint_of_one_rank_as_it_does(dataset, place, compare) -> None:
    assert differences(compare(None)) == []
    # The load of experts in a validation, which is compared too, does not count in the steps' own.
    steps = recorded_run(place / "one").steps
    assert [list(step.evaluation_expert_loads) for step in steps] == [
        ["validation"],
        ["validation"],
        [],
        ["validation"],
    ]
    # One layer has experts, and so has the one after it, which has no token past the last of a conversation.
    assert all(1.9 < step.experts["bias_tokens"] / step.tokens < 2 for step in steps)
    assert all(0 < step.mtp_tokens <= step.trained_tokens and step.mtp_losses[0] > 1 for step in steps)
    assert all(load > 1 for step in steps for load in step.evaluation_expert_loads.values())
    sources = {str(dataset), str(dataset / "validation")}
    assert {name for step in steps for name in step.source_expert_loads} == sources
    assert all(load > 1 for step in steps for load in step.source_expert_loads.values())
    on_two = recorded_run(place / "None").steps
    for one, two in zip(steps, on_two, strict=True):
        assert set(one.source_losses) == set(one.source_expert_loads)
        assert two.source_losses == pytest.approx(one.source_losses, rel=1e-6)
    # Of a global batch that is of one source, its loss is that of the step.
    assert [step.loss for step in steps if len(step.source_losses) == 1] == pytest.approx(
        [loss for step in steps if len(step.source_losses) == 1 for loss in step.source_losses.values()], rel=1e-6
    )
    assert "![expert load](experts.png)" in (place / "one" / "report.md").read_text()


@pytest.mark.submission
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_experts_is_named(compare, fault) -> None:
    named = FAULTS[fault][1]
    check = compare(fault)["mtp" if named == "mtp_tokens" else "experts"]
    assert check.difference.field == named
    assert f"step 2: {named} {'' if check.name == 'mtp' else 'of the experts '}is " in check.difference.message


class Predicting(torch.nn.Module):
    """A model of transformers whose last layer predicts a further token, from the states of the layer before it."""

    def __init__(self, family: str) -> None:
        import transformers

        super().__init__()
        kind, own = MODELS[family]
        settings = {**SIZES, **own, "num_hidden_layers": 3, "initializer_range": 0.1}
        config = getattr(transformers, f"{kind}Config")(**settings, attn_implementation="sdpa")
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config)
        self.layer = self.model.model.layers[2]
        self.model.model.layers = self.model.model.layers[:2]
        config.num_hidden_layers = 2
        hidden = config.hidden_size
        self.enorm, self.hnorm, self.norm = (torch.nn.RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)

    def save(self, folder: Path) -> None:
        """Write it as published models are: the layer's tensors after those of the others, with copies."""
        from safetensors.torch import save_file

        self.model.save_pretrained(folder)
        tensors = {
            **self.layer.state_dict(),
            "enorm.weight": self.enorm.weight,
            "hnorm.weight": self.hnorm.weight,
            "shared_head.norm.weight": self.norm.weight,
            "eh_proj.weight": self.eh_proj.weight,
            "embed_tokens.weight": self.model.model.embed_tokens.weight,
            "shared_head.head.weight": self.model.lm_head.weight,
        }
        # transformers has the experts of a layer in two tensors.
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            if (stack := tensors.pop(f"mlp.experts.{name}", None)) is not None:
                for expert, whole in enumerate(stack):
                    for part, own in zip(parts, whole.chunk(len(parts)), strict=True):
                        tensors[f"mlp.experts.{expert}.{part}.weight"] = own
        named = {f"model.layers.2.{name}": tensor.detach().clone() for name, tensor in tensors.items()}
        save_file(named, folder / "mtp.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config = {name: value for name, value in config.items() if name not in MTP_SETTINGS}
        (folder / "config.json").write_text(json.dumps({**config, MTP_SETTINGS[0]: 1}))

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of the next token and of the one after it, [n, vocabulary] each."""
        states = self.model.model(tokens).last_hidden_state
        ahead = self.model.model.embed_tokens(tokens.roll(-1, 1))
        joined = self.eh_proj(torch.cat((self.enorm(ahead), self.hnorm(states)), dim=-1))
        angles = self.model.model.rotary_emb(joined, torch.arange(tokens.shape[1])[None])
        made = self.layer(joined, attention_mask=None, position_embeddings=angles)
        further = self.norm(made[0] if isinstance(made, tuple) else made)
        return [self.model.lm_head(states)[0], self.model.lm_head(further)[0]]


def draw_biases(model: torch.nn.Module) -> None:
    """Give experts biases, if they have any."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.1 * torch.randn_like(buffer))


def losses_of_plain_training(
    model: torch.nn.Module, logits_of: Callable[[torch.Tensor], list[torch.Tensor]], batches: list[RankBatch], lr: float
) -> list[list[float]]:
    """Train with plain AdamW on the conversations of each batch, one by one.

    Args:
        logits_of: returns the logits of the next token, and of further ones, whose loss counts a tenth.

    Returns:
        the mean losses of each batch, of the next token first.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        totals, counts = [torch.zeros(()), torch.zeros(())], [0, 0]
        for row in batch.rows:
            for start, stop in pairwise(row.cu_seqlens.tolist()):
                labels, mask = torch.from_numpy(row.labels[start:stop]), torch.from_numpy(row.loss_mask[start:stop])
                for further, logits in enumerate(logits_of(torch.from_numpy(row.tokens[start:stop])[None])):
                    each = torch.nn.functional.cross_entropy(
                        logits[: len(labels) - further], labels[further:], reduction="none"
                    )
                    totals[further] = totals[further] + (each * mask[further:]).sum()
                    counts[further] += int(mask[further:].sum())
        ((totals[0] + 0.1 * totals[1]) / counts[0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append([float(total.detach()) / max(count, 1) for total, count in zip(totals, counts, strict=True)])
    return losses


def train_from(folder: Path, dataset: Path, run: Path, *more: str) -> tuple[list[StepMetrics], list[RankBatch]]:
    """Train 20 steps from a model's weights; return their metrics and batches."""
    plain = ("optimizer.lr=0.003", "optimizer.min_lr_ratio=0", "optimizer.decay=constant", "optimizer.warmup_steps=0")
    short = ("optimizer.weight_decay=0", "trainer.steps=20", "trainer.eval_interval=0", "loader.num_workers=0")
    # transformers does not move the biases of experts
    settings = [*settings_of(folder), *plain, *short, "model.expert_bias_rate=0", *more]
    run_here(sft, SftConfig, overrides_of(dataset, run, *settings))
    config = compose_config("sft", SftConfig, overrides_of(dataset, run, *settings))
    loader = Loader(open_dataset(dataset / "train"), config.loader, schedule=config.schedule, num_steps=20)
    return recorded_run(run).steps, list(loader)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_further_tokens_have_the_losses_of_plain_training_too_and_come_back_bit_by_bit(family, dataset, tmp_path):
    torch.manual_seed(8)
    model = Predicting(family)
    draw_biases(model)
    model.save(tmp_path / "model")
    steps, batches = train_from(tmp_path / "model", dataset, tmp_path / "run", "model.mtp_layers=1")
    expected = losses_of_plain_training(model, model, batches, 0.003)
    assert steps[-1].mtp_losses[0] < steps[0].mtp_losses[0] - 0.2
    np.testing.assert_allclose([[step.loss, *step.mtp_losses] for step in steps], expected, rtol=1e-5)

    # What was trained is in the export, in the form in which it came.
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())[MTP_SETTINGS[0]] == 1
    before, after = tensors(tmp_path / "model"), tensors(tmp_path / "out")
    assert {name: tensor.shape for name, tensor in after.items()} == {name: t.shape for name, t in before.items()}
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert {name.rpartition("e_score")[1] for name in set(before) - set(moved)} <= {"e_score"}
    model.save(tmp_path / "plain")
    for name, tensor in tensors(tmp_path / "plain").items():
        torch.testing.assert_close(
            after[name], tensor, rtol=0, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("check", "kinds"),
    [
        ("experts", ("qwen3_moe", "olmoe", "deepseek_like", "gpt_oss_like")),
        ("hybrid", ("hybrid", "hybrid_moe", "delta", "delta_moe")),
        ("media", ("audio", "omni", "image")),
    ],
)
def test_every_layout_trains_a_kind_for_twenty_steps_as_one_rank_does(tmp_path, check, kinds) -> None:
    folder = tmp_path / "parity"
    code, output = run_command(
        [sys.executable, "-m", "harness.recipes.parity", f"check={check}", f"folder={folder}"], timeout_s=3000
    )
    assert code == 0, output
    cells = read_report(folder / REPORT_FILE).cells
    assert len(cells) >= 16
    assert {len(cell.series.step) for cell in cells} == {22}
    assert {cell.reference for cell in cells if cell.reference is not None} == {
        f"{check} {kind}: data" for kind in kinds
    }


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Make a mistake of other programs inside the block."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from harness.megatron import batch
    from harness.megatron.model.router import Router

    count: Callable[..., None] = Router._count

    def count_all(self: Any, logits: torch.Tensor, chosen: torch.Tensor, padding: torch.Tensor) -> None:
        count(self, logits, chosen, padding)
        self.local_tokens_per_expert += (chosen & padding.unsqueeze(1)).sum(dim=0)

    ahead = batch.tokens_ahead

    def ahead_at_real_bounds(row: ThdBatch, distance: int) -> ThdBatch:
        bounds = row.cu_seqlens.copy()
        bounds[-1] = len(row)
        return ahead(replace(row, cu_seqlens=bounds, cu_seqlens_padded=bounds), distance)

    faults: dict[str | None, Any] = {
        None: [],
        "MTP rolled at unpadded bounds": [mock.patch.object(batch, "tokens_ahead", ahead_at_real_bounds)],
        "expert bias sees padding": [mock.patch.object(Router, "_count", count_all)],
        "shared expert skipped on one rank": [mock.patch.object(MoELayer, "shared_experts_compute", return_value=None)]
        * int(os.environ.get("RANK", "0") == "1"),
    }
    for patch in faults[fault]:
        patch.start()
    try:
        yield
    finally:
        mock.patch.stopall()


if __name__ == "__main__":
    prepare_process()
    for fault, overrides, folder, start in jobs_of(sys.argv[1]):
        if os.environ["RANK"] == "0":  # the others wait for it to join
            shutil.copytree(start, folder)
        with planted(fault):
            assert sft.main(compose_config("sft", SftConfig, [*overrides, f"run_dir={folder}"])) == 0
