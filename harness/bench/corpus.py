"""`harness bench corpus`: time to the first samples of a blend of many sources, with each fast-start option."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from harness.bench.figures import BenchReport, Figure, Progress, take_turns
from harness.bench.workspace import Workspace
from harness.checks import bounded, check_numbers
from harness.indexed import UINT16, IndexedWriter, count_sequences, save_counts
from harness.loader import CorpusConfig, CorpusSource, SplitSources
from harness.megatron.data import build_corpus

_VOCABULARY = 50_000
_FIRST = 64


@dataclass(frozen=True)
class CorpusSettings:
    """Sizes of the bench.

    Attributes:
        sources: .bin and .idx pairs in the blend, of equal weight.
        documents: documents of each source.
        tokens: mean length of a document.
        sequence_length, samples: size of the training set.
        rounds: turns of each side of a comparison; figures are medians over them.
    """

    sources: int = bounded(1000, lowest=2)
    documents: int = bounded(2000, lowest=1)
    tokens: int = bounded(200, lowest=1)
    sequence_length: int = bounded(2048, lowest=1)
    samples: int = bounded(150_000, lowest=1)
    rounds: int = bounded(5, lowest=1)

    def __post_init__(self) -> None:
        check_numbers(self, "")


QUICK = CorpusSettings(sources=20, documents=50, samples=50, rounds=2)


def bench_corpus(settings: CorpusSettings, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure the seconds until a blend is open and its first samples are read. Files are in the machine's cache."""
    report = BenchReport("corpus", asdict(settings))
    folder = workspace.folder / "corpus"
    progress(f"writing {settings.sources:,} pairs")
    prefixes = [str(folder / f"source-{number:05d}") for number in range(settings.sources)]
    for number, prefix in enumerate(prefixes):
        _write(prefix, settings, seed=number)
    save_counts(count_sequences(prefixes, vocab_size=_VOCABULARY), folder / "counts.json")
    plain = CorpusConfig(
        blend_per_split=SplitSources(train=[CorpusSource(prefix, 1.0) for prefix in prefixes]),
        sequence_length=settings.sequence_length,
        path_to_cache=str(folder / "cache"),
    )
    counted = replace(plain, per_dataset_sequences_path=str(folder / "counts.json"))
    fast = replace(counted, fast_cache_load=True)
    progress("building the indices")
    report.add(Figure("indices built for the first time", _start(plain, settings), "s"))
    progress("with and without the fast options, in turns")
    sides = {
        "indices found": plain,
        "and counts from one file": counted,
        "and fast_cache_load": fast,
        "and defer_npy_index_mmap": replace(fast, defer_npy_index_mmap=True),
    }
    turns = {name: partial(_start, config, settings) for name, config in sides.items()}
    for name, seconds in take_turns(turns, rounds=settings.rounds).items():
        report.add_samples(name, seconds, "s")
    report.add_ratio("all fast options", "indices found", "and defer_npy_index_mmap")
    report.notes.append(f"each until {_FIRST} samples were read; on a remote disk the options save more")
    return report


def _start(config: CorpusConfig, settings: CorpusSettings, number: int = 0) -> float:
    start = time.perf_counter()
    corpus = build_corpus(config, 0, (settings.samples, None, None), _VOCABULARY, {})
    for index in range(min(_FIRST, settings.samples)):
        corpus.train[index]
    return time.perf_counter() - start


def _write(prefix: str, settings: CorpusSettings, *, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 2 * settings.tokens, settings.documents)
    with IndexedWriter(Path(prefix), dtype=UINT16) as writer:
        writer.append(rng.integers(0, _VOCABULARY, lengths.sum()).astype(np.uint16), lengths)
