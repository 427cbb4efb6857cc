"""Every setting of every recipe and command is explained by the docstring of its dataclass."""

from __future__ import annotations

import pytest

from harness.cli.data import ConvertSettings, ImportSettings, RepackSettings
from harness.cli.indexed import FamilySettings
from harness.cli.launch import PlanSettings
from harness.cli.live import ProduceSettings
from harness.cli.runs import ChatSettings
from harness.config import TRAINING
from harness.launch import SubmitConfig
from harness.prep.pipeline import PrepareConfig
from harness.settings import explain_settings
from recipes.parity import ParityConfig

RECIPES = (*TRAINING.values(), PrepareConfig, ParityConfig, SubmitConfig)
COMMANDS = (
    ConvertSettings,
    ImportSettings,
    RepackSettings,
    FamilySettings,
    PlanSettings,
    ProduceSettings,
    ChatSettings,
)
BENCH_SIZES = sorted({type(bench.quick) for bench in BENCHES.values()}, key=lambda schema: schema.__name__)


@pytest.mark.parametrize("schema", [*RECIPES, *COMMANDS, ChatSettings, *BENCH_SIZES])
def test_every_setting_has_an_explanation(schema):
    assert [setting.key for setting in explain_settings(schema) if not setting.text] == []
