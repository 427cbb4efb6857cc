"""`LOOP MODEL DATASET OUT` on one or more ranks: the training loop of docs/trainers.md, and the weights after it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from harness import LoaderConfig
from harness.integrations import RankStream
from harness.integrations.torch import PackedDataset
from harness.schedule import ScheduleConfig


def main() -> None:
    loop, model, dataset, out = sys.argv[1:5]
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    names: dict[str, Any] = {}
    exec(Path(loop).read_text(), names)
    trained = AutoModelForCausalLM.from_pretrained(model)
    # 40 packs: the fourth step has one, which is rank 0's.
    stream = RankStream(
        dataset,
        LoaderConfig(global_batch_size=13, num_workers=0, block_packs=4),
        schedule=ScheduleConfig("as_packed", max_tokens_per_rank=256),
        dp_rank=rank,
        dp_size=ranks,
    )
    data = PackedDataset(stream, dialect="huggingface")
    names["train"](trained, data, torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9), 5)
    torch.save(trained.state_dict(), f"{out}.{rank}")


if __name__ == "__main__":
    main()
