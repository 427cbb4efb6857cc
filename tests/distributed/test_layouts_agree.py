"""Every layout that the settings accept trains as one rank does, or it is refused with the arithmetic.

As a program on ranks, `LAYOUTS`: a pickled list of a layout's name, its kind of model and its settings, in a folder
with a dataset, `data`. Each trains two steps from the weights of its kind's reference, which the first run of the kind
on one rank draws, and adds a line of JSON beside the list: the largest differences from the reference on any rank, and
where they are.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import pickle
import random
import re
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from layout_space import (
    AVERAGED,
    COMBINED,
    KINDS,
    LATER,
    MEDIA,
    NUM_PACKS,
    OTHER_VALUES,
    RANKS,
    SEQUENCES,
    SHARED,
    Layout,
    accepted,
    an_eighth,
    config_of,
    drawn,
    layouts_of,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from parity_reports import read_report
from small_packs import write_small_packs
from torch.distributed import PrefixStore

from harness.checks import CHOICES
from harness.formats import open_dataset
from harness.loader import Loader, RankLayout, RunData
from harness.megatron import prepare_process
from harness.megatron.data.feed import Feed, readable
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.state import checkpoint
from harness.megatron.state.loading import sharded_weights
from harness.megatron.step import MegatronStep
from harness.parity.made_data import make_dataset
from harness.parity.result import REPORT_FILE
from harness.plan import ParallelConfig, SftConfig
from tests.samples.warm_python import warm_python

from .conftest import ROOT, forked, run_command

# Largest differences from one rank, relative to what is compared; a gradient also to the norm of the whole gradient.
# Sums in another order give up to 4e-7 of that, and more of a small norm of numbers that cancel.
TOLERANCES = {"step": 1e-6, "gradient": 1e-6, "own": 1e-5}


# Put where Python looks for it: a fault is planted in a module when it is imported.
PLANTED = """
import importlib.util
import sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "{module}":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), plant(module))
        return spec

{plant}
sys.meta_path.insert(0, Finder())
"""
# A rank divides its gradients by its own trained tokens, and ranks are averaged.
OWN_TOKENS = """
def plant(module):
    finalize = module.finalize_model_grads

    def divide_by_own(chunks, tokens, **options):
        for chunk in chunks:
            chunk.scale_gradients(1.0 / int(tokens))
        finalize(chunks, tokens * 0 + 1, **options)

    module.finalize_model_grads = divide_by_own
"""
# Faults of rows that data-parallel ranks share: the module, the code, and how it shows here and in `check=context`.
OF_SHARED_ROWS = {
    "rotary angles of the layout's ranks": (
        "harness.megatron.compat",
        """
def plant(module):
    right = module.packed_seq_params

    def as_on_one_rank(*, positions, cp_group=None, **options):
        if cp_group is not None and cp_group.size() > 1:
            positions = module.torch.arange(len(positions))
        return right(positions=positions, cp_group=cp_group, **options)

    module.packed_seq_params = as_on_one_rank
""",
        *(2 * [r"loss|grad_norm"]),
    ),
    "chunks in the order of half as many ranks": (
        "harness.megatron.batch",
        """
def plant(module):
    right = module.context_parallel_indices

    def as_of_half(bounds, *, cp_size, cp_rank):
        return right(bounds, cp_size=cp_size // 2, cp_rank=cp_rank // 2).reshape(2, -1)[cp_rank % 2]

    module.context_parallel_indices = as_of_half
""",
        *(2 * [r"loss|grad_norm"]),
    ),
    "losses scaled by the layout's ranks": (
        "harness.megatron.step",
        """
def plant(module):
    right = module.MegatronStep.copy_row

    def scaled(self, row, **options):
        made = right(self, row, **options)
        return module.replace(made, loss_mask=made.loss_mask * self.layout.cp_size / row.shared_by)

    module.MegatronStep.copy_row = scaled
""",
        *(2 * [r"loss|grad_norm"]),
    ),
    "a row counted by each of its ranks": (
        "harness.megatron.batch",
        """
def plant(module):
    right = module.to_device

    def counted(row, device, **options):
        made = right(row, device, **options)
        return module.replace(made, divisor=right(row, device).divisor)

    module.to_device = counted
""",
        *(2 * [r"loss|grad_norm"]),
    ),
    "a stage that takes a row for its own": (
        "harness.megatron.step",
        """
def plant(module):
    right = module.MegatronStep.train

    def alone(self, batch):
        if not self.layout.is_first_stage:
            batch = module.replace(batch, rows=[module.replace(row, shared_by=1) for row in batch.rows])
        return right(self, batch)

    module.MegatronStep.train = alone
""",
        r"rank \d",
        r"a row has 80 tokens and cannot be padded to 44",
    ),
    "a microbatch that a stage skips": (
        "harness.megatron.step",
        """
def plant(module):
    right = module.MegatronStep.train

    def without_the_first(self, batch):
        if not self.layout.is_first_stage:
            batch = module.replace(batch, rows=batch.rows[1:])
        return right(self, batch)

    module.MegatronStep.train = without_the_first
""",
        r"rank \d",
        r"no progress for 60 s in step \d",
    ),
}
# Faults of media, on two ranks: sizes of the layout, the module, the code, and how it shows.
OF_MEDIA = {
    "features of the neighbor": (
        {"context_parallel_size": 2},
        "harness.megatron.batch",
        """
def plant(module):
    right = module.MediaTensors
    module.MediaTensors = lambda arrays, features, **rest: right(arrays, features=features.flip(0), **rest)
""",
        r"step differs",
    ),
    "one placeholder too few": (
        {},
        "harness.loader.plan",
        """
def plant(module):
    right = module.row_media

    def short(*values):
        made = right(*values)
        return None if made is None else module.replace(made, tokens=made.tokens - 1)

    module.row_media = short
""",
        r"LoaderError: the encoder returns \d+ features for \d+ placeholder tokens",
    ),
    "gradient of the encoder summed twice over tensor-parallel ranks": (
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        "harness.megatron.model.gpt",
        """
def plant(module):
    finalize = module.finalize_with_experts

    def summed(chunks, *values, **options):
        for name, parameter in chunks[0].named_parameters():
            if ".encoder." in name and parameter.requires_grad:
                parameter.main_grad *= 2
        finalize(chunks, *values, **options)

    module.finalize_with_experts = summed
""",
        r"encoder\.audio_tower",
    ),
    "mrope positions not reset": (
        {},
        "harness.thd",
        """
def plant(module):
    right = module.RowMedia.positions

    def not_reset(self, position_ids, cu_seqlens_padded):
        # Of height and width: where all three count on, attention sees the same distances.
        found = right(self, position_ids, cu_seqlens_padded)
        found[1:] = (found[1:] + module.np.arange(len(position_ids)) - position_ids) % (1 + position_ids.max())
        return found

    module.RowMedia.positions = not_reset
""",
        r"loss|grad_norm",
    ),
    "mrope positions lost on a later stage": (
        {"pipeline_parallel_size": 2},
        "harness.prep.media.rules",
        """
def plant(module):
    module.MediaRules.grids = lambda self, media: {}
""",
        r"loss|grad_norm",
    ),
}
OF_MEDIA |= {f"features of the neighbor, {of}": OF_MEDIA["features of the neighbor"] for of in ("mrope", "deep")}
# Faults of layers with a scan, on two ranks or four stages: sizes of the layout, the module, and the code.
OF_SCANS = {
    "state carried over a boundary": (
        {},
        "harness.megatron.model.scan_reference",
        """
def plant(module):
    right = module.ChunkedRow.of
    module.ChunkedRow.of = lambda lengths, slots: right(lengths.sum().reshape(1), slots)
""",
    ),
    "convolution window crosses a boundary": (
        {},
        "harness.megatron.model.scan_reference",
        """
def plant(module):
    right = module.convolve
    module.convolve = lambda x, *values: right(x, *values[:-1], module.document_lengths(x.shape, None))
""",
    ),
    # The third of four stages, which has a scan.
    "seq_idx lost on a middle stage": (
        {"pipeline_parallel_size": 4},
        "harness.megatron.compat",
        """
def plant(module):
    right = module.PackedRow.scan_order

    def lost(self, cp_size):
        bounds, owners, order = right(self, cp_size)
        if module.torch.distributed.get_rank() != 2:
            return bounds, owners, order
        return bounds[[0, -1]], owners * 0, order

    module.PackedRow.scan_order = lost
""",
    ),
    # Documents end to end, as if each had no padding, and all padding after the last one: it moves every boundary of a
    # row in which documents are padded. After the last one alone, padding changes nothing that is trained.
    "padding continues the last document": (
        {"context_parallel_size": 2},
        "harness.megatron.compat",
        """
def plant(module):
    right, torch = module.PackedRow.scan_order, module.torch

    def continued(self, cp_size):
        _, owners, order = right(self, cp_size)
        lengths = self.cu_seqlens_q.long().diff()
        lengths = lengths[lengths > 0]
        lengths[-1] += owners.numel() - lengths.sum()
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return bounds, torch.repeat_interleave(lengths).to(owners.dtype)[None], order

    module.PackedRow.scan_order = continued
""",
    ),
    # Ranks scan all tokens for some heads, so no state is handed on: it is as if the scan began anew in each slice.
    "state not handed to the next CP rank": (
        {"context_parallel_size": 2},
        "harness.megatron.compat",
        """
def plant(module):
    right, torch = module.PackedRow.scan_order, module.torch

    def anew(self, cp_size):
        bounds, owners, order = right(self, cp_size)
        if order is None:
            return bounds, owners, order
        ranks = order // len(self.positions)
        begins = torch.ones_like(ranks, dtype=torch.bool)
        begins[1:] = (owners[0].diff() != 0) | (ranks.diff() != 0)
        starts = torch.cat([begins.nonzero().flatten(), bounds[-1:]])
        return starts, (begins.cumsum(0) - 1).to(owners.dtype)[None], order

    module.PackedRow.scan_order = anew
""",
    ),
    "tokens scanned in the order of attention": (
        {"context_parallel_size": 2},
        "harness.megatron.compat",
        """
def plant(module):
    right = module.PackedRow.scan_order

    def as_sliced(self, cp_size):
        bounds, owners, order = right(self, cp_size)
        return bounds, owners, None if order is None else order.sort().values

    module.PackedRow.scan_order = as_sliced
""",
    ),
}


def plant_fault(folder: Path, module: str, code: str) -> str:
    """Return the PYTHONPATH with which every process has the fault."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PLANTED.format(module=module, plant=code))
    return f"PYTHONPATH={ROOT}:{folder}"


def train_all(layouts: list[Layout], place: Path, fault: str = "") -> list[dict[str, Any]]:
    """Train layouts one after another; return the results.

    Layouts of several ranks are trained with `fault`, an environment variable.
    """
    write_small_packs(place / "data", num_packs=NUM_PACKS)
    write_small_packs(place / "data" / "weighted", num_packs=NUM_PACKS, is_weighted=True)
    for kind in {kind for layout in layouts for kind in layout.kind.split()} & set(MEDIA):
        encoder = config_of(kind).model.encoder
        make_dataset(place / "data" / kind, num_packs=NUM_PACKS, encoder=encoder)
    results = []
    # One rank first, of every kind, as the reference of the others.
    first = [next(layouts_of(kind)) for kind in dict.fromkeys(layout.kind for layout in layouts)]
    for ranks in RANKS:
        wanted = [*first * (ranks == 1), *(one for one in layouts if one.ranks == ranks and one not in first)]
        if not wanted:
            continue
        file = place / f"{ranks}.pkl"
        file.write_bytes(pickle.dumps([(str(layout), layout.kind, layout.config) for layout in wanted]))
        planted = ["env", fault] if fault and ranks > 1 else []
        start = [*planted, *forked(ranks), "tests.distributed.test_layouts_agree"]
        code, output = run_command([*start, str(file)], timeout_s=7000)
        assert code == 0, output
        lines = file.with_suffix(".jsonl").read_text().splitlines()
        assert len(lines) == len(wanted), output
        results += map(json.loads, lines)
    return results


def differing(results: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong, by layout: an error, or where it differs from one rank."""
    wrong = [f"{one['layout']}: {one['error']}" for one in results if "error" in one]
    for one in results:
        for kind, tolerance in TOLERANCES.items():
            if "error" not in one and one[kind][0] > tolerance:
                wrong.append(f"{one['layout']}: {kind} differs by {one[kind][0]:.2g} in {one[kind][1]}")
    return wrong


def test_layouts_of_two_ranks_train_as_one_rank_does(tmp_path) -> None:
    # Of each kind another; an eighth of all of them in `.ci/run`, and all of them nightly.
    chosen = random.Random(31)
    kinds = (*KINDS, "dense conversation", "dense weighted", "qwen3_moe sequences", "dense shared")
    assert differing(train_all([chosen.choice(accepted([kind], [2])) for kind in kinds], tmp_path)) == []


@pytest.mark.submission
@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", [*KINDS, *COMBINED[:2]])
def test_an_eighth_of_the_accepted_layouts_trains_as_one_rank_does(kind, tmp_path) -> None:
    assert differing(train_all(an_eighth(accepted([kind])), tmp_path)) == []


@pytest.mark.submission
@pytest.mark.parametrize("kind", [*AVERAGED, *SEQUENCES])
def test_losses_by_conversation_and_of_sequences_are_those_of_one_rank_on_layouts_of_two(kind, tmp_path) -> None:
    two = accepted([kind], [2])
    chosen = random.Random(f"30 {kind}").sample(two, max(2, len(two) // 8))  # of each kind others
    assert differing(train_all(chosen, tmp_path)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*AVERAGED, *SEQUENCES])
def test_losses_by_conversation_and_of_sequences_are_those_of_one_rank_on_every_layout_of_two(kind, tmp_path) -> None:
    assert differing(train_all(accepted([kind], [2]), tmp_path)) == []


@pytest.mark.submission
def test_settings_that_change_no_layout_train_alike_on_two_ranks(tmp_path) -> None:
    chosen = random.Random(30)
    two = [accepted([kind], [2]) for kind in OTHER_VALUES]
    assert differing(train_all([one for kind in two for one in chosen.sample(kind, 2)], tmp_path)) == []


# Settings with one value in the generated layouts, by what compares their other values, or why nothing has to.
COMPARED_ELSEWHERE = {
    "sizes, of which the generated divisions are independent": (
        *("model.num_layers", "model.hidden_size", "model.ffn_hidden_size", "model.num_attention_heads"),
        *("model.max_sequence_length", "model.vocab_size", "parallel.ranks", "loader.global_batch_size"),
        *("schedule.max_tokens_per_rank", "optimizer.lr", "optimizer.eps", "optimizer.warmup_ratio"),
    ),
    "start from the same weights here": ("model.init_from", "model.init_std", "model.seed"),
    "layouts of the generated space": (
        *("parallel.tensor_parallel_size", "parallel.pipeline_parallel_size", "parallel.context_parallel_size"),
        *("parallel.virtual_pipeline_parallel_size", "parallel.pipeline_layout", "parallel.sequence_parallel"),
        *("parallel.expert_parallel_size", "parallel.expert_tensor_parallel_size", "parallel.overlap_shared_experts"),
        *("parallel.distributed_optimizer", "parallel.static_rows", "schedule.name=dynamic_context"),
        "parallel.overlap_experts",
    ),
    "tests/gpu, tests/unit/megatron/test_optimizer_choices.py, test_fusions.py and test_fused_router.py": (
        *("model.dtype", "model.fp8", "model.attention", "model.fuse_swiglu", "model.fuse_cross_entropy"),
        *("model.fuse_weight_gradient", "model.fuse_permutation", "model.fuse_router", "model.grouped_gemm"),
        *("parallel.cuda_graphs", "parallel.gradient_dtype", "parallel.overlap_tensor_parallel"),
        "parallel.delay_weight_gradients",
        *("optimizer.moments_dtype", "optimizer.offload", "parallel.expert_dispatcher=flex"),
    ),
    "test_overlaps.py": ("parallel.overlap_weights_with_step",),
    "tests/integration/test_worker_matrix.py": (
        *("loader.persistent_workers", "loader.prefetch_factor", "loader.start_method"),
        *("loader.timeout_s", "loader.allow_other_data"),
    ),
}


@pytest.mark.submission
def test_every_setting_of_a_step_has_all_its_values_or_another_test_that_compares_them() -> None:
    configs = [config_of(kind) for kind in (*KINDS, *LATER, *AVERAGED, *SEQUENCES, *SHARED, *OTHER_VALUES)]
    untried = set()
    for part in ("model", "optimizer", "parallel", "loader", "schedule"):
        for field in fields(getattr(configs[0], part)):
            name = f"{part}.{field.name}"
            tried = {repr(getattr(getattr(config, part), field.name)) for config in configs}
            choices = field.metadata.get(CHOICES) or ((True, False) if field.type in ("bool", "bool | None") else ())
            if len(tried) == 1:
                untried.add(name)
            else:
                untried |= {f"{name}={value}" for value in choices if repr(value) not in tried}
    assert untried == {name for names in COMPARED_ELSEWHERE.values() for name in names}


@pytest.mark.nightly
def test_the_documented_four_steps_show_a_rank_that_divides_by_its_own_tokens(tmp_path) -> None:
    """A loss moves by 1.0e-3 and a gradient norm by 9.1e-3."""
    fault = plant_fault(tmp_path / "plant", "harness.megatron.model.gpt", OWN_TOKENS)
    cases = json.dumps(["1 parallel=data", "2 parallel=data"])
    settings = [f"folder={tmp_path / 'parity'}", "steps=4", f"layouts={cases}"]
    command = [sys.executable, "-m", "harness.recipes.parity", "check=layouts", *settings]
    code, output = run_command(["env", fault, *command], timeout_s=3000)
    assert code == 1, output
    cells = {cell.name: cell for cell in read_report(tmp_path / "parity" / REPORT_FILE).cells}
    assert cells["layouts: 2x data"].status == "different"
    failed = [check.name for check in cells["layouts: 2x data"].checks if not check.passed]
    assert failed == ["loss", "validation_loss", "grad_norm"]


@pytest.mark.submission
@pytest.mark.parametrize("kind", SHARED[:4])  # the others in the nightly tests
def test_rows_that_data_parallel_ranks_share_train_as_on_one_rank(kind, tmp_path) -> None:
    assert differing(train_all(an_eighth(accepted([kind])), tmp_path)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["hybrid", "delta"])
@pytest.mark.parametrize("name", OF_SCANS)
def test_a_fault_of_a_scan_is_seen(name, kind, tmp_path) -> None:
    sizes, *fault = OF_SCANS[name]
    parallel = ParallelConfig(static_rows=False, **sizes)
    ranks = max(2, math.prod(sizes.values()))
    chosen = next(one for one in accepted([kind]) if one.ranks == ranks and one.config.parallel == parallel)
    (wrong, *_) = differing(train_all([chosen], tmp_path, plant_fault(tmp_path / "plant", *fault)))
    assert re.search(r"loss|grad_norm", wrong), wrong


@pytest.mark.nightly
@pytest.mark.parametrize("name", OF_MEDIA)
def test_a_fault_of_media_is_seen(name, tmp_path) -> None:
    sizes, *fault, shows = OF_MEDIA[name]
    parallel = ParallelConfig(static_rows=False, **sizes)
    kind = next((kind for kind in ("image_deep", "image_mrope") if kind.removeprefix("image_") in name), "omni")
    chosen = next(one for one in accepted([kind]) if one.ranks == 2 and one.config.parallel == parallel)
    wrong = differing(train_all([chosen], tmp_path, plant_fault(tmp_path / "plant", *fault)))
    assert re.search(shows, "\n".join(wrong)), wrong


@pytest.mark.nightly
@pytest.mark.parametrize("name", OF_SHARED_ROWS)
def test_a_fault_of_shared_rows_is_seen(name, tmp_path) -> None:
    *fault, shows, _ = OF_SHARED_ROWS[name]
    stages = 2 if "stage" in name else 1
    parallel = ParallelConfig(pipeline_parallel_size=stages, static_rows=False)
    shared = layouts_of("dense shared")
    chosen = next(one for one in shared if one.ranks == 2 * stages and one.config and one.config.parallel == parallel)
    results = train_all([chosen], tmp_path, plant_fault(tmp_path / "plant", *fault))
    (wrong, *_) = differing(results)
    assert re.search(shows, wrong), wrong


@pytest.mark.nightly
@pytest.mark.parametrize("name", OF_SHARED_ROWS)
def test_the_check_of_context_names_a_fault_of_shared_rows(name, tmp_path) -> None:
    *fault, _, shows = OF_SHARED_ROWS[name]
    stages = 2 if "stage" in name else 1
    shared = f"{2 * stages} schedule=dynamic_context schedule.max_tokens_per_rank=44"
    # As on GPUs, where rows of one size hide a row in place of another.
    shared += f" parallel.pipeline_parallel_size={stages} parallel.static_rows=true"
    cases = json.dumps(["1 schedule.name=cost_balanced", shared])
    smaller = json.dumps(["trainer.eval_interval=0", "trainer.timeout_s=60", "model.num_layers=4"])
    settings = [f"folder={tmp_path / 'parity'}", "steps=2", "steps_before=1", f"context={cases}", f"sft_more={smaller}"]
    command = ["env", plant_fault(tmp_path / "plant", *fault), sys.executable, "-m", "harness.recipes.parity"]
    code, output = run_command([*command, "check=context", *settings], timeout_s=3000)
    assert code == 1, output
    reference, cell = read_report(tmp_path / "parity" / REPORT_FILE).cells
    assert reference.status == "same"
    found = cell.reason if cell.status == "failed" else cell.first_difference.message
    assert re.search(shows, found), found


@pytest.mark.submission
def test_settings_that_are_drawn_together_train_as_on_one_rank(tmp_path) -> None:
    assert differing(train_all(drawn(6, 2, 30), tmp_path)) == []


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_settings_drawn_anew_each_night_train_as_on_one_rank(ranks, tmp_path) -> None:
    seed = secrets.randbelow(1 << 32)
    assert differing(train_all(drawn(60, ranks, seed), tmp_path)) == [], f"drawn with seed {seed}"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", [*KINDS, *LATER, *SHARED, *OTHER_VALUES, *COMBINED])
def test_every_accepted_layout_trains_as_one_rank_does(kind, tmp_path, report_points: Callable[..., None]) -> None:
    results = train_all(accepted([kind]), tmp_path)
    wrong = differing(results)
    worst = {name: max(one[name][0] for one in results if name in one) for name in TOLERANCES}
    of = f"layouts; differences up to {worst['step']:.1e} of a step's figures, {worst['gradient']:.1e} of gradients"
    report_points("accepted layouts", kind, len(results), of=of, outcome="as on one rank")
    assert wrong == []


# Together they have every refusal, but for its numbers, that any kind has.
EVERY_REFUSAL = ("lora hybrid_moe", "hybrid", "deepseek_like", "image_deep", "gpt_oss_like")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(one, marks=() if one in EVERY_REFUSAL else pytest.mark.submission)
        for one in (*KINDS, *LATER, *COMBINED)
    ],
)
def test_a_layout_that_is_not_accepted_is_refused_by_name_with_its_numbers(kind) -> None:
    refused = [layout for layout in layouts_of(kind) if layout.refused is not None]
    assert refused
    for layout in refused:
        error = layout.refused
        assert re.search(r"\d|one rank|no experts", error.what), (layout, error)
        assert re.search(r"parallel\b|model\.|loader\.|schedule\.", error.where), (layout, error)
        assert error.fix, layout


@pytest.mark.submission
def test_parity_names_a_setting_that_differs(tmp_path) -> None:
    smaller = ["trainer.eval_interval=2", "trainer.eval_batches=1", "model.num_layers=4", "model.hidden_size=32"]
    cases = ["1 parallel=data", "2 parallel=tp2_sp", "1 optimizer.weight_decay=0.5"]
    settings = [f"folder={tmp_path}", "steps=3", f"sft_more={json.dumps(smaller)}", f"layouts={json.dumps(cases)}"]
    code, output = run_command([warm_python(), "-m", "harness.recipes.parity", "check=layouts", *settings])
    assert code == 1, output
    assert "layouts: weight_decay=0.5: step 4: loss is" in output
    assert "1 of 2 compared cells are the same: DIFFERENT" in output
    cells = {cell.name: cell for cell in read_report(tmp_path / REPORT_FILE).cells}
    same = cells["layouts: 2x tp2_sp"]
    assert (same.status, same.reference, same.series.step) == ("same", "layouts: data", [1, 2, 3, 4, 5])
    assert {check.name for check in same.checks} >= {"data", "steps", "trained_tokens", "validation_loss"}
    assert cells["layouts: weight_decay=0.5"].first_difference.field == "loss"


# Momentum without memory: Adam's first moment is the gradient of the step.
GRADIENT = "optimizer.state.exp_avg."
# Of what a rank waits for another, so that a rank that failed alone does not hold the others up.
PATIENCE_S = 60


def pieces(tree: Any, prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...], ShardedTensor]]:
    """Yield name, place in the whole and piece of each tensor of a tree for `dist_checkpointing`."""
    for value in nested_values(tree):
        built = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        for piece in built:
            if isinstance(piece, ShardedTensor) and piece.key.startswith(prefix):
                yield piece.key.removeprefix(prefix), piece.global_slice(), piece


def whole(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a tree by name, on a rank that has all of them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, place, piece in pieces(tree, prefix):
        tensors.setdefault(name, torch.full(piece.global_shape, math.nan))[place] = piece.data
    return tensors


def numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield every number of a step's result, by name."""
    if isinstance(value, dict | tuple | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, f"{name}.{key}" if name else key)
    elif value is not None:
        yield name, float(value)


class Run:
    """A run on one layout, and the one that it is compared with: the first of its kind, on one rank.

    Attributes:
        covered: by the name of a parameter, True at the numbers of its gradient that this rank has.
        worst: the largest relative difference of a number that a step reports, of a parameter's gradient relative to
            the norm of the whole gradient (`gradient`) and to its own (`own`), and where each is.
    """

    def __init__(self, settings: SftConfig, reference: Path) -> None:
        self.settings, self.path = settings, reference
        self.reference = load_reference(reference) if reference.exists() else None
        self.covered: dict[str, torch.Tensor] = {}
        self.worst: dict[str, tuple[float, str]] = {"step": (0.0, ""), "gradient": (0.0, ""), "own": (0.0, "")}

    def train(self, data: Path, layout: RankLayout, device: torch.device) -> dict[str, tuple[float, str]]:
        """Train two steps; return `worst`, in which there is nothing for the reference itself."""
        config, reader = self.settings, open_dataset(data)
        row = config.max_tokens_per_row
        made: dict[str, Any] = {"steps": [], "gradients": []}

        def fill(chunks: Sequence[Any]) -> None:
            generator = torch.Generator().manual_seed(30)
            for chunk in chunks:
                for name, place, piece in pieces(sharded_weights(chunk)):
                    if self.reference is None:  # small matrices of adapters, norms and biases differ from their start
                        piece.data += 0.1 * torch.randn(piece.data.shape, generator=generator)
                    else:
                        piece.data.copy_(self.reference["weights"][name][place])
                if self.reference is None:
                    made["weights"] = whole(sharded_weights(chunk))

        step = MegatronStep(
            config.model,
            config.parallel,
            layout,
            device=device,
            vocab_size=config.model.vocab_size,
            optimizer=config.optimizer,
            pad_rows_to=row if config.parallel.static_rows else None,
            fill=torch.no_grad()(fill),
            loss_average=config.trainer.loss_average,
        )

        def load() -> Loader:
            rules = RunData(reader, None, None).media_rules
            features = None if rules is None else rules.features_at(is_first_stage=layout.is_first_stage)
            settings = {"schedule": config.schedule, "layout": layout, "features": features}
            return Loader(readable(reader, layout), config.loader, num_steps=2, **settings)

        with Feed(load, device=device) as batches:
            for number, batch in enumerate(batches):
                made["steps"].append(dict(numbers(asdict(step.train(batch)), "")))
                state, _ = checkpoint._run_state(step, is_loading=False)
                if self.reference is None:
                    made["gradients"].append(whole(state["optimizer"], GRADIENT))
                else:
                    self._compare(number, made["steps"][number], state["optimizer"])
        if self.reference is None:
            torch.save(made, self.path)
        return self.worst

    @torch.no_grad()
    def _compare(self, number: int, found: dict[str, float], optimizer: Any) -> None:
        assert self.reference is not None
        for name, expected in self.reference["steps"][number].items():
            self._note("step", abs(found[name] - expected) / max(abs(expected), 1e-12), f"step {number + 1}: {name}")
        gradients = self.reference["gradients"][number]
        if not self.covered:
            self.covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in gradients.items()}
        for name, place, piece in pieces(optimizer, GRADIENT):
            self.covered[name][place] = True
            error = torch.linalg.vector_norm(piece.data - gradients[name][place])
            where = f"step {number + 1}: {name}{_text(place)}"
            self._note("gradient", float(error) / found["grad_norm"], where)
            own = torch.linalg.vector_norm(gradients[name])
            # Biases of the keys of an encoder cancel in its softmax, and what its features do not use has no gradient.
            if not name.endswith(".k_proj.bias") and (own > 0 or error > 0):
                self._note("own", float(error / own), where)

    def _note(self, kind: str, error: float, name: str) -> None:
        if not error <= self.worst[kind][0]:  # NaN too
            self.worst[kind] = (error if math.isfinite(error) else math.inf, name)


def _text(place: tuple[Any, ...]) -> str:
    """Return the numbers of the layer and expert in a place, if the tensor on disk has them."""
    return str([axis for axis in place if isinstance(axis, int)] or "")


@cache
def load_reference(path: Path) -> dict[str, Any]:
    return torch.load(path)


def train_layout(number: int, layout: tuple[str, str, SftConfig], path: Path) -> None:
    """Train one layout on this rank; rank 0 adds its line when every rank has reported."""
    name, kind, config = layout
    named = ["weighted", *MEDIA]
    data = "/".join([*(name for name in named if name in kind.split()), "train"])
    rank, size = map(runtime.place_in_job, ("RANK", "WORLD_SIZE"))
    store = runtime._open_store(rank, size, timedelta(seconds=600)) if size > 1 else torch.distributed.HashStore()
    # One store for all: each job has a part of it for itself.
    own = PrefixStore(f"job {number}", store)
    began = time.process_time()
    try:
        with (
            mock.patch.object(runtime, "_open_store", return_value=own),
            runtime.start("cpu", timeout_s=PATIENCE_S) as started,
        ):
            place = join(config.parallel, size, timeout_s=PATIENCE_S, shares_rows=config.shares_rows)
            # Settings that are drawn together can be longer than the name of a file.
            run = Run(config, path.with_name(f"{hashlib.sha256(kind.encode()).hexdigest()}.pt"))
            outcome: dict[str, Any] = {**run.train(path.with_name("data") / data, place, started.device)}
        outcome["covered"] = {of: mask.numpy() for of, mask in run.covered.items()}
    except Exception as error:  # of any kind: it is the result of this layout, and others follow
        outcome = {"error": f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"}
    outcome["cpu_s"] = time.process_time() - began
    own.set(f"result of {rank}", pickle.dumps(outcome))
    if rank == 0:
        everyone = [pickle.loads(own.get(f"result of {other}")) for other in range(size)]
        with path.with_suffix(".jsonl").open("a") as file:
            file.write(json.dumps({"layout": name, **summary(everyone)}) + "\n")


def main(path: Path) -> int:
    """Train the layouts, eight in a process: threads of gloo's process groups end with their process only."""
    open_dataset(path.with_name("data") / "train").read([0])  # imports what every process needs
    layouts = list(enumerate(pickle.loads(path.read_bytes())))
    while layouts:
        some, layouts = layouts[:8], layouts[8:]
        if (pid := os.fork()) == 0:
            gc.disable()  # two steps leave little garbage, and searches for it take a tenth of their time
            try:
                for number, layout in some:
                    train_layout(number, layout, path)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1] != 0:
            return 1
    return 0


def summary(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst of what the ranks found: an error, a part that no rank has, or the largest differences."""
    spent = {"cpu_s": sum(one["cpu_s"] for one in everyone)}
    if failed := next((one for one in everyone if "error" in one), None):
        return {"error": failed["error"], **spent}
    for name in everyone[0]["covered"]:
        if not np.logical_or.reduce([one["covered"][name] for one in everyone]).all():
            return {"error": f"no rank has all of the gradient of {name}", **spent}
    return {kind: max(one[kind] for one in everyone) for kind in ("step", "gradient", "own")} | spent


if __name__ == "__main__":
    prepare_process()
    if torch.get_num_threads() > 1:  # after a fork, PyTorch may find its pool of threads invalid
        torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1])))
