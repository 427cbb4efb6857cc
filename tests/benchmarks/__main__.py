"""`python -m tests.benchmarks NAME [KEY=VALUE]...`: `harness bench`, and the benches against other packages.

`python -m tests.benchmarks all [--quick] [PAGE]` runs every bench in a process of its own, and writes `BENCHMARKS.md`
or another page from them; it takes 45 minutes.
"""

from __future__ import annotations

import sys
from functools import partial

from harness.bench import BENCHES, Bench

_peer = partial(Bench, package="tests.benchmarks")
PEERS = {
    "schedule": _peer(
        "scheduling:bench_schedule",
        "balance of the schedulers on a dataset or simulated lengths",
        {"path": "", "parts": (), "ranks": 8, "cp_size": 1, "max_tokens_per_rank": 8192, "global_batch": 256}
        | {"steps": 40},
        {"steps": 5},
    ),
    "loader": _peer(
        "loading:bench_loader",
        "THD batches per second from each format",
        {"parts": (), "packs": 20_000, "pack_size": 4096, "max_tokens_per_rank": 8192, "global_batch": 64}
        | {"workers": (0, 2, 4), "steps": 120, "rounds": 5},
        {"parts": ("memmap", "parquet"), "packs": 2000, "workers": (0, 2), "steps": 20, "rounds": 1},
    ),
    "formats": _peer(
        "formats:bench_formats",
        "read, open and write each format, against plain numpy arrays",
        {"parts": (), "packs": 20_000, "pack_size": 4096, "large_packs": 2_000_000, "steps": 4096, "rounds": 9},
        {"packs": 2000, "large_packs": 50_000, "steps": 1000, "rounds": 3},
    ),
    "pack": _peer(
        "packing:bench_packing",
        "plan packs of 13 million sequences, and of fewer against trl",
        {"parts": (), "sequences": (13_000_000, 200_000), "pack_size": 4096, "rounds": 3},
        {"sequences": (500_000, 50_000)},
    ),
    "repack": _peer(
        "packing:bench_repacking",
        "plan again over 13 million stored sequences",
        {"packs": 20_000, "pack_size": 4096, "large_packs": 2_000_000, "rounds": 3},
        {"packs": 2000, "large_packs": 20_000, "rounds": 1},
    ),
    "prepare": _peer(
        "preparing:bench_preparing",
        "tokenize conversations, against the tokenizers library",
        {"sequences": (4000,), "rounds": 3},
        {"sequences": (300,), "rounds": 1},
    ),
    "tokens": _peer(
        "tokens:bench_tokens",
        "token shards to .bin and .idx, against Megatron-Core's builder",
        {"packs": 20_000, "pack_size": 1000, "rounds": 3},
        {"packs": 500, "rounds": 1},
    ),
    "planning": _peer(
        "planning:bench_planning",
        "processor time of the schedulers for one global batch on 8, 64, 512 and 4,096 ranks, up to `ranks`",
        {"parts": (), "sequences": (), "ranks": 4096, "max_tokens_per_rank": 8192, "rounds": 9},
        {"ranks": 64, "rounds": 3},
    ),
    "reading": _peer(
        "reading:bench_reading",
        "bytes that ranks and workers read and decode of Parquet, the wait for the first batch of large data",
        {"parts": (), "packs": 20_000, "pack_size": 4096, "large_packs": 2_000_000, "max_tokens_per_rank": 8192}
        | {"global_batch": 64, "rounds": 5},
        {"parts": ("memmap", "parquet"), "packs": 2000, "large_packs": 50_000, "rounds": 1},
    ),
    "integrations": _peer(
        "integrations:bench_integrations",
        "rows for TRL's trainer, against its own data path",
        {"packs": 2000, "pack_size": 4096, "global_batch": 32, "workers": (0, 2), "steps": 1200, "rounds": 5},
        {"packs": 400, "pack_size": 512, "global_batch": 8, "workers": (0,), "steps": 100, "rounds": 1},
    ),
    "live": _peer(
        "streaming:bench_live",
        "live data on several ranks: tokens per second and imbalance of windows, packs and the modulo reading",
        {"ranks": 8, "global_batch": 512, "max_tokens_per_rank": 8192, "steps": 16, "rounds": 3},
        {"ranks": 4, "global_batch": 64, "steps": 8, "rounds": 1},
    ),
    "context": _peer(
        "context:bench_context",
        "context-parallel sizes of every row on up to `ranks`, against Megatron-Core's planner",
        {"ranks": 4096, "global_batch": 128},
        {"ranks": 8, "global_batch": 16},
        uses_megatron=True,
    ),
    "soak": _peer(
        "soaking:bench_soak",
        "memory, files and threads of a loader with workers, over 20 minutes",
        {"parts": (), "packs": 1024, "pack_size": 1024, "global_batch": 32, "workers": (4,), "part_limit_s": 200.0},
        {"parts": ("memmap", "parquet"), "packs": 64, "pack_size": 128, "global_batch": 8, "workers": (2,)}
        | {"part_limit_s": 0.0},
    ),
    "corpus": _peer(
        "corpus:bench_corpus",
        "pages that a step reads of a pretraining corpus larger than the cache",
        {"sequences": (300_000,), "pack_size": 2048, "global_batch": 64},
        {"sequences": (20_000,), "global_batch": 8},
        uses_megatron=True,
    ),
    "kernels": _peer(
        "kernels:bench_kernels",
        "kernels, waits and copied bytes of one microbatch, counted on a CPU",
        {"sequences": (8, 32, 64), "pack_size": 1024, "hidden": 64},
        {"sequences": (2, 8), "pack_size": 64},
        uses_megatron=True,
    ),
    "checkpoint": _peer(
        "checkpoints:bench_checkpoint",
        "save a checkpoint with and without hashes, and check it at resume against loading it",
        {"layers": 8, "hidden": 512, "ranks": 8, "rounds": 5},
        {"layers": 1, "hidden": 64, "ranks": 2, "rounds": 1},
        uses_megatron=True,
    ),
}

if __name__ == "__main__":
    # Before the command line lists them.
    BENCHES.update(PEERS)
    from harness.cli import main

    if sys.argv[1:2] == ["all"]:
        from tests.benchmarks.everything import write_page

        write_page(sys.argv[2:])
    else:
        sys.argv = ["harness", "bench", *sys.argv[1:]]
        main()
