"""Settings for speed train to the same losses."""

from __future__ import annotations

import pytest

from harness.plan.settings import SftConfig
from recipes import sft

from .conftest import overrides_of, read_metrics, run_here

RUN = ("trainer.steps=3", "trainer.eval_interval=0", "trainer.checkpoint_interval=0", "loader.num_workers=0")


def test_fused_operations_and_deterministic_kernels_give_the_same_losses_and_bfloat16_gradients_near_ones(
    dataset, tmp_path
) -> None:
    def losses(name: str, *settings: str) -> list[float]:
        run_here(sft, SftConfig, overrides_of(dataset, tmp_path / name, *RUN, *settings))
        return [line["loss"] for line in read_metrics(tmp_path / name)]

    plain = losses("plain")
    assert losses("deterministic", "trainer.deterministic=true") == plain
    fused = losses("fused", "model.fuse_swiglu=on", "model.fuse_cross_entropy=on")
    assert fused == pytest.approx(plain, rel=1e-5)
    rounded = losses("rounded", "model.dtype=bfloat16", "parallel.gradient_dtype=bfloat16")
    assert rounded == pytest.approx(plain, rel=2e-2)
    assert rounded != plain
