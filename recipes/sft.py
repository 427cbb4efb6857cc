"""Fine-tune a model on packed datasets.

    harness train sft data.path=data/chats model.init_from=Qwen/Qwen3-0.6B resume=auto
    torchrun --nproc-per-node 2 -m harness.recipes.sft trainer.steps=60 resume=auto

The settings that most runs change:
  data.path=data/chats            folder of `harness prepare`; data.blend trains on several
  model.init_from=FOLDER_OR_ID    pretrained weights; the default is a small model with random weights
  model.lora_rank=16              train LoRA adapters instead of all weights
  trainer.epochs=2                or trainer.steps; the default with pretrained weights is one epoch
  optimizer.lr=1e-5               the default depends on the kind of training
  loader.global_batch_size=64     packs per step, over all ranks
  parallel.ranks=8                processes on this machine
  parallel.tensor_parallel_size=2 ranks that share each layer; `harness plan auto` finds a layout
  run_dir=runs/mine resume=auto   folder of the run; continue it if it exists

The run's folder receives config.yaml, metrics.jsonl, TensorBoard events, checkpoints, loss.png and report.md.
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
