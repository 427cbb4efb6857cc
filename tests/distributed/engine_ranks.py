"""Checkpoints of PyTorch and Transformer Engine layers: -m tests.distributed.engine_ranks FOLDER TP FAMILY..."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from harness.megatron import prepare_process

prepare_process()

import torch  # noqa: E402
import transformer_engine.pytorch as engine  # noqa: E402

from harness.megatron.job import runtime  # noqa: E402
from harness.megatron.job.runtime import join  # noqa: E402
from harness.megatron.state.checkpoint import load_checkpoint  # noqa: E402
from harness.megatron.step import MegatronStep  # noqa: E402
from harness.plan import ModelConfig, ParallelConfig  # noqa: E402

from .checkpoint_ranks import forget, save, tensors_of  # noqa: E402

SIZES = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "max_sequence_length": 256}
SCANS: dict[str, int] = {
    "scan_num_heads": 8,
    "scan_head_dim": 8,
    "scan_state_dim": 16,
    "scan_num_groups": 2,
    "head_dim": 32,
}
MODELS = {
    "llama": ModelConfig(**SIZES, tie_embeddings=False),
    "qwen2": ModelConfig(**SIZES, family="qwen2"),
    "qwen3": ModelConfig(**SIZES, family="qwen3", head_dim=32),
    "qwen3_moe": ModelConfig(**SIZES, family="qwen3_moe", head_dim=32, num_experts=4, expert_ffn_hidden_size=32),
    "deepseek_v3": ModelConfig(
        **SIZES,
        family="deepseek_v3",
        num_experts=4,
        expert_ffn_hidden_size=32,
        dense_layers=1,
        kv_lora_rank=32,
        num_query_groups=4,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        router_score="sigmoid",
    ),
    "nemotron_h": ModelConfig(**SIZES, family="nemotron_h", layer_pattern="M*", **SCANS, tie_embeddings=False),
    "qwen3_5": ModelConfig(**SIZES, family="qwen3_5_text", layer_pattern="D*", **SCANS),
    "qwen3_next": ModelConfig(
        **SIZES,
        family="qwen3_next",
        layer_pattern="D*",
        **SCANS,
        num_experts=4,
        expert_ffn_hidden_size=32,
        shared_ffn_hidden_size=32,
    ),
}


def main(folder: Path, tp_size: int, families: list[str]) -> None:
    found: dict[str, Any] = {}
    with runtime.start("cpu") as job:
        parallel = ParallelConfig(
            tensor_parallel_size=tp_size, sequence_parallel=tp_size > 1, distributed_optimizer=True
        )
        layout = join(parallel, job.world_size)

        def make(model: ModelConfig, attention: str) -> MegatronStep:
            model = replace(model, attention=attention)
            # The layers of the wheel refuse to be made without a GPU.
            with mock.patch.object(torch.cuda, "is_available", return_value=attention != "torch"):
                step = MegatronStep(model, parallel, layout, device=job.device, vocab_size=300)
            for chunk in step.chunks:
                chunk.zero_grad_buffer()
            step.optimizer.step()
            return step

        for name in families:
            model = MODELS[name]
            ours, theirs = make(model, "torch"), make(model, "transformer_engine")
            torch.manual_seed(0)  # replicas of tensor-parallel ranks are equal
            for tensor in tensors_of(ours)[len(list(ours.chunks[0].parameters())) :]:
                tensor.copy_(torch.randn_like(tensor))
            path = save(folder / f"{name}-ours", ours)
            kept = [tensor.clone() for tensor in tensors_of(ours)]
            forget(theirs)
            load_checkpoint(path, theirs)
            forget(ours)
            load_checkpoint(save(folder / f"{name}-theirs", theirs), ours)
            modules = [module for chunk in theirs.chunks for module in chunk.modules()]
            parts = getattr(theirs.optimizer, "chained_optimizers", [theirs.optimizer])
            found[name] = {
                "attentions": sum(isinstance(module, engine.DotProductAttention) for module in modules),
                "forgotten": sum(int((tensor == -1).all()) for tensor in tensors_of(theirs)),
                "same": all(map(torch.equal, tensors_of(ours), kept)),
                "optimizer": " ".join({type(part.optimizer).__name__ for part in parts}),
            }
    if job.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
