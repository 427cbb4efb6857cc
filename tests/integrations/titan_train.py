"""Train with torchtitan's own `Trainer` on CPUs; run by the Python of torchtitan's environment under torchrun.

    torchrun titan_train.py SETTINGS.json

Every rank writes what its model received and the loss of each step into the folder `out` of the settings.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_stand_ins
import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_mask
from torchtitan.tools import utils

cuda_stand_ins.install("triton", after=["torch._inductor.compile_fx"])

# Before modules take them from there: torchtitan has no device that is a CPU.
utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    synchronize=lambda: None,
    get_device_name=lambda device=None: "CPU",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 30, name="CPU"),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device=None: {},
)

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as distributed
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from harness.integrations.torchtitan import HarnessDataLoader


class NoTokenizer(BaseTokenizer):
    """Stands where torchtitan wants a tokenizer: the dataset has tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


def attend_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **named: Any
) -> tuple[torch.Tensor, None]:
    """Attend under torchtitan's own mask; FlexAttention has no backward on a CPU."""
    length = query.shape[2]
    mask = create_mask(named["block_mask"].mask_mod, query.shape[0], 1, length, length, device="cpu")
    return functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=named["enable_gqa"]), None


def small(settings: dict[str, Any]) -> Trainer.Config:
    model = model_registry("debugmodel")
    model = replace(model, model=replace(model.model, layers=model.model.layers[:2]))
    return Trainer.Config(
        model_spec=model,
        dump_folder=settings["dump_folder"],
        tokenizer=NoTokenizer.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1, total_steps=10),
        training=TrainingConfig(
            seq_len=settings["seq_len"],
            local_batch_size=settings["local_batch_size"],
            global_batch_size=settings["global_batch_size"],
            steps=settings["steps"],
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", data_parallel_replicate_degree=int(os.environ["WORLD_SIZE"])
        ),
        dataloader=HarnessDataLoader.Config(**settings["dataloader"]),
        validator=Validator.Config(**settings["validator"], dataloader=HarnessDataLoader.Config(**settings["valid"]))
        if "validator" in settings
        else Validator.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=settings["save_interval"], last_save_model_only=False
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=1),
    )


def use_cpu() -> None:
    """Replace what torchtitan has for GPUs alone; the devices are replaced by the import of this module."""
    torch.compiler.set_stance("force_eager")
    FlexAttention.compiled_flex_attn = staticmethod(attend_on_cpu)
    distributed.set_pg_timeouts = lambda **_: None  # of a later PyTorch


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    use_cpu()
    trainer = Trainer(small(settings))
    rows: list[dict[str, np.ndarray[Any, Any]]] = []
    steps: list[dict[str, float]] = []
    given = trainer.post_dataloading_process
    logged = trainer.metrics_processor.log

    def keep(inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> Any:
        rows.append({"labels": labels.numpy(), **{name: value.numpy() for name, value in inputs.items()}})
        return given(inputs, labels)

    def log(step: int, loss: float, *others: Any, **named: Any) -> None:
        steps.append({"step": step, "loss": loss})
        logged(step, loss, *others, **named)

    trainer.post_dataloading_process = keep
    trainer.metrics_processor.log = log
    trainer.train()
    rank = torch.distributed.get_rank()
    trainer.close()
    torch.distributed.destroy_process_group()
    out = Path(settings["out"])
    np.savez(
        out / f"rank{rank}.npz",
        **{f"{number}.{name}": value for number, row in enumerate(rows) for name, value in row.items()},
    )
    (out / f"rank{rank}.json").write_text(json.dumps({"steps": steps, "num_rows": len(rows)}))


if __name__ == "__main__":
    main()
