"""`python -m tests.benchmarks live`: one stream on several ranks, packed or in windows: tokens a second, imbalance."""

from __future__ import annotations

import itertools
import statistics
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from harness.bench.figures import BenchReport, Figure, Progress, Side
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, lognormal_lengths
from harness.checks import Bounds, require_bounds
from harness.loader import LiveConfig, LoaderState, RankBatch, RankLayout
from harness.loader.live import LiveProducer
from harness.loader.live.consumer import LiveLoader
from harness.loader.live.rank import BatchPlan, FolderReader
from harness.prep import Member, StreamPacker, pack_of
from harness.records import Pack, SequenceView
from harness.schedule import SequenceCost
from tests.benchmarks.clocks import rate

_MEDIAN = 600.0
_TIMEOUT_S = 60


def bench_live(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Read one stream by several ranks in four ways, and compare rates and imbalance."""
    require_bounds(sizes.ranks, Bounds(1, highest=64), "ranks", "")
    report = BenchReport("live")
    progress("writing the streams")
    alone, packed = workspace.folder / "live-sequences", workspace.folder / "live-packs"
    num_sequences = sizes.steps * sizes.global_batch
    per_pack = num_sequences / _write_streams(sizes, num_sequences, alone, packed)
    packs_of_a_step = max(sizes.ranks, round(sizes.global_batch / per_pack))
    window = {"window": sizes.global_batch}
    # Sequences one by one in rows of their own, from the chunks of a rank's number: the reading of Megatron-SWIFT's
    # sharded lazy dataset.
    ways: dict[str, tuple[Path, str, dict[str, int]]] = {
        "modulo": (alone, "as_packed", {"size": sizes.global_batch}),
        "as_packed": (packed, "as_packed", {"size": packs_of_a_step}),
        "dp_balanced windows": (alone, "dp_balanced", window),
        "cost_balanced windows": (alone, "cost_balanced", window),
    }
    report.notes += [
        f"{num_sequences:,} sequences of median {_MEDIAN:g} tokens, {per_pack:.1f} in a pack; "
        f"{sizes.ranks} ranks as threads of one process: rates are of all ranks together",
        "modulo is a rank that trains each sequence of its own chunks in a row of its own, as Megatron-SWIFT reads; "
        "as_packed trains packs of its own chunks",
        "training speed is what a step costs that lasts as long as its busiest rank, without waits in microbatches",
    ]
    steps: dict[str, list[RankBatch]] = {}

    def side(name: str) -> Side:
        folder, scheduler, of = ways[name]

        def read(number: int) -> float:
            steps[name] = _read_live(sizes, folder, scheduler, **of)
            return sum(step.num_tokens for step in steps[name]) / 1e6

        return rate(read)

    progress(f"reading the streams on {sizes.ranks} ranks")
    report.compare("", {f"{name}, read": side(name) for name in ways}, sizes.rounds, "M tok/s")
    _add_imbalance(
        report, {name: steps[name] for name in ways}, is_reference=(sizes.ranks, sizes.global_batch) == (8, 512)
    )
    return report


def _add_imbalance(report: BenchReport, steps: dict[str, list[RankBatch]], *, is_reference: bool) -> None:
    for name, batches in steps.items():
        # The ends of the streams differ: packs leave as many in the last steps as their ranks have.
        full = [step.imbalance for step in batches[:-1]] or [step.imbalance for step in batches]
        cost = sum(one.rank_cost.max() for one in full) / sum(one.rank_cost.mean() for one in full)
        tokens = sum(int(one.rank_tokens.max()) for one in full) / sum(float(one.rank_tokens.mean()) for one in full)
        target = 1.05 if name.startswith("cost") and is_reference else None
        report.add(Figure(f"{name}, step cost", float(cost), "x", at_most=target))
        report.add(Figure(f"{name}, step tokens", tokens, "x"))
        report.add(Figure(f"{name}, filled", 100 * statistics.mean(one.fill for one in full), "%"))
        report.add(Figure(f"{name}, microbatches", statistics.mean(one.num_microbatches for one in full), ""))
    for name, other in itertools.product(steps, ("as_packed", "modulo")):
        if name not in (other, "modulo"):
            report.add_ratio(f"{name}, training speed to {other}", f"{other}, step cost", f"{name}, step cost")


def _write_streams(sizes: Sizes, num_sequences: int, alone: Path, packed: Path) -> int:
    """Write the same sequences as rows of their own and in packs; return the number of packs."""
    size = sizes.max_tokens_per_rank
    rows_per_chunk = max(1, sizes.global_batch // sizes.ranks)
    random = np.random.default_rng(0)
    packer: StreamPacker[int] = StreamPacker(size, max_open=16)
    singles: list[Pack] = []
    packs: list[Pack] = []
    for number, length in enumerate(lognormal_lengths(num_sequences, median=_MEDIAN, longest=size, seed=0).tolist()):
        mask = np.ones(length, np.uint8)
        mask[-1] = 0
        view = SequenceView(random.integers(0, 50_000, length, dtype=np.int32), mask)
        singles.append(Pack(view.input_ids, view.loss_mask, np.zeros(1, np.int32)))
        if (full := packer.add(Member(number, view, length))) is not None:
            packs.append(pack_of(full))
    while (rest := packer.flush()) is not None:
        packs.append(pack_of(rest))
    _produce(alone, singles, rows_per_chunk)
    _produce(packed, packs, max(1, round(rows_per_chunk * len(packs) / num_sequences)))
    return len(packs)


def _produce(folder: Path, packs: Iterable[Pack], rows_per_chunk: int) -> None:
    with LiveProducer(
        folder, kind="packs", suffix=".parquet", rows_per_chunk=rows_per_chunk, max_waiting=1 << 30
    ) as producer:
        for pack in packs:
            producer.add(pack)
        producer.end()


def _read_live(
    sizes: Sizes, folder: Path, scheduler: str, *, size: int = 1, window: int | None = None
) -> list[RankBatch]:
    """Read a stream to its end on all ranks, and return the batches of the first."""
    ranks = sizes.ranks
    config = LiveConfig(path=str(folder), pack_size=sizes.max_tokens_per_rank, timeout_s=_TIMEOUT_S)
    meeting = threading.Barrier(ranks)
    slots: list[Any] = [None] * ranks

    def gather(rank: int, mine: Any) -> list[Any]:
        slots[rank] = mine
        meeting.wait(_TIMEOUT_S)
        gathered = list(slots)
        meeting.wait(_TIMEOUT_S)
        return gathered

    def run(rank: int) -> list[RankBatch]:
        layout = RankLayout(dp_rank=rank, dp_size=ranks)
        plan = BatchPlan(layout, size, sizes.max_tokens_per_rank, SequenceCost(), scheduler, window_sequences=window)

        def swap(outgoing: list[Any], expected: Sequence[int]) -> list[Any]:
            return [parts[rank] for parts in gather(rank, outgoing)]

        loader = LiveLoader(
            [FolderReader(config, plan)],
            plan,
            exchange=lambda offers: [offer for some in gather(rank, offers) for offer in some],
            swap=swap,
            state=LoaderState(seed=0),
            timeout_s=_TIMEOUT_S,
        )
        batches = []
        try:
            for batch in loader:
                if not isinstance(batch, RankBatch):  # no chunk yet
                    continue
                batch.rows.clear()  # the tokens themselves are not kept
                batches.append(batch)
        except BaseException:
            meeting.abort()
            raise
        finally:
            loader.close()
        return batches

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
        first, *_ = [future.result() for future in futures]
        return first
