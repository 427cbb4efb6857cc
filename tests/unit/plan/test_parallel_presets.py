"""Every file of `configs/parallel` is a layout that the parity model fits, on the number of ranks in its name."""

from __future__ import annotations

import math
import re

import pytest

from harness.config import CONFIGS, compose_config
from harness.parity.cells import parse_case
from harness.plan.settings import SftConfig
from recipes.parity import ParityConfig

PRESETS = sorted(path.stem for path in (CONFIGS / "parallel").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_composes_and_its_name_says_its_ranks(name) -> None:
    config = compose_config("sft", SftConfig, [f"parallel={name}", *compose_config("parity", ParityConfig).sft])
    assert config.parallel.model_ranks == math.prod(map(int, re.findall(r"(?:tp|pp|cp)(\d)", name.replace("vpp", "v"))))
    assert (config.parallel.virtual_pipeline_parallel_size is not None) == ("vpp" in name)
    assert config.parallel.sequence_parallel or "_sp" not in name
    config.model.check(config.parallel)


def test_the_parity_cases_use_every_preset_on_at_least_sixteen_layouts() -> None:
    cases = [parse_case(text) for text in compose_config("parity", ParityConfig).layouts]
    assert len({case.name for case in cases}) == len(cases) >= 16
    assert {case.ranks for case in cases} == {1, 2, 4, 8}
    used = {part.removeprefix("parallel=") for case in cases for part in case.overrides if part.startswith("parallel=")}
    assert used == set(PRESETS)
    for case in cases:
        config = compose_config("sft", SftConfig, [*compose_config("parity", ParityConfig).sft, *case.overrides])
        config.parallel.dp_size(case.ranks)
        config.model.check(config.parallel)
