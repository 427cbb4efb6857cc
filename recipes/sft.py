"""Fine-tune a Megatron-Core GPT on a packed dataset.

    torchrun --nproc-per-node 2 -m harness.recipes.sft trainer.steps=60 resume=auto

Every rank plans the same global batches from sequence lengths, reads its own sequences, and trains. The run's folder
gets config.yaml, metrics.jsonl, TensorBoard events, checkpoints, loss.png and report.md.
"""

from __future__ import annotations

from harness.config import hydra_entry
from harness.megatron import prepare_process
from harness.plan import SftConfig


def main(config: SftConfig) -> int:
    """Train; return the exit code, 75 if a signal ended the run before its last step."""
    prepare_process(config.parallel, shares_rows=config.shares_rows)
    from harness.megatron.run.fine_tuning import open_fine_tuning
    from harness.megatron.run.training import run_training

    return run_training(config, open_fine_tuning)


entry = hydra_entry("sft", SftConfig, main)

if __name__ == "__main__":
    entry()
