"""Ranks that attention of Transformer Engine exchanges with by row: -m tests.distributed.engine_shared_ranks FOLDER."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from harness.megatron import prepare_process

prepare_process()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed  # noqa: E402
import transformer_engine.pytorch as engine  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402

from harness.megatron.job import runtime  # noqa: E402
from harness.megatron.job.runtime import join  # noqa: E402
from harness.megatron.step import MegatronStep  # noqa: E402
from harness.plan import ModelConfig, ParallelConfig  # noqa: E402
from harness.records import SequenceView  # noqa: E402
from harness.thd import build_thd_batch  # noqa: E402

MODEL = ModelConfig(num_layers=1, hidden_size=64, ffn_hidden_size=96, max_sequence_length=64)


def main(folder: Path) -> None:
    calls: list[tuple[list[int] | None, bool]] = []

    def note(self: Any, group: Any, ranks: list[int] | None, stream: Any, kind: str) -> None:
        calls.append((ranks, stream is not None))

    with runtime.start("cpu") as job:
        layout = join(ParallelConfig(), job.world_size, shares_rows=True)
        model = replace(MODEL, attention="transformer_engine")
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            step = MegatronStep(model, ParallelConfig(), layout, device=job.device, vocab_size=300)
        (attention,) = (one for one in step.chunks[0].modules() if isinstance(one, engine.DotProductAttention))
        whole = build_thd_batch([SequenceView(np.arange(9, dtype=np.int32), np.ones(9, np.uint8))], pad_to_multiple=4)
        with mock.patch.object(engine.DotProductAttention, "set_context_parallel_group", note, create=True):
            for ranks in (2, 1, 2):
                row = step.copy_row(replace(whole, shared_by=ranks)).packed_seq_params
                heads = torch.zeros(len(whole) // ranks, 4, 16)
                with suppress(NotImplementedError):  # of its kernels
                    attention(heads, heads, heads, None, AttnMaskType.padding_causal, packed_seq_params=row)
        found = {"rank": job.rank, "calls": calls}
    (folder / f"{found['rank']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
