"""The search of layouts agrees with the plan of each, and finds the layouts that Megatron-Bridge's recipes have."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import yaml
from layout_space import KINDS, RANKS, accepted, config_of

from harness.config import compose_config
from harness.errors import ConfigError
from harness.plan.run_plan import AssumedPacks, plan_run
from harness.plan.search import LayoutSearch, check_memory, search_layouts, suggest_settings
from harness.plan.settings import SftConfig
from harness.plan.work import Machine

GPU = 80 * 2**30


def search(*overrides: str, pack_size: int = 8192, gpu_bytes: float | None = GPU) -> LayoutSearch:
    settings = compose_config("sft", SftConfig, list(overrides))
    packs = AssumedPacks(1000, pack_size, sequence_tokens=1024)
    return search_layouts(settings, machine=Machine(), packs=packs, gpu_bytes=gpu_bytes)


def sizes(found: LayoutSearch, place: int = 0) -> dict[str, int | None]:
    parallel = found.fitting[place].parallel
    return {
        "TP": parallel.tensor_parallel_size,
        "PP": parallel.pipeline_parallel_size,
        "VPP": parallel.virtual_pipeline_parallel_size,
        "CP": parallel.context_parallel_size,
    }


def test_the_layouts_of_megatron_bridge_s_h100_recipes_are_the_first_or_as_fast() -> None:
    # llama3_8b, SFT for speed: rows of 4,096 tokens, gradients in bfloat16.
    eight = ["model.vocab_size=128256", "loader.global_batch_size=64", "parallel.gradient_dtype=bfloat16"]
    small = search("model=llama3_8b", "parallel.ranks=8", *eight, pack_size=4096)
    assert sizes(small) == {"TP": 1, "PP": 1, "VPP": None, "CP": 1}
    # llama3_70b on 32 GPUs, likewise.
    large = search("model=llama3_70b", "parallel.ranks=32", *eight, pack_size=4096)
    first = sizes(large)
    assert (first["TP"], first["PP"], first["CP"]) == (4, 4, 1)
    # The recipe has 5 chunks for a stage; more of them wait less for the first, and send more often.
    places = range(len(large.fitting))
    recipe = next(place for place in places if sizes(large, place) == {"TP": 4, "PP": 4, "VPP": 5, "CP": 1})
    assert large.fitting[recipe].plan.step_s < 1.01 * large.fitting[0].plan.step_s


@pytest.mark.parametrize("layers", [32, 31])
def test_a_layout_of_the_search_is_planned_alike_by_its_settings(layers: int) -> None:
    base = ["model=llama3_8b", "model.vocab_size=128256", "loader.global_batch_size=64", f"model.num_layers={layers}"]
    found = search(*base)
    assert found.fitting == sorted(found.fitting, key=lambda one: one.plan.step_s)
    assert all(one.plan.memory.fits(GPU) for one in found.fitting)
    interleaved = [one for one in found.fitting if one.parallel.virtual_pipeline_parallel_size]
    uneven = [one for one in found.fitting if one.parallel.pipeline_layout]
    assert bool(uneven) == (layers == 31)
    assert {one.parallel.virtual_pipeline_parallel_size for one in uneven} == ({None, 4} if uneven else set())
    for one in (found.fitting[0], interleaved[-1], *uneven[:1]):
        config = compose_config("sft", SftConfig, [*base, *one.overrides])
        planned = plan_run(config, packs=AssumedPacks(1000, 8192, 1024))
        assert (planned.step_s, planned.memory) == (one.plan.step_s, one.plan.memory)


def test_the_line_that_the_command_prints_is_the_layout_after_a_shell(harness, tmp_path) -> None:
    base = ["model=tiny", "model.num_layers=3", "model.vocab_size=512", "parallel.ranks=2"]
    (tmp_path / "model.recompute_modules=c").touch()  # which the brackets of [core_attn] would match
    code, printed, error = harness("plan", "auto", *base, "packs=1000", "gpu_gib=null", "top=1")
    assert code == 0, error
    (line,) = re.findall(r"^the fastest: (.*)$", printed, re.MULTILINE)
    words = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {line}"], text=True, cwd=tmp_path).splitlines()
    assert "model.recompute_modules=[core_attn]" in words
    assert compose_config("sft", SftConfig, [*base, *words]).parallel.ranks == 2


def test_rows_of_a_search_are_whole_blocks_in_8_bits_and_one_pack_where_packs_are_rows() -> None:
    in_8_bits = search("model=llama3_8b", "model.fp8=blockwise", "parallel.ranks=8", pack_size=1026).fitting[0]
    assert in_8_bits.config.max_tokens_per_rank % 128 == 0
    as_packed = search("model=llama3_8b", "schedule=as_packed", "parallel.ranks=8")
    tokens = {one.config.max_tokens_per_rank * (one.parallel.context_parallel_size or 1) for one in as_packed.fitting}
    assert tokens == {8192}


def test_experts_are_divided_too_and_a_vocabulary_is_assumed() -> None:
    found = search("model=qwen3_30b_a3b", "loader.global_batch_size=64")
    assert {one.parallel.expert_parallel_size for one in found.fitting} >= {4, 8}
    assert "131,072" in found.fitting[0].plan.notes[0]


def changed(config: SftConfig, overrides: list[str]) -> SftConfig:
    groups: dict[str, dict[str, Any]] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        group, name = key.split(".")
        groups.setdefault(group, {})[name] = yaml.safe_load(value)
    return replace(config, **{group: replace(getattr(config, group), **values) for group, values in groups.items()})


@pytest.mark.submission
@pytest.mark.parametrize("model", ["llama3_8b", "llama3_8b model.lora_rank=8", "qwen3_30b_a3b", "moonlight_16b_a3b"])
def test_a_search_lists_only_layouts_that_training_accepts(model) -> None:
    for ranks in (1, 8):
        settings = [*f"model={model}".split(), f"parallel.ranks={ranks}", "loader.global_batch_size=64"]
        config = compose_config("sft", SftConfig, settings)
        packs = AssumedPacks(1000, 4096, sequence_tokens=1024)
        found = search_layouts(config, machine=Machine(), packs=packs, gpu_bytes=None)
        assert found.fitting
        for one in found.fitting:
            changed(config, one.overrides).check(ranks)


@pytest.mark.submission
@pytest.mark.parametrize("kind", KINDS)
def test_a_search_lists_only_layouts_that_are_trained_in_the_tests(kind) -> None:
    trained = [(layout.ranks, layout.parallel) for layout in accepted([kind])]
    for ranks in RANKS:
        config = changed(config_of(kind), [f"parallel.ranks={ranks}"])
        packs = AssumedPacks(1000, 256, sequence_tokens=64)
        for one in search_layouts(config, machine=Machine(), packs=packs, gpu_bytes=None).fitting:
            for device in ("cpu", "cuda"):
                parallel = one.parallel.on(device)
                assert (ranks, {name: getattr(parallel, name) for name in trained[0][1]}) in trained


def test_ranks_that_leave_a_part_of_a_node_empty_are_refused_with_the_arithmetic() -> None:
    config = compose_config("sft", SftConfig, ["model=llama3_8b", "parallel.ranks=12"])
    packs = AssumedPacks(1000, 4096, sequence_tokens=1024)
    message = "12 ranks fill 1 node of 8 GPUs, and 4 would be on another"
    with pytest.raises(ConfigError, match=message):
        plan_run(config, packs=packs)
    with pytest.raises(ConfigError, match=message) as refused:
        search_layouts(config, machine=Machine(), packs=packs, gpu_bytes=GPU)
    assert refused.value.fix == "parallel.ranks=8 or 16, or a gpus_per_node that divides 12"
    assert plan_run(config, packs=packs, machine=Machine(ranks=4)).ranks == 12


def test_a_search_in_which_nothing_fits_prints_settings_that_plan_to_fit(tmp_path, harness) -> None:
    names = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    sizes = {**names, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, **sizes})
    )
    base = [f"model.init_from={tmp_path}", "packs=1000"]
    code, printed, _ = harness("plan", "auto", *base, "parallel.ranks=8")
    lines = [shlex.split(line)[3:] for line in printed.splitlines() if line.startswith("it fits with: ")]
    assert (code, "no layout fits: the smallest needs " in printed) == (1, True)
    assert [line[-1] for line in lines] == ["optimizer.offload=1.0", "model.lora_rank=16"]
    for line in lines:
        assert harness("plan", "sft", *base, *line)[0] == 0


def test_a_run_that_does_not_fit_is_offered_the_fewest_savings_with_which_it_does() -> None:
    settings = ["model=llama3_8b", "model.init_from=weights", "model.vocab_size=128256", "parallel.ranks=8"]
    packs = AssumedPacks(1000, 8192, sequence_tokens=1024)

    def fits(*further: str) -> bool:
        run = compose_config("sft", SftConfig, [*settings, *further])
        return plan_run(run, packs=packs).memory.fits(GPU)

    assert not fits()
    config = compose_config("sft", SftConfig, settings)
    lines = suggest_settings(config, lambda run: plan_run(run, packs=packs).memory.fits(GPU))
    assert lines == ["parallel.distributed_optimizer=true model.recompute=full", "model.lora_rank=16"]
    assert all(fits(*line.split()) for line in lines)
    assert not any(fits(one) for one in lines[0].split())
    with pytest.raises(ConfigError) as refused:
        check_memory(config, 8, gpu_gib=80)
    assert refused.value.fix.startswith(
        "add parallel.distributed_optimizer=true model.recompute=full; or add model.lora"
    )


def test_ranks_that_hold_no_whole_copy_and_data_that_is_not_there_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="batch of 16 packs is too small for 24"):
        search("model=tiny", "parallel.ranks=24", "model.vocab_size=300")
    settings = compose_config("sft", SftConfig, ["model.vocab_size=300", f"data.path={tmp_path / 'nowhere'}"])
    with pytest.raises(ConfigError, match="which is unknown: there is no dataset"):
        search_layouts(settings, machine=Machine(), packs=None, gpu_bytes=GPU)


def test_experts_that_a_layout_divides_otherwise_are_in_its_line_too() -> None:
    settings = ["model=qwen3_30b_a3b", "model.vocab_size=151936", "loader.global_batch_size=64", "parallel=tp2_etp2"]
    one = search(*settings).fitting[0]
    config = compose_config("sft", SftConfig, [*settings, *one.overrides])
    assert config.parallel == one.parallel
    assert plan_run(config, packs=AssumedPacks(1000, 8192, 1024)).step_s == one.plan.step_s


def test_a_search_without_any_layout_names_what_each_is_refused_for() -> None:
    flex = ["parallel.expert_dispatcher=flex", "parallel.expert_parallel_size=2"]
    with pytest.raises(ConfigError, match="DeepEP supports experts on 2, 4"):
        search("model=llama3_8b", *flex)
