"""`python -m tests.integration.live_rank FOLDER OUT INTERVAL STEP_S TOKENIZER TIMEOUT_S COLLECTIVE_S`: a rank
without a model.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are a launcher's. Rank 0 writes a line a step of what all ranks trained,
and every few steps a checkpoint to resume from.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from harness.errors import exit_on_error
from harness.loader import LiveConfig, LoaderState, RankLayout
from harness.loader.datasets import LiveSource
from harness.loader.live.rank import BatchPlan
from harness.megatron.data.live_feed import LiveFeed
from harness.megatron.job.runtime import gather_on_rank_0
from harness.prep import ChatTokenizer, TokenizerConfig
from harness.schedule import SequenceCost
from harness.storage import write_atomically
from harness.train.metrics import keep_lines_before
from tests.samples.small_packs import batch_digest

SIZE, CAPACITY, PACK_SIZE, OPEN_PACKS = 4, 256, 128, 3


def main(
    folder: str, out: Path, interval: int, step_s: float, tokenizer: str, timeout_s: float, collective_s: float
) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=collective_s))
    checkpoint, log = out / "checkpoint.json", out / "trained.jsonl"
    step, state = 0, None
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        step, state = saved["step"], LoaderState.from_json(saved["state"])
    if rank == 0:
        keep_lines_before(log, step + 1)

    def save() -> None:
        assert state is not None
        if rank == 0:
            write_atomically(checkpoint, json.dumps({"step": step, "state": state.to_json()}).encode())
            feed.trained(state)

    with LiveFeed(
        LiveConfig(blend=[LiveSource(folder)], pack_size=PACK_SIZE, open_packs=OPEN_PACKS, timeout_s=timeout_s),
        BatchPlan(
            RankLayout(dp_rank=rank, dp_size=world), SIZE, CAPACITY, SequenceCost(), "as_packed", window_sequences=None
        ),
        tokenizer=ChatTokenizer(TokenizerConfig(name=tokenizer)) if tokenizer else None,
        state=state,
        timeout_s=collective_s,
        device=torch.device("cpu"),
    ) as feed:
        for batch in feed:
            time.sleep(step_s)
            step, state = step + 1, batch.state
            parts = gather_on_rank_0((batch_digest(batch), [one for row in batch.sequence_ids for one in row.tolist()]))
            if rank == 0:
                with log.open("a") as file:
                    ids = sorted(one for _, part in parts for one in part)
                    file.write(
                        json.dumps({"step": step, "digests": [digest for digest, _ in parts], "ids": ids}) + "\n"
                    )
            if step % interval == 0:
                save()
        if state is not None:
            save()
    if rank == 0:
        (out / "done").touch()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with exit_on_error():
        place, report, every, seconds, name, limit, collective = sys.argv[1:]
        main(place, Path(report), int(every), float(seconds), name, float(limit), float(collective))
