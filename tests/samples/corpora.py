"""Write small pretraining corpora, and read the samples of a run in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from harness.formats import open_writer
from harness.indexed.index import UINT16, IndexedWriter
from harness.loader import CorpusConfig, LoaderConfig, LoaderState, RankBatch, RankLayout
from harness.megatron.data.corpus import Corpus, TokenIds, find_packs, open_corpus
from harness.megatron.data.samples import SampleLoader, SampleReader
from harness.megatron.job import runtime
from harness.records import Pack

EOD, VOCAB, SIZE = 0, 300, 32
ALONE = runtime.Runtime(torch.device("cpu"), 0, 1, 0)


def write_corpus(prefix: Path, documents: int, *, seed: int) -> Path:
    """Write documents of 3 to 60 tokens with ids 1 to 299, each followed by an EOD."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, dtype=UINT16) as writer:
        for length in rng.integers(3, 60, documents):
            document = np.append(rng.integers(1, VOCAB, length), EOD)
            writer.append(document, np.array([len(document)]))
    return prefix


def settings(path: Path | str = "", **changes: Any) -> CorpusConfig:
    return CorpusConfig(path=str(path), **{"sequence_length": SIZE, "split": "90,10,0", **changes})


def opened(config: CorpusConfig, *, train: int = 64, valid: int | None = 8, seed: int = 7) -> Corpus:
    """Open a corpus as every rank of a run does; this is the only rank."""
    return open_corpus(
        config,
        seed=seed,
        sizes=(train, valid, valid),
        vocab_size=VOCAB,
        packs=find_packs(config),
        reads=True,
        ranks=ALONE,
    )


def batches(
    corpus: Corpus, config: CorpusConfig, count: int = 64, *, num_workers: int = 0, **layout: int
) -> list[RankBatch]:
    rank_layout = RankLayout(**layout)
    reader = SampleReader(
        corpus.train,
        layout=rank_layout,
        sequence_length=SIZE,
        micro_batch_size=config.micro_batch_size,
        boundary=config.eod if config.reset_attention_mask else None,
    )
    start = LoaderState(7, fingerprint=corpus.fingerprint, order=corpus.order)
    loading = LoaderConfig(global_batch_size=8, num_workers=num_workers)
    with SampleLoader(reader, loading, layout=rank_layout, num_samples=count, start=start) as loader:
        return list(loader)


def megatrons(config: CorpusConfig, train: int, **changes: Any) -> Any:
    """Build the training set as a user of Megatron-Core does, with the attention mask."""
    blend = [config.path] if not config.blend else [source.path for source in config.blend]
    weights = [source.weight for source in config.blend] or None
    dataset_config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=SIZE,
        blend=(blend, weights),
        split=config.split,
        tokenizer=TokenIds(EOD, VOCAB),
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        eod_mask_loss=config.eod_mask_loss,
        **changes,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [train, 8, 8], lambda: True, dataset_config).build()[0]


def write_sft(folder: Path) -> list[Pack]:
    packs = [
        Pack(np.arange(20) + number, np.r_[np.zeros(9), 1, 0, np.ones(8), 0].astype(np.uint8), [0, 11])
        for number in range(12)
    ]
    with open_writer(folder, format="binidx", pack_size=24) as writer:
        for pack in packs:
            writer.append(pack)
    return packs


def count_tokens(prefix: Path) -> int:
    return Path(f"{prefix}.bin").stat().st_size // 2
