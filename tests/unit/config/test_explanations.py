"""Every setting of every recipe and command is explained by the docstring of its dataclass."""

from __future__ import annotations

import pytest

from harness.bench import Sizes
from harness.cli.data import ConvertSettings, ImportSettings, RepackSettings
from harness.cli.indexed import FamilySettings
from harness.cli.launch import PlanSettings
from harness.cli.live import ProduceSettings
from harness.cli.runs import ChatSettings
from harness.config import TRAINING
from harness.launch import SubmitConfig
from harness.prep import PrepareConfig
from harness.settings import explain_settings
from recipes.parity import ParityConfig

SCHEMAS = {
    *TRAINING.values(),
    *(PrepareConfig, ParityConfig, SubmitConfig, Sizes),
    *(ConvertSettings, ImportSettings, RepackSettings, FamilySettings, PlanSettings, ProduceSettings, ChatSettings),
}


@pytest.mark.parametrize("schema", sorted(SCHEMAS, key=lambda schema: schema.__name__))
def test_every_setting_has_an_explanation(schema):
    assert [setting.key for setting in explain_settings(schema) if not setting.text] == []
