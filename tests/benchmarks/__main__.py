"""`python -m tests.benchmarks NAME [KEY=VALUE]...`: `harness bench`, and the benches against other packages.

`python -m tests.benchmarks all [--quick] [PAGE]` runs every bench in a process of its own, and writes `BENCHMARKS.md`
or another page from them; it takes 45 minutes.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from harness.bench import BENCHES, Bench

PEERS = {
    "formats": Bench("formats:bench_formats", "read, open and write each format, against plain numpy arrays"),
    "pack": Bench("packing:bench_packing", "plan packs of 13 million sequences, against plain best fit and trl"),
    "repack": Bench(
        "packing:bench_repacking",
        "plan again over 13 million stored sequences, and read through a plan",
        "QUICK_REPACK",
    ),
    "prepare": Bench(
        "preparing:bench_preparing",
        "tokenize, against the tokenizers library alone; memory as the input grows",
    ),
    "tokens": Bench("tokens:bench_tokens", "token shards to .bin and .idx, against Megatron-Core's builder"),
    "integrations": Bench(
        "integrations:bench_integrations",
        "rows for other trainers, against the data paths of TRL, Bridge and torchtitan",
    ),
    "soak": Bench("soaking:bench_soak", "memory, files and threads of a loader with workers, over 20 minutes"),
    "corpus": Bench(
        "corpus:bench_corpus",
        "start of pretraining on a blend of many .bin and .idx pairs",
        uses_megatron=True,
    ),
}


def peers() -> dict[str, Bench]:
    """Return the benches of this package by name."""
    return {name: replace(bench, package="tests.benchmarks") for name, bench in PEERS.items()}


if __name__ == "__main__":
    # Before the command line lists them.
    BENCHES.update(peers())
    from harness.cli import main

    if sys.argv[1:2] == ["all"]:
        from tests.benchmarks.everything import write_page

        write_page(sys.argv[2:])
    else:
        sys.argv = ["harness", "bench", *sys.argv[1:]]
        main()
