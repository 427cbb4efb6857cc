"""`torchrun -m tests.distributed.isolation_ranks JOBS.json`: the isolation check with and without planted defects.

JOBS.json is a list of [port, name of a preset, which settings may follow]; a line of JSON a preset goes to the file
named by the second argument; the third is the device, cpu where it is left out.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from harness.config import compose_config
from harness.megatron.job import runtime
from harness.parity.isolation import IsolationCheck
from harness.plan.model import ModelConfig
from harness.plan.settings import SftConfig

from .forked import jobs_of
from .planted_defects import planted_defects

MODEL = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=4)


def check(name: str, out: Path, device: str) -> None:
    parallel = compose_config("sft", SftConfig, f"parallel={name}".split()).parallel
    with runtime.start(device, timeout_s=60) as job:
        dtype = "float32" if job.device.type == "cpu" else "bfloat16"
        # A layer at least for each virtual stage: pp4_vpp2 has eight of them.
        stages = parallel.pipeline_parallel_size * (parallel.virtual_pipeline_parallel_size or 1)
        model = replace(MODEL, dtype=dtype, num_layers=max(MODEL.num_layers, stages))
        checker = IsolationCheck(SftConfig(model=model, parallel=parallel), job)
        defects = planted_defects(checker.layout, parallel, checker.pad_to_multiple)
        found = {"": checker.run(), **{defect: checker.run(prepare) for defect, prepare in defects.items()}}
    if job.rank == 0:
        with out.open("a") as file:
            file.write(json.dumps({"layout": name, "found": found}) + "\n")


if __name__ == "__main__":
    for (layout,) in jobs_of(sys.argv[1]):
        check(layout, Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "cpu")
