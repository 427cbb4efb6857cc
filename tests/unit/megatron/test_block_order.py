"""A pretraining order in blocks: Megatron's samples, each token once an epoch, and far fewer pages to read."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import SIZE, batches, opened, settings
from megatron.core.datasets import helpers

from harness.indexed.index import UINT16, IndexedWriter
from harness.loader.corpus import CorpusSource
from tests.benchmarks.corpus import _PAGE_BYTES, _pages_of
from tests.samples.small_packs import batch_digest

pytestmark = pytest.mark.usefixtures("job")


def write(prefix: Path, lengths: np.ndarray) -> Path:
    """Write documents whose tokens are their positions in the file, so that each is seen where it is read."""
    with IndexedWriter(prefix, dtype=UINT16) as writer:
        writer.append(np.arange(lengths.sum()).astype(np.uint16), lengths)
    return prefix


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = np.random.default_rng(3).integers(0, 90, 304)
    return write(tmp_path_factory.mktemp("numbered") / "corpus", lengths)


def blocks(path: Path, **changes: Any) -> Any:
    return settings(path, block_documents=8, window_blocks=3, split="100", **changes)


def test_samples_are_those_that_megatron_cuts_from_the_documents_in_their_order(numbered: Path) -> None:
    train = opened(blocks(numbered), train=700, valid=None).train
    lengths = np.asarray(train.dataset.sequence_lengths)
    epochs = train.document_index.shape[0] // 304
    assert epochs == 2
    theirs = helpers.build_sample_idx(
        lengths.copy(), np.asarray(train.document_index), SIZE, epochs, int(lengths.sum()), True, True
    )
    np.testing.assert_array_equal(train.sample_index, theirs)
    assert train.sample_index.dtype == theirs.dtype
    assert sorted(train.shuffle_index.tolist()) == list(range(len(train)))
    # Every epoch has every document once, in another order.
    first, second = train.document_index[:304].tolist(), train.document_index[304:].tolist()
    assert sorted(first) == sorted(second) == list(range(304))
    assert first != second


def test_documents_and_samples_are_mixed_within_windows_only(numbered: Path) -> None:
    train = opened(blocks(numbered), valid=None).train
    documents = train.document_index
    windows = [documents[at : at + 24] for at in range(0, 304, 24)]
    for some in windows:
        assert len({int(document) // 8 for document in some}) <= 3
    window = 24 * int(np.asarray(train.dataset.sequence_lengths).sum()) // (304 * SIZE)
    at = np.arange(len(train)) // window
    np.testing.assert_array_equal(train.shuffle_index // window, at)
    assert (np.diff(train.shuffle_index.astype(int)) == 1).mean() < 0.2


def test_more_samples_and_epochs_keep_the_order_of_the_earlier_ones(numbered: Path) -> None:
    few, many = (opened(blocks(numbered), train=count, valid=None) for count in (64, 1500))
    assert len(many.train) > 3 * len(few.train)
    assert (few.order, few.fingerprint) == (many.order, many.fingerprint)
    mine, theirs = batches(few, blocks(numbered), count=len(few.train)), batches(many, blocks(numbered), count=1500)
    same = len(few.train) // 8
    assert [batch_digest(one) for one in mine[:same]] == [batch_digest(one) for one in theirs[:same]]
    assert opened(replace(blocks(numbered), window_blocks=4), valid=None).order != few.order


def test_fast_options_and_blends_read_the_same_samples(numbered: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", np.random.default_rng(4).integers(1, 90, 300))
    plain = blocks(numbered, blend=[CorpusSource(str(numbered), 0.6), CorpusSource(str(other), 0.4)])
    plain = replace(plain, path_to_cache=str(tmp_path / "cache"))
    fast = replace(plain, fast_cache_load=True, defer_npy_index_mmap=True)
    one = opened(plain)
    two = opened(fast)
    for mine, theirs in zip(batches(one, plain), batches(two, fast), strict=True):
        assert batch_digest(mine) == batch_digest(theirs)
    first, second = one.train.datasets
    assert first.order_config.seed != second.order_config.seed


def pages_read(train: Any, *, cache: int) -> int:
    """Count the pages that an epoch reads with a least-recently-used cache of `cache` pages."""
    held: OrderedDict[int, None] = OrderedDict()
    read = 0
    for sample in range(len(train)):
        for page in _pages_of(train, sample):
            read += page not in held
            held[page] = None
            held.move_to_end(page)
            if len(held) > cache:
                held.popitem(last=False)
    return read


def test_a_corpus_ten_times_the_cache_is_read_once_and_not_a_page_for_every_document(tmp_path: Path) -> None:
    lengths = np.random.default_rng(5).integers(20, 160, 16_000)
    path = write(tmp_path / "corpus", lengths)
    pages = int(lengths.sum()) * 2 // _PAGE_BYTES + 1
    global_, local = (
        opened(settings(path, split="100", sequence_length=256, **changes), train=1, valid=None).train
        for changes in ({}, {"block_documents": 128, "window_blocks": 4})
    )
    by_megatron, in_blocks = (pages_read(train, cache=pages // 10) for train in (global_, local))
    # A window has 512 of the 16,000 documents; pages at the edges of blocks are read twice.
    assert pages <= in_blocks < 1.3 * pages
    assert by_megatron > 10 * in_blocks
