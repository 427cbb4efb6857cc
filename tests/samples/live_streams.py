"""Write streams of live chunks, and train on them with ranks that are threads of one process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import HarnessError
from harness.loader import LiveConfig, LoaderState, RankBatch, RankLayout
from harness.loader.datasets import LiveSource
from harness.loader.live import LiveProducer
from harness.loader.live.consumer import LiveLoader, split_streams
from harness.loader.live.position import positions_from_json
from harness.loader.live.rank import BatchPlan, FolderReader, Offer
from harness.prep import ChatTokenizer
from harness.records import Pack, UInt8Array
from harness.schedule import SequenceCost
from tests.samples.small_packs import batch_digest

CAPACITY = 256


def some_packs(count: int, *, seed: int = 0) -> list[Pack]:
    """Return random packs of up to three sequences of 2 to 20 tokens."""
    random = np.random.default_rng(seed)
    packs = []
    for _ in range(count):
        lengths = random.integers(2, 21, random.integers(1, 4))
        starts = np.cumsum(lengths) - lengths
        mask = random.integers(0, 2, lengths.sum())
        mask[starts + lengths - 1] = 0
        packs.append(Pack(random.integers(0, 300, lengths.sum()), mask, starts))
    return packs


def some_chats(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return random conversations with answers of 1 to 40 words."""
    random = np.random.default_rng(seed)
    words = ["alpha", "beta", "gamma", "delta"]
    return [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": " ".join(random.choice(words, random.integers(1, 41)))},
            ]
        }
        for number in range(count)
    ]


def write_chats(path: Path, count: int, *, seed: int = 0) -> Path:
    """Write `some_chats` as lines of JSON."""
    path.write_text("".join(json.dumps(chat) + "\n" for chat in some_chats(count, seed=seed)))
    return path


def long_chats(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return random conversations of one to five exchanges of about twenty tokens each."""
    random = np.random.default_rng(seed)
    chats = some_chats(5 * count, seed=seed)
    lengths = random.integers(1, 6, count).tolist()
    return [
        {"messages": [turn for chat in chats[5 * number : 5 * number + length] for turn in chat["messages"]]}
        for number, length in enumerate(lengths)
    ]


def write_stream(folder: Path, rows: Sequence[Any], sizes: Sequence[int], *, end: bool = True, **settings: Any) -> None:
    """Write the rows in chunks of these sizes."""
    kind = "packs" if isinstance(rows[0], Pack) else "chat"
    with LiveProducer(folder, kind=kind, max_waiting=1000, **settings) as producer:
        left = iter(rows)
        for size in sizes:
            for _ in range(size):
                producer.add(next(left))
            producer.flush()
        if end:
            producer.end()


def wait_until(condition: Callable[[], bool], *, deadline_s: float = 60.0) -> None:
    """Return once `condition` holds; fail after a deadline that only a hang can reach."""
    for _ in range(int(deadline_s / 0.02)):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing happened for {deadline_s:.0f} s")


@dataclass
class Trained:
    """The batches of all ranks by step, the lines that were logged (those of loaded chunks apart), and the numbers of
    steps that were reported.
    """

    steps: list[list[RankBatch]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    reported: list[int] = field(default_factory=list)

    @property
    def digests(self) -> list[list[str]]:
        return [[batch_digest(batch) for batch in step] for step in self.steps]

    @property
    def sequences(self) -> list[int]:
        """Sorted ids of all sequences that were trained."""
        return sorted(
            id_ for step in self.steps for batch in step for row in batch.sequence_ids for id_ in row.tolist()
        )

    @property
    def stored(self) -> dict[int, Pack]:
        """The stored sequences that the rows were made of, each as a pack, by id."""
        found = {}
        batches = [batch for step in self.steps for batch in step]
        for row, ids in (pair for one in batches for pair in zip(one.rows, one.sequence_ids, strict=True)):
            bounds = row.cu_seqlens_padded.tolist()
            for id_, start, count in zip(ids.tolist(), bounds, np.diff(row.cu_seqlens).tolist(), strict=False):
                end = start + count
                tokens = np.append(row.tokens[start:end], row.labels[end - 1])
                found[id_] = Pack(tokens, np.append(row.loss_mask[start:end], 0), [0])
        return found

    def state(self, step: int = -1) -> LoaderState:
        return LoaderState.from_json(self.steps[step][0].state.to_json())


def _exchange_of(
    rank: int, barrier: threading.Barrier, slots: list[list[Offer]]
) -> Callable[[list[Offer]], list[Offer]]:
    def exchange(mine: list[Offer]) -> list[Offer]:
        slots[rank] = mine
        barrier.wait(300)
        offers = [offer for some in slots for offer in some]
        barrier.wait(300)
        return offers

    return exchange


def _swap_of(
    rank: int, barrier: threading.Barrier, sent: list[list[UInt8Array]]
) -> Callable[[list[UInt8Array], list[int]], list[UInt8Array]]:
    def swap(outgoing: list[UInt8Array], expected: list[int]) -> list[UInt8Array]:
        sent[rank] = outgoing
        barrier.wait(300)
        arrived = [parts[rank].copy() for parts in sent]
        barrier.wait(300)
        outgoing.clear()
        assert [part.shape[0] for part in arrived] == expected
        return arrived

    return swap


def train(
    folder: Path | Sequence[Path],
    *,
    dp_size: int = 1,
    size: int = 4,
    steps: int | None = None,
    state: LoaderState | None = None,
    tokenizer: ChatTokenizer | None = None,
    layout: dict[str, int] | None = None,
    schedule: str = "as_packed",
    window: int | None = None,
    weights: Sequence[float] = (1.0,),
    into: Trained | None = None,
    before_step: Callable[[int, int], None] = lambda rank, step: None,
    **settings: Any,
) -> Trained:
    """Train on `dp_size` ranks until the stream ends, or for `steps` steps; raise the error of the first rank.

    `weights` are those of several folders.
    """
    folders = [folder] if isinstance(folder, Path) else [*folder]
    settings["blend"] = [LiveSource(str(path), weight) for path, weight in zip(folders, weights, strict=True)]
    config = LiveConfig(**{"pack_size": 128, "timeout_s": 300.0, "open_packs": 3, **settings})
    barrier = threading.Barrier(dp_size)
    slots: list[list[Offer]] = [[] for _ in range(dp_size)]
    sent: list[list[UInt8Array]] = [[] for _ in range(dp_size)]
    trained = into if into is not None else Trained()
    batches: list[list[RankBatch]] = [[] for _ in range(dp_size)]

    def log(line: str) -> None:
        (trained.loaded if ": Loaded chunk " in line else trained.log).append(line)

    def run(rank: int) -> None:
        place = RankLayout(dp_rank=rank, dp_size=dp_size, **(layout or {}))
        plan = BatchPlan(
            place, size, CAPACITY, SequenceCost(), schedule, window_sequences=window, weights=tuple(weights)
        )
        positions = positions_from_json(state.live if state is not None else "", len(folders))
        streams = split_streams(state.fingerprint if state is not None else "", len(folders))
        rules = tokenizer.media_rules if tokenizer is not None else None
        of_media = {"features": rules.features} if rules is not None else {}
        loader = LiveLoader(
            [
                FolderReader(
                    config, plan, source=source, position=position, stream=stream, **of_media, tokenizer=tokenizer
                )
                for source, (position, stream) in enumerate(zip(positions, streams, strict=True))
            ],
            plan,
            exchange=_exchange_of(rank, barrier, slots),
            swap=_swap_of(rank, barrier, sent),
            **of_media,
            state=state or LoaderState(seed=0),
            timeout_s=config.timeout_s,
            folders=config.folders,
            log=log if rank == 0 else lambda line: None,
            report=lambda positions, offers: trained.reported.append(positions[0].steps) if rank == 0 else None,
        )
        try:
            if steps == 0:
                return
            found = (batch for batch in loader if isinstance(batch, RankBatch))
            for number, batch in enumerate(found, start=1):
                before_step(rank, number)
                batches[rank].append(batch)
                if number == steps:
                    return
        except HarnessError:
            raise
        except BaseException:
            barrier.abort()
            raise
        finally:
            loader.close()

    with ThreadPoolExecutor(dp_size) as ranks:
        futures = [ranks.submit(run, rank) for rank in range(dp_size)]
        errors = [future.exception() for future in futures]
    trained.steps += [list(step) for step in zip(*batches, strict=True)]
    raised = [error for error in errors if error is not None]
    if raised:
        assert len(raised) == dp_size, errors
        raise raised[0]
    return trained
