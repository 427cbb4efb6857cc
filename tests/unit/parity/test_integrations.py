"""Comparing what trainers read: a step, a position or a package that is missing or different is named."""

from __future__ import annotations

import copy
import dataclasses
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import LoaderConfig, open_writer
from harness.integrations import RankStream
from harness.records import Pack
from harness.schedule import ScheduleConfig
from harness.train.digests import sequence_digests
from tests.integrations.global_batches import BEFORE, find_difference
from tests.integrations.probes import ProbeJob, content_digest, trained_part

JOB = ProbeJob("torch", "data", {}, {}, first_step=0, last_step=2, folder="")


@pytest.fixture
def data(tmp_path: Path) -> str:
    with open_writer(tmp_path / "packs", format="memmap", pack_size=16) as writer:
        for number in range(6):
            writer.append(Pack(np.arange(9) + 10 * number, [1, 1, 1, 0, 1, 0, 0, 1, 0], [0, 4]))
    return str(tmp_path / "packs")


def streams(data: str) -> tuple[list[dict[str, Any]], list[str], list[dict[str, Any]]]:
    """Two ranks' records of two steps, and digests and positions of one rank."""

    def stream(rank: int, ranks: int) -> RankStream:
        config = LoaderConfig(global_batch_size=3, num_workers=0)
        return RankStream(data, config, schedule=ScheduleConfig("as_packed", 16), dp_rank=rank, dp_size=ranks)

    ranks = []
    for rank in range(2):
        batches = list(islice(stream(rank, 2), 2))
        steps = [[sequence_digests(trained_part(row)).tolist() for row in batch.rows] for batch in batches]
        ranks.append({"steps": steps, "position": dataclasses.asdict(batches[-1].state)})
    whole = list(islice(stream(0, 1), 2))
    digests = [content_digest([trained_part(row) for row in batch.rows]) for batch in whole]
    return ranks, digests, [dataclasses.asdict(batch.state) for batch in whole]


def test_a_changed_token_a_lost_row_and_another_position_are_named(data: str) -> None:
    ranks, digests, positions = streams(data)
    changed, lost, moved, short = (copy.deepcopy(ranks) for _ in range(4))
    changed[1]["steps"][1][0][0][1] ^= 1
    del lost[0]["steps"][0][0]
    moved[1]["position"]["packs_consumed"] += 1
    del short[1]["steps"][1]
    found = [find_difference(JOB, BEFORE, records, digests, positions) for records in (changed, lost, moved, short)]
    assert None not in found

    assert [(one.step, one.rank, one.field) for one in found if one is not None] == [
        (2, None, "tokens"),
        (1, None, "tokens"),
        (2, 1, "position"),
        (None, 1, "steps"),
    ]
