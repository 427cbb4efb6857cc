"""Print the project's own frames from the command `harness train sft` to the call of the model.

python -m tests.samples.frames
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import traceback
from pathlib import Path

from harness.megatron import prepare_process

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(f"{ROOT / folder}/" for folder in ("harness", "recipes"))


class ModelCalledError(Exception):
    """Ends the run at its first call of the model."""


def main() -> None:
    prepare_process()
    from harness.recipes.parity import make_dataset
    from megatron.core.models.gpt import GPTModel

    from harness.cli import main as run_harness

    def forward(*_: object, **__: object) -> None:
        for frame in traceback.extract_stack():
            if frame.filename.startswith(OWN):
                print(f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno} {frame.name}")
        raise ModelCalledError

    GPTModel.forward = forward
    with tempfile.TemporaryDirectory() as folder:
        data = make_dataset(Path(folder) / "data") / "train"
        sys.argv = ["harness", "train", "sft", f"data.path={data}", f"run_dir={folder}/run", "trainer.steps=1"]
        sys.argv += ["trainer.eval_interval=0", "trainer.eval_batches=1", "loader.num_workers=0", "trainer.device=cpu"]
        with contextlib.suppress(ModelCalledError):
            run_harness()


if __name__ == "__main__":
    main()
