"""LoRA trains the same adapters on every layout, and the export has the trained ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.errors import ConfigError
from harness.megatron.export.folder import _check_choices as check_choices
from harness.megatron.export.folder import export_checkpoint
from harness.plan.hf_config import read_hf_config
from harness.plan.layout import LORA_TARGETS
from harness.plan.model import ModelConfig
from harness.plan.settings import SftConfig
from harness.recipes import sft

from . import conftest
from .conftest import forked, overrides_of, read_metrics, run_here
from .test_weights import LATENT, MODELS, SIZES, settings_of, tensors

RANK = 4
LORA = (
    *(f"model.lora_rank={RANK}", "model.lora_alpha=16", "optimizer.lr=0.05", "optimizer.warmup_steps=0"),
    "optimizer.weight_decay=0",
)
STEPS = ("trainer.steps=6", "trainer.checkpoint_interval=3", "trainer.eval_interval=0")
SEQUENCE = list(range(3, 40))
EXPERTS = ("qwen3_moe_unnormalized", LORA_TARGETS)
GATED = ("gate_proj", "up_proj", "down_proj")


def save_model(folder: Path, name: str, *, has_weights: bool = True, **settings: object) -> Path:
    """Save a tiny random model of `test_weights.MODELS`, or its config alone."""
    import transformers

    torch.manual_seed(5)
    family, own = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **own, **settings})
    (transformers.AutoModelForCausalLM.from_config(config) if has_weights else config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def targets_of(names: Iterable[str]) -> str:
    return f"model.lora_targets=[{','.join(names)}]"


def train(base: Path, dataset: Path, folder: Path, *overrides: str, ranks: int = 1) -> list[dict[str, float]]:
    settings = [*STEPS, *LORA, *overrides]
    own = [*overrides_of(dataset, folder, *settings), *settings_of(base)]
    if ranks > 1:
        return conftest.train(folder, own, ranks=ranks, start=forked)
    run_here(sft, SftConfig, own)
    return read_metrics(folder)


@pytest.fixture(scope="module")
def trained(base: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(base, dataset, folder)
    return folder


def exported(run: Path, out: Path, *, adapters_only: bool = False) -> Path:
    export_checkpoint(run, out, adapters_only=adapters_only)
    return out


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([SEQUENCE])).logits[0]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3", LORA_TARGETS),
        pytest.param("nemotron_h", ("linear_qkv", "linear_fc1", "linear_fc2"), marks=pytest.mark.submission),
        pytest.param("qwen3_5", LORA_TARGETS, marks=pytest.mark.submission),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (
                ("nemotron3_super", ("linear_qkv",)),
                ("olmoe", LORA_TARGETS),
                ("qwen3_next", LORA_TARGETS[:2]),
                EXPERTS,
            )
        ),
    ],
)
def test_peft_loads_the_adapters_and_merges_to_the_same_weights(dataset, tmp_path, name, targets) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = save_model(tmp_path / "base", name)
    more = ["optimizer.lr=0.02", "trainer.steps=30", "trainer.checkpoint_interval=30"] * (name == "qwen3_next")
    losses = [line["loss"] for line in train(base, dataset, tmp_path / "run", targets_of(targets), *more)]
    assert min(losses) < losses[0] - 0.2
    adapter = exported(tmp_path / "run", tmp_path / "adapter", adapters_only=True)
    merged = exported(tmp_path / "run", tmp_path / "merged")
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (RANK, 16.0, str(base))
    original = AutoModelForCausalLM.from_pretrained(base).eval()
    plain = logits(original)
    adapted = peft.PeftModel.from_pretrained(original, adapter).eval()
    # PEFT loads every exported tensor, and none of its own stays at its initial values.
    held = tensors(adapter)
    assert all(held[tensor].any() for tensor in held)
    assert any(".mixer.in_proj." in tensor for tensor in held) == ("nemotron" in name)
    assert not any("mlp.gate." in tensor for tensor in held)  # a router stays as it is
    if any(".mlp.experts." in one for one in held):  # PEFT has one tensor for all experts of a layer
        assert {f"base_model.model.model.layers.1.mlp.experts.3.{one}.lora_B.weight" for one in GATED} < set(held)
    else:
        assert set(held) == {one.replace(".default", "") for one, _ in adapted.named_parameters() if "lora_" in one}
    assert (logits(adapted) - plain).abs().max() > 0.1
    again = AutoModelForCausalLM.from_pretrained(merged).eval()
    # The rounding of a merged matrix depends on the processor and is amplified by experts chosen by scores and by
    # norms of small numbers, so adapters beside the weights are compared loosely, and the merged weights exactly.
    torch.testing.assert_close(logits(adapted), logits(again), atol=1e-4, rtol=0)
    torch.testing.assert_close(adapted.merge_and_unload().state_dict(), again.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_missing_adapters_and_those_of_experts_that_peft_would_skip_are_not_written_alone(tmp_path, name) -> None:
    folder = save_model(tmp_path, name, has_weights=False)
    stored = read_hf_config(folder)
    model = ModelConfig(
        **stored.settings,
        init_from=str(folder),
        vocab_size=300,
        max_sequence_length=64,
        lora_rank=RANK,
        lora_targets=["linear_qkv", "linear_fc2"],
    )
    with pytest.raises(ConfigError, match="the run trained all weights") as refused:
        check_choices(replace(model, lora_rank=0), folder, adapters_only=True, keep_mtp=False)
    assert "--adapter" in refused.value.fix
    if not model.num_experts or model.family in ("qwen3_moe", "olmoe"):
        check_choices(model, folder, adapters_only=True, keep_mtp=False)
        return
    with pytest.raises(ConfigError, match="PEFT does not load all adapters of linear_fc2"):
        check_choices(model, folder, adapters_only=True, keep_mtp=False)


@pytest.mark.parametrize("family", ["qwen3", "nemotron3_super"])
def test_only_the_adapters_of_linear_layers_are_trained(base, trained, dataset, tmp_path, family) -> None:
    if family != "qwen3":
        base, trained = save_model(tmp_path / "base", family), tmp_path / "run"
        train(base, dataset, trained)
        with pytest.raises(ConfigError, match="adapters of linear_fc1, linear_fc2, linear_proj into") as refused:
            exported(trained, tmp_path / "adapter", adapters_only=True)
        assert "omit --adapter" in refused.value.fix
    before, after = tensors(base), tensors(exported(trained, tmp_path / "merged"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("proj.weight") and "latent" not in name}
    for name in changed:
        values = torch.linalg.svdvals((after[name] - before[name]).double())
        assert values[RANK - 1] > 1e-5 > values[RANK]


LAYOUTS = (("tp2",), ("pp2", "model.recompute=full"), ("cp2", "parallel.distributed_optimizer=true"))
at_night = [pytest.param(layout, marks=pytest.mark.nightly) for layout in LAYOUTS]


def assert_alike(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for name, tolerance in (("step", 0), ("loss", 1e-5), ("grad_norm", 1e-4)):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=tolerance)


@pytest.mark.parametrize("layout", [pytest.param(("tp2_sp",), marks=pytest.mark.submission), *at_night])
def test_every_layout_resumes_with_the_adapters_of_one_rank(base, dataset, trained, tmp_path, layout) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    parallel, *more = layout
    found = train(base, dataset, folder, f"parallel={parallel}", *more, "resume=true", ranks=2)
    assert_alike(found, read_metrics(trained))


@pytest.mark.parametrize("layout", at_night)
def test_every_layout_draws_the_same_adapters(base, dataset, trained, tmp_path, layout) -> None:
    parallel, *more = layout
    found = train(base, dataset, tmp_path / "new", f"parallel={parallel}", *more, "trainer.steps=3", ranks=2)
    assert_alike(found, read_metrics(trained)[:3])


def test_a_run_does_not_resume_with_other_adapters(base, dataset, trained, tmp_path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    for change, message in ((0, "model.lora_rank was 4 and is 0"), (8, "model.lora_rank was 4 and is 8")):
        with pytest.raises(ConfigError) as refused:
            train(base, dataset, tmp_path / "run", f"model.lora_rank={change}", "trainer.steps=7", "resume=true")
        assert message in refused.value.what
    assert len(read_metrics(tmp_path / "run")) == 6


@pytest.mark.nightly
def test_every_layout_draws_the_same_adapters_of_experts_and_only_linear_layers_change(dataset, tmp_path) -> None:
    base = save_model(tmp_path / "base", "moonlight", q_lora_rank=LATENT["q_lora_rank"])
    settings = ("schedule=as_packed", "model.seed=20261123")  # a seed as people write them
    expected = train(base, dataset, tmp_path / "one", *settings)
    more = ("parallel=pp2_ep2", "trainer.steps=3")
    assert_alike(train(base, dataset, tmp_path / "two", *settings, *more, ranks=4), expected[:3])
    merged = tensors(exported(tmp_path / "one", tmp_path / "merged"))
    before = tensors(base)
    # Weights of every linear layer change; routers, their biases, norms and embeddings do not.
    assert {name for name in before if not torch.equal(before[name], merged[name])} == {
        name for name in before if name.rpartition(".weight")[0].endswith(("_proj", "_proj_with_mqa"))
    }
