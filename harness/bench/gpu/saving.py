"""Cost of a checkpoint to a training run: how long steps wait for it, and how slow they are while it is written."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from harness.bench.checkpoints import owned_tensors
from harness.bench.figures import BenchReport, Figure
from harness.bench.gpu.sizes import Place, shape_of
from harness.bench.step import bare_step
from harness.loader import LoaderState
from harness.megatron import MegatronStep, to_device
from harness.megatron.job import join, runtime
from harness.megatron.state import CheckpointWriter
from harness.plan import ParallelConfig
from harness.records import SequenceView
from harness.thd import build_thd_batch
from harness.train import Progress as RunPosition

_VOCABULARY = 32_768
_TINY_VOCABULARY = 512
# Training may wait as long as one copy of a rank's own state takes.
_MOST_WAIT = 1.0


def measure_checkpoint(place: Place) -> BenchReport:
    """Save half of a model of the shape `1b` while it trains; every rank of the job calls this."""
    report, sizes = BenchReport("gpu", {}), place.sizes
    with runtime.start(place.device) as job:
        parallel = ParallelConfig(distributed_optimizer=job.world_size > 1)
        layout = join(parallel, job.world_size)
        vocabulary = _TINY_VOCABULARY if sizes.is_tiny else _VOCABULARY
        # Half of the layers: two checkpoints, the one before and the one being written, fit on a small disk.
        model = shape_of("1b", sizes, job.device)
        model = replace(model, num_layers=model.num_layers // 2)
        step = MegatronStep.build(model, parallel, layout, device=job.device, vocab_size=vocabulary)
        ids = np.arange(sizes.row + 1, dtype=np.int32) % vocabulary
        row = build_thd_batch([SequenceView(ids, np.r_[np.ones(sizes.row, np.uint8), [0]])])
        rows = [to_device(row, job.device)] * sizes.rows

        def train() -> float:
            return bare_step(step, rows, sizes.row, job.device)

        before = [train() for _ in range(sizes.warm_up + sizes.steps)][sizes.warm_up :]
        writer = CheckpointWriter(place.folder / "checkpoints", step, keep=1)
        blocked, copies, during, whole = [], [], [], []
        owned = owned_tensors(step, job.world_size)
        for number in range(3):  # the first also decides who writes what, and pins memory
            torch.distributed.barrier()
            start = time.perf_counter()
            writer.start(RunPosition(number + 1, LoaderState(0)))
            blocked.append(time.perf_counter() - start)
            during += [train() for _ in range(2)] if number else []
            writer.finish()
            whole.append(time.perf_counter() - start)
            copies.append(_seconds_to_copy(owned, job.device))
        size = sum(tensor.nbytes for tensor in owned)
    shutil.rmtree(place.folder / "checkpoints", ignore_errors=True)
    report.add(Figure("a rank's own state", size / 1e9, "GB"))
    report.add_samples("a step", [1e3 * seconds for seconds in before], "ms")
    report.add(Figure("training waits for the first checkpoint", 1e3 * blocked[0], "ms"))
    report.add_samples("training waits for a checkpoint", [1e3 * seconds for seconds in blocked[1:]], "ms")
    report.add_samples("one copy of a rank's own state to pinned memory", [1e3 * second for second in copies[1:]], "ms")
    report.add_ratio(
        "waiting over one copy",
        "training waits for a checkpoint",
        "one copy of a rank's own state to pinned memory",
        at_most=sizes.aim(_MOST_WAIT),
    )
    report.add_samples("a step while one is written", [1e3 * seconds for seconds in during], "ms")
    report.add_ratio("steps while one is written over others", "a step while one is written", "a step")
    report.add(Figure("a checkpoint is complete after", statistics.median(whole[1:]), "s"))
    return report


def _seconds_to_copy(tensors: list[torch.Tensor], device: torch.device) -> float:
    """Return the seconds in which tensors are copied to pinned memory of the host that is there already."""
    on_gpu = device.type == "cuda"
    room = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu) for tensor in tensors]
    if on_gpu:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for target, tensor in zip(room, tensors, strict=True):
        target.copy_(tensor, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
