"""`torchrun -m tests.distributed.isolation_ranks JOBS.json`: the isolation check with and without planted defects.

JOBS.json is a list of [port, name of a preset, which settings may follow]; a line of JSON a preset goes to the file
named by the second argument; the third is the device, cpu where it is left out.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.config import compose_config
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model.gpt import build_model
from harness.parity.isolation import IsolationCheck, sample_documents
from harness.plan.model import ModelConfig
from harness.plan.settings import SftConfig

from .forked import jobs_of
from .planted_defects import planted_defects

VOCAB = 256
MODEL = ModelConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=4, init_std=0.2
)


def check(name: str, out: Path, device: str) -> None:
    parallel = compose_config("sft", SftConfig, f"parallel={name}".split()).parallel
    with runtime.start(device, timeout_s=60) as job:
        layout = join(parallel, job.world_size)
        dtype = "float32" if job.device.type == "cpu" else "bfloat16"
        # A layer at least for each virtual stage: pp4_vpp2 has eight of them.
        stages = parallel.pipeline_parallel_size * (parallel.virtual_pipeline_parallel_size or 1)
        model = replace(MODEL, dtype=dtype, num_layers=max(MODEL.num_layers, stages))
        chunks = build_model(model, parallel, vocab_size=VOCAB, device=job.device)
        multiple = int(np.lcm(parallel.pad_to_multiple, 4))
        checker = IsolationCheck(
            chunks,
            sample_documents(VOCAB),
            parallel=parallel,
            layout=layout,
            device=job.device,
            pad_to_multiple=multiple,
            vocab_size=VOCAB,
        )
        found = {"": checker.run()}
        found |= {
            defect: checker.run(prepare) for defect, prepare in planted_defects(layout, parallel, multiple).items()
        }
    if job.rank == 0:
        with out.open("a") as file:
            file.write(json.dumps({"layout": name, "found": found}) + "\n")


if __name__ == "__main__":
    for (layout,) in jobs_of(sys.argv[1]):
        check(layout, Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "cpu")
