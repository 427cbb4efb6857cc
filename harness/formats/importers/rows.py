"""Conversion of one row of another tool to a pack, with counts of every change; `datasets` finds the rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from harness.errors import FormatError
from harness.formats.jsonl import IGNORED_LABEL, check_labels, to_int32, whole_numbers
from harness.records import Int32Array, Pack

# Changes of an import, as counted in the manifest's provenance.
CLEARED_LAST = "import_cleared_last_positions"
CLEARED_FIRST = "import_cleared_first_labels"
REMOVED_PADDING = "import_removed_padding_tokens"
APPENDED_LAST = "import_appended_last_labels"

_ROW_MAGIC = 0x53465442  # Megatron-Bridge's packed rows in an indexed dataset begin with it.
_ROW_VERSION = 1
_ROW_HEAD = 3


def clear_last_positions(pack: Pack, counts: Counter[str]) -> Pack:
    """Untrain the last position of each sequence, which has no next token in it."""
    lasts = np.append(pack.seq_start_id[1:], len(pack)) - 1
    trained = int(np.count_nonzero(pack.loss_mask[lasts]))
    if not trained:
        return pack
    counts[CLEARED_LAST] += trained
    mask = pack.loss_mask.copy()
    mask[lasts] = 0
    return Pack(pack.input_ids, mask, pack.seq_start_id)


def pack_of_bridge_row(words: Int32Array) -> Pack:
    """Convert an item of an indexed dataset: head, starts, and tokens with the mask in their highest bit."""
    if words.shape[0] < _ROW_HEAD or words[0] != _ROW_MAGIC or words[1] != _ROW_VERSION:
        raise FormatError("does not begin as a packed row of version 1")
    num_starts = int(words[2])
    begin = _ROW_HEAD + num_starts
    if not num_starts > 0 or begin >= words.shape[0]:
        raise FormatError(f"claims {num_starts:,} sequences in {words.shape[0]:,} words")
    tokens = words[begin:].view(np.uint32)
    mask = (tokens >> np.uint32(31)).astype(np.uint8)
    ids = (tokens & np.uint32(0x7FFFFFFF)).astype(np.int32)
    pack = Pack(ids, mask, words[_ROW_HEAD:begin].astype(np.int32))
    problem = pack.problem()
    if problem is not None:
        raise FormatError(problem)
    return pack


def pack_of_swift(fields: dict[str, Any], counts: Counter[str]) -> Pack:
    """Convert a pre-packed line: labels aligned with tokens, -100 if untrained; `lengths` are without padding."""
    ids, labels, lengths = (whole_numbers(fields, name) for name in ("input_ids", "labels", "lengths"))
    # As Python numbers: a sum of huge lengths wraps around in int64.
    real = sum(lengths.tolist())
    if lengths.shape[0] == 0 or (lengths <= 0).any() or real > ids.shape[0] or labels.shape != ids.shape:
        raise FormatError(
            f"has {ids.shape[0]:,} input_ids, {labels.shape[0]:,} labels and lengths that sum to {real:,}"
        )
    counts[REMOVED_PADDING] += ids.shape[0] - real
    ids, labels = ids[:real], labels[:real]
    starts = np.cumsum(lengths) - lengths
    trained = labels != IGNORED_LABEL
    check_labels(labels[trained], ids[trained], np.flatnonzero(trained))
    counts[CLEARED_FIRST] += int(np.count_nonzero(trained[starts]))
    trained[starts] = False
    mask = np.zeros(real, np.uint8)
    mask[:-1] = trained[1:]
    return Pack(to_int32(ids), mask, to_int32(starts))


def pack_of_megatron_lm(fields: dict[str, Any], counts: Counter[str]) -> Pack:
    """Convert a row of `SFTDataset`: labels[j] is the token after tokens[j], or -100; `cu_seqlens` bounds sequences.

    The row was cut by one token to align it, so the label of its last position is missing from `tokens`: if trained,
    it is appended, and trained as before.
    """
    ids, labels, bounds = (whole_numbers(fields, name) for name in ("tokens", "labels", "cu_seqlens"))
    n = ids.shape[0]
    if labels.shape != ids.shape or n == 0:
        raise FormatError(f"has {n:,} tokens but {labels.shape[0]:,} labels")
    if bounds.shape[0] < 2 or bounds[0] != 0 or bounds[-1] > n or (np.diff(bounds) <= 0).any():
        raise FormatError(f"has cu_seqlens {bounds.tolist()[:8]} for {n:,} tokens")
    trained = labels != IGNORED_LABEL
    if "loss_mask" in fields:
        stored = np.asarray(fields["loss_mask"], np.float64)
        if stored.shape != ids.shape or not np.isin(stored, (0.0, 1.0)).all():
            raise FormatError("has a loss_mask that is not a 0 or 1 for each token")
        trained &= stored == 1.0
    ids, labels, trained = ids[: bounds[-1]], labels[: bounds[-1]], trained[: bounds[-1]].copy()
    counts[REMOVED_PADDING] += n - ids.shape[0]
    lasts = bounds[1:] - 1
    inner = lasts[:-1]
    counts[CLEARED_LAST] += int(np.count_nonzero(trained[inner]))
    trained[inner] = False
    if trained[-1]:
        counts[APPENDED_LAST] += 1
        ids = np.append(ids, labels[-1])
        trained = np.append(trained, False)
        labels = np.append(labels, IGNORED_LABEL)
    at = np.flatnonzero(trained)
    check_labels(labels[at], ids[at + 1], at)
    return Pack(to_int32(ids), trained.astype(np.uint8), to_int32(bounds[:-1]))
