"""Ask one version of Transformer Engine which tokens of a row each context-parallel rank holds.

    PYTHONPATH=FOLDER python engine_partition.py < bounds_by_size.json > positions.json

Its own function for batches on the host answers, on ranks of a fake process group; see `engine_backends.py`.
"""

from __future__ import annotations

import contextlib
import json
import sys

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

with contextlib.redirect_stdout(sys.stderr):
    import engine_extension  # noqa: F401 - before Transformer Engine


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        import transformer_engine.pytorch
        from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
            get_batch_on_this_cp_rank,
        )

    answers: dict[str, list[list[int]]] = {}
    for size, padded in json.load(sys.stdin).items():
        bounds, answers[size] = torch.tensor(padded, dtype=torch.int32), []
        row = torch.arange(padded[-1])
        for rank in range(int(size)):
            torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=int(size))
            tokens, *others = get_batch_on_this_cp_rank(
                bounds, row[None], row[None], row, torch.distributed.group.WORLD
            )
            torch.distributed.destroy_process_group()
            answers[size].append(tokens[0].tolist())
            assert all(torch.equal(other.flatten(), tokens[0]) for other in others)
    json.dump({"version": transformer_engine.__version__, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
