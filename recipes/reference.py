"""Train the conversations of a run of `recipes.sft` unpacked, by a plain model of transformers and PyTorch's AdamW.

    python -m harness.recipes.reference model.init_from=DIR run_dir=runs/plain trainer.device=cpu

Settings are those of `recipes.sft`, on one CPU rank; its folder gets config.yaml, metrics.jsonl and digests.jsonl.
`python -m harness.recipes.parity check=reference` compares runs of every model family with it.
"""

from __future__ import annotations

from harness.config import hydra_entry
from harness.plan import SftConfig


def main(config: SftConfig) -> int:
    from harness.parity.reference import train_reference

    return train_reference(config)


if __name__ == "__main__":
    hydra_entry("sft", SftConfig, main)()
