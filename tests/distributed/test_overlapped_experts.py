"""Passes that are combined while tokens travel to experts train as passes one after another, and are combined.

As a program on ranks, `FOLDER`: experts on two ranks train both ways, as a CPU does and with weights and gradients
exchanged behind layers as on GPUs; each rank writes what its steps report, and how many passes met.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from layout_space import accepted
from megatron.core import parallel_state
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan

from harness.errors import ConfigError
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model import gpt
from harness.megatron.step import MegatronStep
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch

from .conftest import found_by, run_ranks
from .test_layouts_agree import differing, plant_fault, train_all

LAYERS, ROWS = 3, 4
MODEL = ModelConfig(
    family="deepseek_v3",
    num_layers=LAYERS,
    hidden_size=32,
    ffn_hidden_size=64,
    dense_layers=1,
    num_attention_heads=2,
    num_query_groups=2,
    kv_lora_rank=16,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_hidden_size=32,
    shared_ffn_hidden_size=32,
    router_score="sigmoid",
    expert_bias=True,
    expert_bias_rate=0.01,
    aux_loss=0.1,
    z_loss=0.01,
)


def test_combined_passes_report_what_passes_one_after_another_do(tmp_path) -> None:
    run_ranks(2, "test_overlapped_experts", tmp_path)
    for found in found_by(tmp_path):
        for name in ("at once", "behind"):
            plain, combined = found[f"{name} False"], found[f"{name} True"]
            assert plain["met"] == 0
            # In each of two steps, every layer of a row but the first with one of the row before it.
            assert combined["met"] == 2 * (ROWS - 1) * LAYERS
            assert {"web", "code"} == set(combined["steps"][0]["source_expert_loads"])
            assert combined["steps"][0]["experts"]["shared_tokens"] > 0
            for one, other in zip(plain["steps"], combined["steps"], strict=True):
                assert flat(other) == pytest.approx(flat(one), rel=1e-6)
            assert combined["validated"] == pytest.approx(plain["validated"], rel=1e-6)


# The module and the code of a fault, and how it shows.
FAULTS = {
    "padding is routed": (
        "harness.megatron.model.router",
        """
def plant(module):
    right = module.Router.routing

    def without_row(router, logits, padding_mask=None, **options):
        router.row = None
        return right(router, logits, padding_mask, **options)

    module.Router.routing = without_row
""",
        r"routed_tokens|loss|gradient",
    ),
    "the gradient of what passes by the experts is lost": (
        "megatron.core.pipeline_parallel.utils",
        """
def plant(module):
    right = module.ScheduleNode.default_backward_func

    def of_outputs(node, outputs, grads):
        number = len(node.output) if isinstance(node.output, tuple) else 1
        return right(node, outputs[:number], grads[:number])

    module.ScheduleNode.default_backward_func = of_outputs
""",
        r"grad_norm|gradient",
    ),
}


@pytest.mark.submission
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_combined_passes_is_seen(name, tmp_path) -> None:
    *fault, shows = FAULTS[name]
    chosen = next(one for one in accepted(["qwen3_moe combined"], [2]) if one.parallel["context_parallel_size"] == 2)
    wrong = differing(train_all([chosen], tmp_path, plant_fault(tmp_path / "plant", *fault)))
    assert re.search(shows, "\n".join(wrong)), wrong


def flat(step: dict[str, Any]) -> dict[str, float]:
    inner = {f"{name}.{key}": one for name, of in step.items() if isinstance(of, dict) for key, one in of.items()}
    return inner | {name: one for name, one in step.items() if isinstance(one, int | float)}


def row_of(step: int, rank: int, number: int) -> ThdBatch:
    made = np.random.default_rng([step, rank, number])
    ids = [made.integers(0, 100, length).astype(np.int32) for length in made.integers(5, 25, 2)]
    views = [SequenceView(one, np.r_[np.ones(len(one) - 1, np.uint8), [0]]) for one in ids]
    # Padding within the row and at its end.
    return replace(build_thd_batch(views, pad_to_multiple=8), sources=np.array([number % 2, 1], np.int32))


def main(folder: Path) -> None:
    right, met = TransformerLayerSchedulePlan.run, []

    def counted(f_layer: Any, b_layer: Any, **options: Any) -> Any:
        met.append(f_layer is not None and b_layer is not None)
        return right(f_layer, b_layer, **options)

    found = {}
    with runtime.start("cpu") as job, mock.patch.object(TransformerLayerSchedulePlan, "run", counted):
        for name, combines in ((name, combines) for name in ("at once", "behind") for combines in (False, True)):
            parallel_state.destroy_model_parallel()
            parallel = ParallelConfig(expert_parallel_size=2, distributed_optimizer=True, overlap_experts=combines)
            layout = join(parallel, job.world_size)
            optimizer = OptimizerConfig(lr=0.01, min_lr_ratio=1, warmup_steps=0)
            with mock.patch.object(gpt.compat, "has_streams", return_value=name == "behind"):
                step = MegatronStep(MODEL, parallel, layout, device=job.device, vocab_size=128, optimizer=optimizer)
            step.sources = SimpleNamespace(names=("web", "code"))  # type: ignore[assignment]
            met.clear()
            rows = [[row_of(number, job.rank, one) for one in range(ROWS)] for number in range(3)]
            steps = [asdict(step.train(rows[0])), asdict(step.train(rows[1]))]
            last = SimpleNamespace(rows=[replace(row, sources=None) for row in rows[2]])
            validated = step.evaluate([last]).loss  # type: ignore[list-item]
            found[f"{name} {combines}"] = {"steps": steps, "met": sum(met), "validated": validated}
            if combines:
                delays = replace(parallel, delay_weight_gradients=True)
                with pytest.raises(ConfigError, match="delay_weight_gradients is true, but layers use PyTorch"):
                    MegatronStep(MODEL, delays, layout, device=job.device, vocab_size=128, optimizer=optimizer)
    (folder / f"rank-{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
