"""Every file of `configs/parallel` is a layout that the parity model fits, on the number of ranks in its name."""

from __future__ import annotations

import functools
import math
import re

import pytest
from harness.recipes.parity import ParityConfig

from harness.config import CONFIGS, compose_config
from harness.parity.cells import KIND, parse_case
from harness.plan.model_checks import check_division
from harness.plan.settings import SftConfig

PARITY = compose_config("parity", ParityConfig)
PRESETS = sorted(path.stem for path in (CONFIGS / "parallel").glob("*.yaml"))


@functools.cache
def composed(*overrides: str) -> SftConfig:
    """Return the configuration of these settings; tests share those that are the same."""
    return compose_config("sft", SftConfig, list(overrides))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_composes_and_its_name_says_its_ranks(name) -> None:
    experts = PARITY.kinds["qwen3_moe"].split() if "ep" in name or "etp" in name else []
    config = composed(*PARITY.sft, *experts, f"parallel={name}")
    sizes = {kind: int(size) for kind, size in re.findall(r"([a-z]+)(\d)", name)}
    parallel = config.parallel
    assert parallel.model_ranks == math.prod(sizes.get(kind, 1) for kind in ("tp", "pp", "cp"))
    assert (parallel.expert_parallel_size, parallel.expert_tensor_parallel_size) == (
        sizes.get("ep", 1),
        sizes.get("etp", 1),
    )
    assert (config.parallel.virtual_pipeline_parallel_size is not None) == ("vpp" in name)
    assert config.parallel.sequence_parallel or "_sp" not in name
    check_division(config.model, config.parallel)


@pytest.mark.submission
def test_the_parity_cases_use_every_preset_on_at_least_sixteen_layouts() -> None:
    cases = [parse_case(text) for text in PARITY.layouts]
    experts = [parse_case(text) for text in PARITY.experts]
    assert len({(case.value_of(KIND), case.name) for case in experts}) == len(experts) >= 16
    assert len({case.name for case in cases}) == len(cases) >= 16
    assert {case.ranks for case in cases} == {1, 2, 4, 8}
    parts = [part for case in [*cases, *experts] for part in case.overrides]
    assert {part.removeprefix("parallel=") for part in parts if part.startswith("parallel=")} == set(PRESETS)
    for case in [*cases, *experts]:
        kind = PARITY.kinds[case.value_of(KIND) or ""].split() if case in experts else []
        config = composed(*PARITY.sft, *kind, *case.settings)
        config.parallel.dp_size(case.ranks)
        check_division(config.model, config.parallel)
