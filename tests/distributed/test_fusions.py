"""Settings for speed train to the same losses."""

from __future__ import annotations

import pytest

from harness.plan.settings import SftConfig
from harness.recipes import sft

from .conftest import overrides_of, read_metrics, run_here

RUN = ("trainer.steps=3", "trainer.eval_interval=0", "trainer.checkpoint_interval=0", "loader.num_workers=0")


@pytest.mark.nightly  # half a minute
def test_fused_operations_and_deterministic_kernels_give_the_same_losses_and_bfloat16_gradients_near_ones(
    dataset, tmp_path
) -> None:
    def run(name: str, *settings: str, key: str = "loss") -> list[float]:
        run_here(sft, SftConfig, overrides_of(dataset, tmp_path / name, *RUN, *settings))
        return [line[key] for line in read_metrics(tmp_path / name)]

    plain = run("plain", key="grad_norm")
    assert run("deterministic", "trainer.deterministic=true", key="grad_norm") == plain
    assert run("swiglu", "model.fuse_swiglu=on", key="grad_norm") == pytest.approx(plain, rel=1e-5)
    half = ("model.dtype=bfloat16", "model.fuse_swiglu=on", "model.fuse_cross_entropy=on")
    rounded = run("rounded", *half, "parallel.gradient_dtype=bfloat16", key="grad_norm")
    assert rounded == pytest.approx(plain, rel=5e-2)
    assert rounded != plain


def test_the_log_has_the_padding_of_rows_of_one_length(dataset, tmp_path, capsys):
    for value, is_padded in (("true", True), ("null", False)):
        folder = tmp_path / value
        run_here(sft, SftConfig, overrides_of(dataset, folder, "trainer.steps=2", f"parallel.static_rows={value}"))
        printed, padding = "".join(capsys.readouterr()), 1 - read_metrics(folder)[0]["fill"]
        line = f"padded to 256 tokens (parallel.static_rows): {padding:.1%} of the tokens in this step are padding"
        assert printed.count(line) == is_padded
        assert 0 < padding < 1
        # What null stands for on this device.
        assert f"static_rows: {str(is_padded).lower()}" in (folder / "config.yaml").read_text()
