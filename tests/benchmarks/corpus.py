"""The pages that a step reads of a corpus larger than the cache, in Megatron's order and in blocks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.bench.figures import BenchReport, Figure, Progress
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace
from harness.indexed.index import UINT16, IndexedWriter
from harness.loader import CorpusConfig
from harness.megatron.data.corpus import build_corpus

_VOCABULARY = 50_000
_MEAN_TOKENS = 200
_PAGE_BYTES = 4096
# Of the corpus, for the cache that is smaller than it.
_CACHED = 0.1


def bench_corpus(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Count the pages of a .bin that the steps of one epoch touch, and those that a cache of a tenth has to read."""
    report = BenchReport("corpus")
    folder, (documents,) = workspace.folder / "corpus", sizes.first("sequences", 1)
    progress(f"writing {documents:,} documents")
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 2 * _MEAN_TOKENS, documents)
    prefix = folder / "local"
    with IndexedWriter(prefix, dtype=UINT16) as writer:
        writer.append(rng.integers(0, _VOCABULARY, lengths.sum()).astype(np.uint16), lengths)
    plain = CorpusConfig(
        path=str(prefix), sequence_length=sizes.pack_size, split="100", path_to_cache=str(folder / "cache")
    )
    # Blocks of a power of two, at most a 256th of the documents.
    local = replace(plain, block_documents=1 << (documents // 256).bit_length() - 1, window_blocks=16)
    size = Path(f"{prefix}.bin").stat().st_size
    for name, config in (("Megatron's order", plain), ("in blocks", local)):
        train = build_corpus(config, 0, (1, None, None), _VOCABULARY, {}).train
        steps = len(train) // sizes.global_batch
        held: OrderedDict[int, None] = OrderedDict()
        touched = read = 0
        for step in range(steps):
            pages: dict[int, None] = {}
            for sample in range(step * sizes.global_batch, (step + 1) * sizes.global_batch):
                pages.update(dict.fromkeys(_pages_of(train, sample)))
            touched += len(pages)
            for page in pages:
                read += page not in held
                held[page] = None
                held.move_to_end(page)
                if len(held) > _CACHED * size / _PAGE_BYTES:
                    held.popitem(last=False)
        report.add(Figure(f"{name}, pages touched a step", touched / steps, ""))
        report.add(Figure(f"{name}, pages read a step", read / steps, ""))
    target = 10 if documents >= 300_000 else None
    report.add_ratio(
        "pages read, Megatron's order to blocks",
        "Megatron's order, pages read a step",
        "in blocks, pages read a step",
        at_least=target,
    )
    report.notes.append(
        f"pages of {_PAGE_BYTES:,} bytes of a {size / 1e6:,.0f} MB corpus in one epoch, counted from its indices; read "
        f"are those that a cache of {_CACHED:.0%} of it, least recently used first out, does not have"
    )
    return report


def _pages_of(train: Any, sample: int) -> list[int]:
    at = int(train.shuffle_index[sample])
    (first, offset), (last, end) = train.sample_index[at].tolist(), train.sample_index[at + 1].tolist()
    documents = np.asarray(train.document_index[first : last + 1])
    index = train.dataset.index
    starts = index.sequence_pointers[documents].astype(np.int64)
    stops = starts + 2 * index.sequence_lengths[documents].astype(np.int64)
    # The sample has one token of the next one.
    starts[0], stops[-1] = starts[0] + 2 * offset, starts[-1] + 2 * (end + 1)
    pages: list[int] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if stop > start:
            pages += range(start // _PAGE_BYTES, (stop - 1) // _PAGE_BYTES + 1)
    return pages
