"""Read packed files with Megatron-Bridge's own registry, builder and reader; run by the Python of its environment.

    bridge_reader.py SETTINGS.json

Writes every sample, and the same sample as a batch of one, as JSON. In a root without packed files, Bridge packs its
own first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cuda_stand_ins

cuda_stand_ins.install(after=cuda_stand_ins.MEGATRON_CORE)

from megatron.bridge.data.builders import GPTSFTDatasetConfig  # noqa: F401
from megatron.bridge.data.packing import PackedSequenceSpecs  # noqa: F401
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=299))
    type(tokenizer).eos_id, type(tokenizer).space_sensitive = 299, False  # as tokenizers of Hugging Face have them
    config = eval(settings["settings"])  # the text that a recipe is given
    dataset = get_dataset_provider(config)([0, 0, 0], config, tokenizer)[0]
    samples: list[dict[str, Any]] = []
    for index in range(len(dataset)):
        sample = dataset[index]
        batch = dataset.collate_fn([sample])
        samples.append(
            {
                **{name: list(map(int, sample[name])) for name in ("input_ids", "loss_mask", "seq_boundaries")},
                **{name: batch[name][0].tolist() for name in ("tokens", "labels", "cu_seqlens_q")},
                "mask": batch["loss_mask"][0].tolist(),
            }
        )
    Path(settings["out"]).write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
