"""Continue pretraining on Megatron's own data: `.bin` and `.idx` pairs, blended and split as Megatron-Core does it.

    harness train pretrain data.path=data/corpus model.vocab_size=32000 parallel.ranks=2

Samples, their order and their index files are those of Megatron-Core's GPTDataset and BlendedDataset. Packed SFT
datasets may be sources too. Settings of the model, trainer, optimizer and layout are those of `harness train sft`.
"""

from __future__ import annotations

from harness.config import hydra_entry
from harness.megatron import prepare_process
from harness.plan import PretrainConfig


def main(config: PretrainConfig) -> int:
    """Train; return the exit code, 75 if a signal ended the run before its last step."""
    prepare_process(config.parallel)
    from harness.megatron.run.pretraining import open_pretraining
    from harness.megatron.run.training import run_training

    return run_training(config, open_pretraining)


entry = hydra_entry("pretrain", PretrainConfig, main)

if __name__ == "__main__":
    entry()
