"""`torchrun -m tests.distributed.megatron_lm_ranks OUT SETTINGS.json [ARGUMENTS...]`: Megatron-LM's pretrain, on a CPU.

The model is that of `recipes.sft` with the same settings; data, loop, optimizer and checkpoints are Megatron-LM's, with
the provider and the forward step of `harness.integrations.megatron_lm`. Every rank writes what it trained as
OUT.RANK.json: by step, the sums that Megatron reports and the rows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._dynamo

from harness.integrations.megatron_lm import datasets_provider, forward_step
from harness.loader import LoaderConfig
from harness.megatron.job import runtime
from harness.megatron.model.gpt import build_chunks
from harness.plan import ModelConfig, ParallelConfig
from tests.integrations.cuda_stand_ins import like_a_gpu

VOCAB = 300


class Recorder:
    """A forward step that notes what Megatron trains."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def __call__(self, data_iterator: Any, model: Any) -> Any:
        from megatron.training import get_args

        seen: dict[str, Any] = {"iteration": get_args().curr_iteration + 1, "training": model.training}
        if data_iterator is not None:
            data_iterator = Peeking(data_iterator, seen)
        output, loss = forward_step(data_iterator, model)
        self.lines.append(seen)

        def noted(values: torch.Tensor) -> Any:
            result = loss(values)
            seen["sums"] = result[2]["lm loss"].tolist()
            return result

        return output, noted


class Peeking:
    def __init__(self, inner: Any, seen: dict[str, Any]) -> None:
        self.inner, self.seen = inner, seen

    def __next__(self) -> Any:
        row = next(self.inner)
        self.seen["row"] = {name: np.asarray(value).tolist() for name, value in row.items()}
        return row


def main(out: str, settings: dict[str, Any], arguments: list[str]) -> None:
    model, parallel = ModelConfig(**settings["model"]), ParallelConfig(**settings["parallel"])
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks for it
    torch._dynamo.config.disable = True  # a compiler that sees `is_available` would look for a driver
    with runtime.start("cpu", timeout_s=120) as job, like_a_gpu():
        from megatron.core.enums import ModelType
        from megatron.training import pretrain
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        def model_provider(*_: Any, vp_stage: int | None = None, **__: Any) -> torch.nn.Module:
            return build_chunks(model, parallel, vocab_size=VOCAB, device=job.device)[vp_stage or 0]

        sys.argv = [sys.argv[0], *arguments]
        args = parse_and_validate_args()
        step = Recorder()
        provider = datasets_provider(loader=LoaderConfig(**settings["loader"]))
        container = pretrain_cfg_container_from_args(args)
        # The wheel has the helpers built, and no Makefile for them.
        built = mock.patch("megatron.core.datasets.utils.compile_helpers", return_value=None)
        try:
            with built:
                pretrain(container, provider, ModelType.encoder_or_decoder, step, model_provider=model_provider)
        finally:
            Path(f"{out}.{job.rank}.json").write_text(json.dumps(step.lines))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3:])
