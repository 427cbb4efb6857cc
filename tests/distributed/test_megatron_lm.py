"""Megatron-LM's own `pretrain` trains packed data as `recipes.sft` does, and resumes on another number of ranks."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from small_packs import VOCAB

from harness.config import compose_config
from harness.plan import SftConfig
from harness.thd import ThdBatch
from harness.train.digests import StepDigests, read_digests
from tests.integrations.probes import content_digest

from .conftest import SMALL, Run, launcher, run_command

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.training") is None,
        reason="needs megatron.training, which megatron-core 0.19 has (make test-versions)",
    ),
    pytest.mark.timeout(900),
]

MODEL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
MODEL |= {"max_sequence_length": 256, "vocab_size": VOCAB, "dtype": "float32"}
LOADER = {"block_packs": 4, "seed": 5, "num_workers": 1}
ARGUMENTS = {"hidden-size": 32, "ffn-hidden-size": 64, "num-attention-heads": 4, "seq-length": 256}
ARGUMENTS |= {"max-position-embeddings": 256, "micro-batch-size": 1, "global-batch-size": 6, "train-iters": 9}
ARGUMENTS |= {"dataloader-type": "external", "tokenizer-type": "NullTokenizer", "vocab-size": VOCAB}
ARGUMENTS |= {"lr": 1e-2, "min-lr": 1e-3, "lr-decay-style": "cosine", "lr-warmup-iters": 2, "lr-decay-iters": 10}
ARGUMENTS |= {"weight-decay": 0.01, "adam-beta1": 0.9, "adam-beta2": 0.95, "adam-eps": 1e-8, "clip-grad": 1.0}
ARGUMENTS |= {"eval-iters": 0, "eval-interval": 1000, "log-interval": 1, "distributed-backend": "gloo"}
ARGUMENTS |= {"transformer-impl": "local", "ckpt-format": "torch_dist"}
FLAGS = ("--calculate-per-token-loss", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion")


def overrides(group: str, settings: dict[str, Any]) -> list[str]:
    return [f"{group}.{name}={value}" for name, value in settings.items()]


@pytest.fixture
def pretrain(dataset: Path, tmp_path: Path) -> Callable[..., dict[int, dict[str, Any]]]:
    """pretrain(name, ranks=1, **arguments): the loss, trained tokens and data of every step."""

    def run(
        name: str,
        *flags: str,
        ranks: int = 1,
        parallel: dict[str, Any] | None = None,
        num_layers: int = 2,
        experts: dict[str, Any] | None = None,
        **arguments: object,
    ) -> Any:
        settings = tmp_path / f"{name}.settings.json"
        shape = {**MODEL, "num_layers": num_layers, **(experts or {})}
        model = asdict(compose_config("sft", SftConfig, [*SMALL, *overrides("model", shape)]).model)
        settings.write_text(json.dumps({"model": model, "parallel": parallel or {}, "loader": LOADER}))
        named = {**ARGUMENTS, "num-layers": num_layers, "data-path": dataset / "train", **arguments}
        listed = [text for key, value in named.items() for text in (f"--{key.replace('_', '-')}", str(value))]
        program = [*launcher(ranks), "tests.distributed.megatron_lm_ranks", str(tmp_path / name), str(settings)]
        code, output = run_command([*program, *listed, *FLAGS, *flags])
        assert code == 0, output
        return steps_of([json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for rank in range(ranks)])

    return run


def steps_of(ranks: list[list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    lines = [line for rank in ranks for line in rank if line["training"]]
    steps: dict[int, dict[str, Any]] = {}
    for number in sorted({line["iteration"] for line in lines}):
        mine = [line for line in lines if line["iteration"] == number]
        total, tokens = np.sum([line["sums"] for line in mine if "sums" in line], axis=0)
        rows = [thd(line["row"]) for line in mine if "row" in line]
        steps[number] = {"loss": total / tokens, "tokens": int(tokens), "digest": content_digest(rows)}
    return steps


def thd(row: dict[str, Any]) -> ThdBatch:
    kinds = {"loss_mask": np.float32, "padding_mask": np.bool_}
    fields = {
        name: np.asarray(row[name], kinds.get(name, np.int64)).reshape(-1)
        for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask")
    }
    bounds = {name: np.asarray(row[name], np.int32) for name in ("cu_seqlens", "cu_seqlens_padded")}
    return ThdBatch(**fields, **bounds, max_seqlen=row["max_seqlen"])


@pytest.fixture
def recipe(sft: Callable[..., Run], tmp_path: Path) -> dict[int, dict[str, Any]]:
    """Return what `recipes.sft` trains with the same settings."""
    optimizer = {"lr": 1e-2, "min_lr_ratio": 0.1, "warmup_steps": 2, "decay_steps": 10, "weight_decay": 0.01}
    optimizer |= {"beta2": 0.95, "clip_grad": 1.0}
    groups = {"model": MODEL, "loader": LOADER, "optimizer": optimizer}
    settings = [text for group, values in groups.items() for text in overrides(group, values)]
    more = ("schedule=as_packed", "trainer.steps=9", "trainer.record_digests=true")
    run = sft(tmp_path / "recipe", *settings, *more)
    assert run.code == 0, run.output
    steps = zip(run.metrics, read_digests(tmp_path / "recipe"), strict=True)
    return {
        line["step"]: {"loss": line["loss"], "tokens": line["trained_tokens"], "digest": digest_of(digests)}
        for line, digests in steps
    }


def digest_of(step: StepDigests) -> str:
    """The digest of the step's sequences without their ids, as `content_digest` makes it of rows."""
    table = np.concatenate([np.column_stack([row.lengths.astype(np.uint64), row.digests]) for row in step.rows])
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(table[np.lexsort(table.T[::-1])], dtype="<u8").tobytes())


def assert_same(got: dict[int, dict[str, Any]], recipe: dict[int, dict[str, Any]], steps: range) -> None:
    assert list(got) == list(steps)
    for step in steps:
        assert got[step]["digest"] == recipe[step]["digest"], step
        assert got[step]["tokens"] == recipe[step]["tokens"], step
        assert got[step]["loss"] == pytest.approx(recipe[step]["loss"], rel=1e-5), step


def test_pretrain_trains_the_data_of_the_recipe_and_resumes_on_more_and_on_fewer_ranks(pretrain, recipe, tmp_path):
    """Seven steps of six packs are an epoch of forty: the last is ragged, and the second part begins before it."""
    kept, checkpoints = {}, tmp_path / "checkpoints"
    for ranks, first, last in ((1, 1, 3), (2, 4, 7), (1, 8, 9)):
        save = {"save": checkpoints, "save_interval": last, "exit_interval": last}
        found = pretrain(f"to {last}", ranks=ranks, **save, **kept)
        assert_same(found, recipe, range(first, last + 1))
        kept = {"load": checkpoints}


TENSOR, CONTEXT = {"tensor_parallel_size": 2, "sequence_parallel": True}, {"context_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2, "static_rows": True}
# So strong that padding which routers count as tokens changes the losses by more than rounding.
EXPERTS = {"num_experts": 4, "expert_ffn_hidden_size": 48, "aux_loss": 50.0}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("parallel", "flags", "experts"),
    [
        (TENSOR, ["--sequence-parallel"], {}),
        (CONTEXT, [], {}),
        (PIPELINE, [], {}),
        ({**PIPELINE, "virtual_pipeline_parallel_size": 2}, [], {}),
        (CONTEXT, [], EXPERTS),
        (PIPELINE, [], EXPERTS),
    ],
    ids=["tensor", "context", "pipeline", "virtual pipeline", "context, experts", "pipeline, experts"],
)
def test_a_model_on_two_ranks_trains_as_on_one(pretrain, parallel, flags, experts, tmp_path) -> None:
    # From one checkpoint: layouts draw other random weights from one seed.
    model = {"num_layers": 4, "experts": experts}
    pretrain("first", **model, save=tmp_path / "saved", save_interval=3, exit_interval=3)
    alone = pretrain("alone", **model, load=tmp_path / "saved")
    sizes = {
        f"{name.removesuffix('_parallel_size')}_model_parallel_size": size
        for name, size in parallel.items()
        if name in ("tensor_parallel_size", "pipeline_parallel_size")
    }
    if "context_parallel_size" in parallel:
        sizes["context_parallel_size"] = 2
    if "virtual_pipeline_parallel_size" in parallel:
        sizes["num_virtual_stages_per_pipeline_rank"] = 2
    shared = pretrain("shared", *flags, **model, ranks=2, parallel=parallel, load=tmp_path / "saved", **sizes)
    assert list(shared) == list(alone)
    assert [shared[step]["loss"] for step in alone] == pytest.approx([alone[step]["loss"] for step in alone], rel=1e-5)
