"""Continue pretraining on Megatron's indexed datasets (`.bin` and `.idx`), blended and split as in Megatron-Core.

    harness train pretrain data.path=data/corpus model.vocab_size=32000 parallel.ranks=2

Samples, their order and index files are the same as in Megatron-Core's GPTDataset and BlendedDataset. A blend may also
contain packed SFT datasets. Settings of model, trainer, optimizer and layout are the same as in `harness train sft`.
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
