"""`torchrun -m tests.distributed.drift_ranks RUNS.json`: runs of `recipes.sft`, one of whose ranks drifts after step 2.

RUNS.json is a list of [port, end of a parameter's name, overrides]; each rank writes its error next to the folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from harness.config import compose_config
from harness.errors import HarnessError
from harness.megatron import prepare_process
from harness.plan import SftConfig
from recipes import sft

from .forked import jobs_of

if __name__ == "__main__":
    prepare_process()
    from harness.megatron.step import MegatronStep

    check = MegatronStep.check_drift

    for end, overrides in jobs_of(sys.argv[1]):
        config = compose_config("sft", SftConfig, overrides)

        def drifted(step: Any, number: int, end: str = end) -> None:
            if number == 2 and os.environ["RANK"] == "1":
                named = [pair for chunk in step.chunks for pair in chunk.module.named_parameters()]
                values = next(values.data for name, values in named if name.endswith(end)).view(-1)
                values[-1] = torch.nextafter(values[-1], torch.tensor(9.0))
            check(step, number)

        with mock.patch.object(MegatronStep, "check_drift", drifted):
            try:
                sft.main(config)
            except HarnessError as error:
                Path(f"{config.run_dir}-{os.environ['RANK']}.txt").write_text(str(error))
