"""Layers call the fused scan of mamba-ssm as recorded, on one rank and on two that share a row.

As a program, `FOLDER`: each rank writes the call of its layers to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.megatron import prepare_process
from harness.megatron.batch import run_row, to_device
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model import scan
from harness.megatron.model.gpt import build_chunks
from harness.plan import ModelConfig, ParallelConfig
from harness.records import SequenceView
from harness.thd import build_thd_batch, pad_row
from tests.samples.scan_kernel import write_packages
from tests.samples.warm_python import warm_python

from .conftest import ROOT, found_by, run_command

pytestmark = pytest.mark.submission

GOLDEN = ROOT / "tests/golden/scan_calls.json"
MODEL = ModelConfig(
    family="nemotron_h", layer_pattern="MM", num_layers=2, hidden_size=64, num_attention_heads=4, dtype="bfloat16",
    scan_num_heads=16, scan_head_dim=8, scan_state_dim=24, scan_num_groups=2, tie_embeddings=False,
)  # fmt: skip
# Tokens of each sequence, and of the row with its padding.
LENGTHS, TOTAL = (9, 4, 6), 32


def called(ranks: int, folder: Path) -> list[dict[str, Any]]:
    write_packages(folder / "packages")
    launcher = [warm_python(), "-m", "tests.distributed.forked", str(ranks)]
    start = ["env", f"PYTHONPATH={ROOT}:{folder / 'packages'}", *launcher]
    code, output = run_command([*start, "tests.distributed.test_scan_calls", str(folder)])
    assert code == 0, output
    return found_by(folder, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_call_the_fused_scan_as_recorded(tmp_path, ranks) -> None:
    found = called(ranks, tmp_path)
    golden = json.loads(GOLDEN.read_text())[str(ranks)]
    # Ranks that share a row scan all of it, each a share of the heads.
    assert found == [golden] * ranks
    # Whoever records anew: padding at the end of the row is a sequence of its own; that of a sequence is a part of it.
    padded = LENGTHS if ranks == 1 else [-(-length // 4) * 4 for length in LENGTHS]
    lengths = [*padded, TOTAL - sum(padded)]
    assert golden["seq_idx"] == [owner for owner, length in enumerate(lengths) for _ in range(length)]
    # The convolution by sequences needs multiples of eight (causal-conv1d, `csrc/causal_conv1d.cpp`).
    assert golden["call"]["zxbcdt"][1][2] % 8 == golden["call"]["conv1d_weight"][1][0] % 8 == 0


def record(folder: Path) -> None:
    choose = scan.choose_scan
    scan.choose_scan = lambda device, features: choose(torch.device("cuda"), features)  # as on a GPU
    with runtime.start("cpu", timeout_s=60):
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        parallel = ParallelConfig(context_parallel_size=ranks)
        join(parallel, ranks)
        (chunk,) = build_chunks(MODEL, parallel, vocab_size=300, device=torch.device("cpu"))
        views = [SequenceView(np.arange(n + 1, dtype=np.int32), np.ones(n + 1, np.uint8)) for n in LENGTHS]
        row = pad_row(build_thd_batch(views, pad_to_multiple=parallel.pad_to_multiple), TOTAL)
        run_row(chunk, to_device(row, torch.device("cpu"), cp_size=ranks, cp_rank=rank)).sum().backward()
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined as kernel

    first, second = kernel.calls
    assert first == second
    found = {
        "call": first,
        "seq_idx": kernel.values["seq_idx"][0].tolist(),
        "decays": bool((kernel.values["A"] < 0).all()),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    prepare_process()
    record(Path(sys.argv[1]))
