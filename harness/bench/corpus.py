"""`harness bench corpus`: how long a blend of many sources takes to its first samples, with each fast-start option."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from harness.bench.figures import BenchReport, Figure
from harness.bench.timing import take_turns
from harness.bench.workspace import Workspace
from harness.indexed import UINT16, IndexedWriter, count_sequences, save_counts
from harness.loader.corpus import CorpusConfig, CorpusSource, SplitSources
from harness.megatron.data import build_corpus

_VOCABULARY = 50_000
_FIRST = 64


@dataclass(frozen=True)
class CorpusSettings:
    """Sizes of the bench.

    Attributes:
        sources: pairs in the blend, of equal weight.
        documents: of each; `tokens` is the mean length of one.
        sequence_length, samples: of the training set.
        rounds: turns of each side.
    """

    sources: int = 1000
    documents: int = 2000
    tokens: int = 200
    sequence_length: int = 2048
    samples: int = 150_000
    rounds: int = 5


QUICK = CorpusSettings(sources=20, documents=50, samples=50, rounds=2)


def bench_corpus(settings: CorpusSettings, workspace: Workspace, say: Callable[[str], None]) -> BenchReport:
    """Seconds until a blend is open and has given its first samples. Files are in the machine's cache."""
    report = BenchReport("corpus", asdict(settings))
    folder = workspace.folder / "corpus"
    say(f"writing {settings.sources:,} pairs")
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
    say("building the indices")
    report.add(Figure("indices built for the first time", _start(plain, settings), "s"))
    say("with and without the fast options, in turns")
    sides = {
        "indices found": plain,
        "and counts from one file": counted,
        "and fast_cache_load": fast,
        "and defer_npy_index_mmap": replace(fast, defer_npy_index_mmap=True),
    }
    turns = {name: partial(_start, config, settings) for name, config in sides.items()}
    taken = take_turns(turns, rounds=settings.rounds)
    for name, seconds in taken.items():
        report.add_samples(name, seconds, "s")
    report.add_ratio("all fast options", "indices found", "and defer_npy_index_mmap")
    report.notes.append(f"each until {_FIRST} samples were read; what the options save on a disk far away is more")
    return report


def _start(config: CorpusConfig, settings: CorpusSettings, number: int = 0) -> float:
    began = time.perf_counter()
    corpus = build_corpus(config, 0, (settings.samples, None, None), _VOCABULARY, {})
    for index in range(min(_FIRST, settings.samples)):
        corpus.train[index]
    return time.perf_counter() - began


def _write(prefix: str, settings: CorpusSettings, *, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 2 * settings.tokens, settings.documents)
    with IndexedWriter(Path(prefix), dtype=UINT16) as writer:
        writer.append(rng.integers(0, _VOCABULARY, lengths.sum()).astype(np.uint16), lengths)
