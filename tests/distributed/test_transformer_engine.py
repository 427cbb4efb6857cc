"""Checkpoints on a machine where Transformer Engine can be imported and has no kernels."""

from __future__ import annotations

import json
import os

import pytest
from engine_backends import ask, compile_gpu, folder, golden, is_made, python

from . import conftest
from .conftest import ROOT, forked, run_command


@pytest.fixture
def engine(monkeypatch) -> None:
    """Give the processes of this test the stub of Transformer Engine."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "engine_stub")])
    before = conftest.environment()
    monkeypatch.setattr(conftest, "environment", lambda: {**before, "PYTHONPATH": path})


# Newer ones load a GPU's driver when they are imported.
WHEEL = "2.14.1"


def _need(version: str) -> None:
    if not is_made(version):
        pytest.skip(f"needs Transformer Engine {version}: python tests/samples/engine_backends.py make {version}")


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


@pytest.mark.nightly
@pytest.mark.parametrize("tp_size", [1, 2])
def test_checkpoints_load_into_the_layers_of_a_wheel_and_back(tmp_path, monkeypatch, tp_size) -> None:
    _need(WHEEL)
    tests = ROOT / "tests"
    path = [ROOT, tests / "engine_wheel", tests / "samples", folder(WHEEL)]  # Megatron-Core 0.19 is the interpreter's
    known = {"PYTHONPATH": os.pathsep.join(map(str, path)), "ENGINE_OPENER": str(compile_gpu(tmp_path))}
    before = conftest.environment()
    monkeypatch.setattr(conftest, "environment", lambda: {**before, **known})
    module = ["tests.distributed.engine_ranks", str(tmp_path), str(tp_size), *ALL]
    code, output = run_command([python(), *forked(tp_size)[1:], *module])
    assert code == 0, output
    expected = {"attentions": 2, "forgotten": 0, "same": True, "optimizer": "AdamW"}
    assert json.loads((tmp_path / "found.json").read_text()) == dict.fromkeys(ALL, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_a_cpu_is_the_same_where_transformer_engine_can_be_imported(tmp_path, sft, request, ranks) -> None:
    settings = ["trainer.steps=4", "trainer.eval_interval=2", "model.dtype=bfloat16"]
    settings += ["parallel=tp2_sp"] if ranks == 2 else []
    without = sft(tmp_path / "without", *settings, ranks=ranks)
    request.getfixturevalue("engine")
    found = sft(tmp_path / "with", *settings, ranks=ranks)
    assert (without.code, found.code) == (0, 0), without.output + found.output
    for name in ("loss", "grad_norm"):
        assert found.column(name) == without.column(name)
    assert len(found.column("loss")) == 4
    # Its checkpoint is written, exported and loaded there too.
    again = [*forked(1), "harness", "export", str(tmp_path / "with"), str(tmp_path / "exported")]
    code, output = run_command(again)
    assert code == 0, output
    assert (tmp_path / "exported" / "config.json").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize("version", golden()["versions"])
def test_transformer_engine_chooses_the_attention_of_the_golden_table(version) -> None:
    _need(version)
    questions = {name: one for name, one in golden()["questions"].items() if one is not None}
    assert ask(version, questions) == golden()["versions"][version]
