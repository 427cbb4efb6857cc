"""Plans of the runs in `published.yaml`, with what their recipes have and no setting offers, are what they took."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.config import compose_config
from harness.errors import ConfigError
from harness.plan.layout import ParallelConfig
from harness.plan.memory import Kernels
from harness.plan.model import ModelConfig
from harness.plan.run_plan import AssumedPacks, Inputs, RunPlan, open_inputs, plan_layout, plan_rows, plan_run
from harness.plan.settings import SftConfig
from harness.plan.work import Machine, plan_work

ROWS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())


@dataclass
class UncheckedModel(ModelConfig, section="model"):
    """A model that no rule refuses: products in 8 bits with layers that predict further tokens."""

    def __post_init__(self) -> None:
        pass


def plan_published(name: str) -> RunPlan:
    """Plan a published run: its layout and its kernels, on rows that are filled by one sequence."""
    row = ROWS[name]
    sizes, recipe = dict(row["model"]), dict(row["recipe"])
    # Of which models in 8 bits have neither.
    further = {name: sizes.pop(name) for name in ("mtp_layers", "recompute_modules") if name in sizes}
    config = compose_config("sft", SftConfig, [f"model={sizes.pop('preset')}", "schedule=as_packed"])
    tp = row["parallel"].get("tensor_parallel_size", 1)
    layout = {**row["parallel"], "sequence_parallel": tp > 1, "distributed_optimizer": True, "static_rows": True}
    layout |= {"gradient_dtype": "bfloat16"}
    parallel = ParallelConfig(**layout)
    tokens = row["sequence"] // parallel.context_parallel_size
    config = replace(
        config,
        model=replace(config.model, **sizes),
        schedule=replace(config.schedule, max_tokens_per_rank=tokens),
        loader=replace(config.loader, global_batch_size=row["batch"]),
    )
    config = replace(open_inputs(config, (packs := packs_of(row))).config, parallel=parallel)
    config = replace(config, model=UncheckedModel(**vars(config.model) | further))
    inputs = Inputs(config, packs.lengths, packs.packs, packs.pack_size)
    work = plan_work(config.model, packs.lengths, num_packs=packs.packs, global_batch_size=row["batch"])
    recipe["recomputed"] = tuple(recipe.get("recomputed", ()))
    kernels = Kernels(engine=True, swiglu=True, grouped=config.model.num_experts > 0, expert_swiglu=True, **recipe)
    return plan_layout(
        inputs, ranks=row["gpus"], machine=Machine(), work=plan_rows(work, inputs, row["gpus"]), kernels=kernels
    )


def settings_of(row: dict[str, Any]) -> list[str]:
    """Return the settings of a row, as far as there are some."""
    sizes, layout = dict(row["model"]), dict(row["parallel"])
    tokens = row["sequence"] // layout.get("context_parallel_size", 1)
    layout |= {"sequence_parallel": layout.get("tensor_parallel_size", 1) > 1, "ranks": row["gpus"]}
    layout |= {"distributed_optimizer": True, "static_rows": True, "gradient_dtype": "bfloat16"}
    lines = [f"model={sizes.pop('preset')}", "schedule=as_packed", f"schedule.max_tokens_per_rank={tokens}"]
    lines += [f"loader.global_batch_size={row['batch']}", *(f"model.{name}={value}" for name, value in sizes.items())]
    plain = {name: value if isinstance(value, str) else str(value).lower() for name, value in layout.items()}
    return lines + [f"parallel.{name}='{value}'" for name, value in plain.items()]


def packs_of(row: dict[str, Any]) -> AssumedPacks:
    # A sequence of one stored token more has as many model tokens as the published rows.
    return AssumedPacks(row["batch"], row["sequence"] + 1, row["sequence"] + 1)


def predicted(planned: RunPlan) -> float:
    """Return the tokens per second of a GPU."""
    assert planned.work is not None
    return planned.work.tokens / planned.step_s / planned.ranks


@pytest.mark.parametrize("name", ROWS)
def test_a_published_run_takes_what_its_plan_says_within_a_tenth_and_fits(name: str) -> None:
    planned = plan_published(name)
    assert ROWS[name]["tokens_per_s"] / predicted(planned) == pytest.approx(1, abs=0.1)
    assert planned.memory.fits(80 * 2**30)
    page = (Path(__file__).parents[3] / "docs/experiments.md").read_text()
    quoted = f"| {ROWS[name]['tokens_per_s']:,} | {predicted(planned):,.0f} | {planned.memory.total / 2**30:.0f} |"
    assert page.count(quoted) == 1


@pytest.mark.parametrize("name", ROWS)
def test_settings_accept_the_layout_of_a_published_run_and_predict_it_or_name_what_they_lack(name: str) -> None:
    row = ROWS[name]
    with pytest.raises(ConfigError, match=row["refused"]) if "refused" in row else nullcontext():
        planned = plan_run(compose_config("sft", SftConfig, settings_of(row)), packs=packs_of(row))
        if "slower" in row:
            assert row["recipe"][row["slower"]]
            assert predicted(planned) < 0.9 * row["tokens_per_s"]
        else:
            assert row["tokens_per_s"] / predicted(planned) == pytest.approx(1, abs=0.1)


def test_half_of_the_published_runs_set_no_constant_of_the_plan() -> None:
    assert Counter(row["use"] for row in ROWS.values()) == {"calibration": 5, "held out": 5}
