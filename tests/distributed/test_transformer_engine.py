"""Machines where Transformer Engine can be imported and has no kernels, and runs of it on machines without it."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch

from harness.megatron import export_checkpoint

from . import conftest
from .conftest import ROOT, command, launcher, read_metrics, run_command


@pytest.fixture
def engine(monkeypatch) -> None:
    """Give the processes of this test the stub of Transformer Engine."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "engine_stub")])
    before = conftest.environment()
    monkeypatch.setattr(conftest, "environment", lambda: {**before, "PYTHONPATH": path})


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_checkpoint_of_pytorch_s_layers_loads_into_those_of_transformer_engine_and_back(
    tmp_path, engine, tp_size
) -> None:
    program = [*launcher(tp_size), "tests.distributed.engine_ranks", str(tmp_path), str(tp_size)]
    code, output = run_command(program)
    assert code == 0, output
    found = json.loads((tmp_path / "found.json").read_text())
    for family in ("llama", "qwen2", "qwen3"):
        expected = {"attentions": 2, "forgotten": 0, "same": True, "optimizer": "AdamW"}
        assert found[family] == expected, family


def test_a_cpu_trains_where_transformer_engine_is_installed_and_its_run_exports_where_it_is_not(
    dataset, tmp_path, engine
) -> None:
    folder = tmp_path / "run"
    code, output = run_command(command(dataset, folder, "trainer.steps=2", "trainer.eval_interval=0"))
    assert code == 0, output
    assert [line["step"] for line in read_metrics(folder)] == [1, 2]
    # As a GPU's run has it.
    config = folder / "config.yaml"
    text, changed = re.subn(r"(?m)^  attention: auto$", "  attention: transformer_engine", config.read_text())
    assert changed == 1
    config.write_text(text)
    threads = torch.get_num_threads()
    assert export_checkpoint(folder, tmp_path / "out").num_weights > 0
    torch.set_num_threads(threads)
