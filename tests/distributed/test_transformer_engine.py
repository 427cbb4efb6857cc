"""Checkpoints on a machine where Transformer Engine can be imported and has no kernels."""

from __future__ import annotations

import json
import os

import pytest

from . import conftest
from .conftest import ROOT, forked, run_command


@pytest.fixture
def engine(monkeypatch) -> None:
    """Give the processes of this test the stub of Transformer Engine."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "engine_stub")])
    before = conftest.environment()
    monkeypatch.setattr(conftest, "environment", lambda: {**before, "PYTHONPATH": path})


ALL = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize(
    ("tp_size", "families"),
    [
        (1, ("qwen3", "qwen3_moe")),
        pytest.param(1, ALL, marks=pytest.mark.nightly),
        pytest.param(2, ALL, marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_of_pytorch_s_layers_loads_into_those_of_transformer_engine_and_back(
    tmp_path, engine, tp_size, families
) -> None:
    program = [*forked(tp_size), "tests.distributed.engine_ranks", str(tmp_path), str(tp_size), *families]
    code, output = run_command(program)
    assert code == 0, output
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == set(families)
    for family in families:
        expected = {"attentions": 2, "forgotten": 0, "same": True, "optimizer": "AdamW"}
        assert found[family] == expected, family
