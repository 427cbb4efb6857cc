"""Sequences come back from disk as they went in, in any order."""

from __future__ import annotations

import numpy as np

from harness.prep.spool import SpoolWriter
from harness.records import Pack


def test_sequences_come_back_in_the_order_asked_for(tmp_path):
    writer = SpoolWriter(tmp_path / "spool")
    first = np.array([10, 11, 20, 21, 22], np.int32), np.array([1, 0, 0, 1, 0], np.uint8), np.array([2, 3], np.int32)
    second = np.array([30, 31], np.int32), np.array([1, 0], np.uint8), np.array([2], np.int32)
    writer.append(*first)
    writer.append(*second)
    spool = writer.finish()
    assert (len(spool), spool.num_tokens, spool.num_trained_tokens) == (3, 7, 3)
    assert spool.lengths.tolist() == [2, 3, 2]
    assert spool.pack(np.array([2, 1])) == Pack(
        input_ids=[30, 31, 20, 21, 22], loss_mask=[1, 0, 0, 1, 0], seq_start_id=[0, 2]
    )


def test_a_spool_of_nothing_can_be_read(tmp_path):
    spool = SpoolWriter(tmp_path / "spool").finish()
    assert (len(spool), spool.num_tokens) == (0, 0)
