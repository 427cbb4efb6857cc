"""Windows of live chunks on tensor- and pipeline-parallel layouts train what stored batches of them do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from live_streams import some_packs, write_stream

from harness.formats import open_writer
from harness.records import Pack

from ..distributed.conftest import SMALL, train

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

WINDOW, STEPS = 8, 6
SETTINGS = ("model.vocab_size=300", "trainer.checkpoint_interval=2", "optimizer.lr=0.01")
LAYOUTS = {
    "tp2": ("parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"),
    "pp2": ("parallel.pipeline_parallel_size=2",),
    "pp2_vpp2": ("parallel.pipeline_parallel_size=2", "parallel.virtual_pipeline_parallel_size=2"),
}


def sft(folder: Path, steps: int, *overrides: str, ranks: int = 1) -> list[dict[str, float]]:
    return train(folder, [f"run_dir={folder}", *SMALL, *SETTINGS, f"trainer.steps={steps}", *overrides], ranks=ranks)


@pytest.mark.parametrize("average", ["token", "conversation"])
def test_one_checkpoint_goes_on_in_every_layout_with_the_losses_of_stored_batches(tmp_path: Path, average: str) -> None:
    sequences = [
        Pack(one.input_ids, one.loss_mask, [0])
        for pack in some_packs(40)
        for one in pack.sequences()
        if one.loss_mask.any()
    ][: WINDOW * STEPS]
    assert len(sequences) == WINDOW * STEPS
    write_stream(tmp_path / "live", sequences, [7, 20, 21])
    with open_writer(tmp_path / "stored", format="memmap", pack_size=64) as writer:
        for one in sequences:
            writer.append(one)
    stored = sft(
        tmp_path / "reference",
        *(STEPS, f"data.path={tmp_path / 'stored'}", f"loader.global_batch_size={WINDOW}", "loader.shuffle=false"),
        f"trainer.loss_average={average}",
    )
    expected = [line["loss"] for line in stored]
    live = (
        *("data=live", f"data.live.path={tmp_path / 'live'}", "data.live.pack_size=64"),
        *(f"data.live.window_sequences={WINDOW}", "data.live.timeout_s=60", f"trainer.loss_average={average}"),
    )

    def losses(folder: Path, steps: int, *overrides: str, ranks: int = 1) -> list[float]:
        return [line["loss"] for line in sft(folder, steps, *live, *overrides, ranks=ranks)]

    run = tmp_path / "run"
    assert losses(run, 2) == pytest.approx(expected[:2], rel=1e-5)
    shutil.copytree(run, tmp_path / "pp2")
    found = losses(tmp_path / "pp2", STEPS, *LAYOUTS["pp2"], "resume=true", ranks=2)
    assert found == pytest.approx(expected, rel=1e-5)
    # What one layout has saved goes on in the next one.
    for name, steps in (("tp2", 4), ("pp2_vpp2", STEPS)):
        found = losses(run, steps, *LAYOUTS[name], "resume=true", ranks=2)
        assert found == pytest.approx(expected[:steps], rel=1e-5)
    assert len(set(expected)) == STEPS
