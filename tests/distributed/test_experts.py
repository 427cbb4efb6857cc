"""A mixture of experts trains on every layout as on one rank, padding never counts, and planted faults are named."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from small_packs import VOCAB

import recipes.sft
from harness.config import compose_config
from harness.formats import open_dataset
from harness.loader import Loader, RankBatch
from harness.parity.compare import Tolerances, compare_runs
from harness.parity.locate import recorded_run
from harness.parity.result import REPORT_FILE, Check, read_report
from harness.parity.running import free_ports
from harness.plan import SftConfig
from harness.plan.hf_config import read_hf_config
from recipes.parity import ParityConfig

from .conftest import forked, overrides_of, run_command, run_here

STEPS = ("optimizer.decay_steps=4", "trainer.eval_interval=2", "trainer.eval_batches=1", "trainer.record_digests=true")
SMALLER = ("model.num_layers=2", "loader.num_workers=0", "resume=auto", "trainer.checkpoint_interval=0")
# Layouts of two ranks whose rows have padding, by kind of model.
LAYOUTS = {
    "qwen3_moe": ("ep2_distributed", "cp2_ep2"),
    "olmoe": ("tp2_ep2",),
    "deepseek_like": ("tp2_ep2", "tp2_etp2"),
    "gpt_oss_like": ("tp2_ep2", "cp2_ep2"),
}
# Fault, kind of model, layout, and what names it.
FAULTS = (
    ("padding in the router", "qwen3_moe", "cp2_ep2", "routed_tokens"),
    ("expert bias sees padding", "deepseek_like", "tp2_ep2", "bias_tokens"),
    ("shared expert skipped on one rank", "deepseek_like", "ep2", "shared_tokens"),
)


def settings_of(kind: str) -> list[str]:
    return [*compose_config("parity", ParityConfig).kinds[kind].split(), *SMALLER, *STEPS]


Compare = Callable[[str, str, "str | None"], dict[str, Check]]


def run_all(dataset: Path, place: Path, wanted: Sequence[tuple[str, str, str | None]]) -> Compare:
    """Train each (kind, layout, fault) on two ranks, and each kind on one.

    Returns:
        compare(kind, layout, fault): the checks of a run on two ranks against the same run on one.
    """

    def overrides(kind: str, folder: Path, steps: int) -> list[str]:
        return overrides_of(dataset, folder, *settings_of(kind), f"trainer.steps={steps}")

    for kind in {kind for kind, _, _ in wanted}:
        start, one = place / kind / "start", place / kind / "one"
        run_here(recipes.sft, SftConfig, overrides(kind, start, 1))
        shutil.copytree(start, one)
        run_here(recipes.sft, SftConfig, overrides(kind, one, 4))
    folders = {run: place / f"{number}" for number, run in enumerate(wanted)}
    runs = [
        [port, fault, [*overrides(kind, folder, 4), f"parallel={layout}"], str(folder), str(place / kind / "start")]
        for port, ((kind, layout, fault), folder) in zip(free_ports(len(folders)), folders.items(), strict=True)
    ]
    listed = place / "runs.json"
    listed.write_text(json.dumps(runs))
    code, output = run_command([*forked(2), "tests.distributed.expert_ranks", str(listed)], timeout_s=1000)
    assert code == 0, output

    def compare(kind: str, layout: str, fault: str | None = None) -> dict[str, Check]:
        expected, found = recorded_run(place / kind / "one"), recorded_run(folders[kind, layout, fault])
        assert len(found.steps) == 4
        return {check.name: check for check in compare_runs(expected, found, Tolerances(1e-6, 1e-5))}

    return compare


def differences(checks: dict[str, Check]) -> list[str]:
    assert "experts" in checks
    return [check.difference.message for check in checks.values() if check.difference is not None]


def test_two_ranks_train_experts_from_the_checkpoint_of_one_rank_as_it_does(dataset, tmp_path) -> None:
    compare = run_all(dataset, tmp_path, [("deepseek_like", "tp2_ep2", None)])
    assert differences(compare("deepseek_like", "tp2_ep2", None)) == []
    # The load of experts in a validation, which is compared too, does not count in the steps' own.
    steps = recorded_run(tmp_path / "deepseek_like" / "one").steps
    assert [list(step.evaluation_expert_loads) for step in steps] == [
        ["validation"],
        ["validation"],
        [],
        ["validation"],
    ]
    assert len({step.experts["bias_tokens"] / step.tokens for step in steps}) == 1
    assert all(load > 1 for step in steps for load in step.evaluation_expert_loads.values())
    assert "![load of experts](experts.png)" in (tmp_path / "deepseek_like" / "one" / "report.md").read_text()


@pytest.fixture(scope="module")
def compare(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Compare:
    wanted = [(kind, layout, None) for kind, layouts in LAYOUTS.items() for layout in layouts]
    wanted += [(kind, layout, fault) for fault, kind, layout, _ in FAULTS]
    return run_all(dataset, tmp_path_factory.mktemp("experts"), wanted)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind in LAYOUTS for layout in LAYOUTS[kind]])
def test_every_layout_of_two_ranks_trains_experts_as_one_rank_does(compare, kind, layout) -> None:
    assert differences(compare(kind, layout, None)) == []


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("fault", "kind", "layout", "named"), FAULTS)
def test_a_fault_planted_in_experts_is_named(compare, fault, kind, layout, named) -> None:
    check = compare(kind, layout, fault)["experts"]
    assert check.difference is not None
    assert check.difference.field == named
    assert f"step 2: {named} of the experts is " in check.difference.message


TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
PUBLISHED = {
    "Qwen3Moe": {"num_experts": 4, "num_key_value_heads": 2, "head_dim": 16},
    "GptOss": {
        "num_local_experts": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "DeepseekV3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_mtp_layers": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 256,
        },
    },
}


def save_tiny(family: str, folder: Path) -> Path:
    """Save a tiny random model of transformers whose experts have biases, if it has any."""
    import transformers

    torch.manual_seed(8)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **PUBLISHED[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return folder


def losses_of_transformers(folder: Path, batches: list[RankBatch], lr: float) -> list[float]:
    """Train with plain AdamW on the conversations of each batch, one by one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total, count = torch.zeros(()), 0
        for row in batch.rows:
            for start, stop in pairwise(row.cu_seqlens.tolist()):
                logits = model(torch.from_numpy(row.tokens[start:stop])[None]).logits[0]
                each = torch.nn.functional.cross_entropy(
                    logits, torch.from_numpy(row.labels[start:stop]), reduction="none"
                )
                total = total + (each * torch.from_numpy(row.loss_mask[start:stop])).sum()
                count += int(row.loss_mask[start:stop].sum())
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach()) / count)
    return losses


@pytest.mark.nightly
@pytest.mark.parametrize("family", PUBLISHED)
def test_experts_have_the_losses_of_plain_training_on_unpacked_conversations(family, dataset, tmp_path) -> None:
    folder = save_tiny(family, tmp_path / "model")
    stored = read_hf_config(folder).settings
    model = [f"model.{name}={'null' if value is None else str(value).lower()}" for name, value in stored.items()]
    plain = ("optimizer.lr=0.003", "optimizer.min_lr=0", "optimizer.decay=constant", "optimizer.warmup_steps=0")
    more = ("optimizer.weight_decay=0", "trainer.steps=20", "trainer.eval_interval=0", "loader.num_workers=0")
    settings = [f"model.init_from={folder}", "model.max_sequence_length=1024", *model, *plain, *more]
    settings.append("model.expert_bias_rate=0")  # transformers does not move the biases of experts
    run_here(recipes.sft, SftConfig, overrides_of(dataset, tmp_path / "run", *settings))
    found = [step.loss for step in recorded_run(tmp_path / "run").steps]

    config = compose_config("sft", SftConfig, overrides_of(dataset, tmp_path / "run", *settings))
    loader = Loader(open_dataset(dataset / "train"), config.loader, schedule=config.schedule, num_steps=20)
    expected = losses_of_transformers(folder, list(loader), 0.003)
    assert found[-1] < found[0] - 0.3
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_layout_trains_experts_for_twenty_steps_as_one_rank_does(tmp_path) -> None:
    folder = tmp_path / "parity"
    code, output = run_command(
        [sys.executable, "-m", "recipes.parity", "check=experts", f"folder={folder}"], timeout_s=3000
    )
    assert code == 0, output
    cells = read_report(folder / REPORT_FILE).cells
    assert len(cells) >= 16
    assert {len(cell.series.step) for cell in cells} == {22}
    assert {cell.reference for cell in cells if cell.reference is not None} == {
        "experts qwen3_moe: data",
        "experts olmoe: data",
        "experts deepseek_like: data",
        "experts gpt_oss_like: data",
    }
