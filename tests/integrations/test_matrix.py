"""The matrix of integrations, with trainers in environments of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trainers import HERE, Trainer

from tests.integrations.global_batches import compare_integrations

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
# Modules of Bridge are imported on a CPU with these in place, in every process that its Python starts.
STAND_INS = "import cuda_stand_ins\n\ncuda_stand_ins.install(after=cuda_stand_ins.MEGATRON_CORE)\n"


@pytest.mark.parametrize("name", ["torchtitan", "megatron_bridge"])
def test_a_trainer_reads_the_same_global_batches_before_and_after_a_resume_on_other_ranks(
    trainer: Callable[[str], Trainer], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    python = trainer(name).environment.python
    if name == "megatron_bridge":
        (tmp_path / "start").mkdir()
        (tmp_path / "start" / "sitecustomize.py").write_text(STAND_INS)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'start'}:{HERE}")
    # Eight steps of 12 packs: the fourth has the last 4 of an epoch of 40.
    results = list(compare_integrations({name: str(python)}, str(dataset / "train"), tmp_path, steps=8, timeout_s=400))

    assert [(result.status, result.reason) for result in results] == [("same", "")]
