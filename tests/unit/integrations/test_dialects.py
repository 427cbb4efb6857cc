"""Rows in the dialects of training code: equal data, and keys that cannot be taken for each other."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from harness.errors import ConfigError, ScheduleError
from harness.integrations import DialectError, HuggingFaceRow, MegatronRow, Row, require_dialect
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch, zero_loss_row
from tests.integrations.probes import thd_of


def row_of(*sequences: tuple[list[int], list[int]], pad_to_multiple: int = 1) -> ThdBatch:
    views = [SequenceView(np.array(ids, np.int32), np.array(mask, np.uint8)) for ids, mask in sequences]
    return build_thd_batch(views, pad_to_multiple=pad_to_multiple)


TWO = row_of(([5, 6, 7, 8], [0, 1, 1, 0]), ([3, 2, 9], [1, 0, 0]))


def test_megatron_labels_are_the_tokens_after_and_those_of_huggingface_the_trained_tokens_themselves() -> None:
    row = MegatronRow.of(TWO)

    assert row["tokens"].tolist() == [[5, 6, 7, 3, 2]]
    assert row["labels"].tolist() == [[6, 7, 8, 2, 9]]
    assert row["loss_mask"].tolist() == [[0, 1, 1, 1, 0]]
    assert row["cu_seqlens"].tolist() == [0, 3, 5]
    assert row["max_seqlen"] == 3
    row = HuggingFaceRow.of(TWO)

    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 3, 2, 9]]
    assert row["labels"].tolist() == [[-100, -100, 7, 8, -100, 2, -100]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == [0, 4, 7]
    assert row["max_length_q"] == row["max_length_k"] == 4


def kept_by(kind: type[Row], row: ThdBatch) -> ThdBatch:
    """Return what a dialect keeps of a row: only Megatron's has a padding mask."""
    return row if kind is MegatronRow else replace(row, padding_mask=np.zeros_like(row.padding_mask))


def same(one: ThdBatch, other: ThdBatch) -> bool:
    names = ThdBatch.__dataclass_fields__
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("row", [TWO, zero_loss_row(), row_of(([4, 4], [1, 0]))])
@pytest.mark.parametrize("kind", [MegatronRow, HuggingFaceRow])
def test_a_row_comes_back_from_both_dialects(kind: type[Row], row: ThdBatch) -> None:
    assert same(thd_of(kind.of(row)), kept_by(kind, row))
    assert same(thd_of(kind.of(row).tensors()), kept_by(kind, row))


def test_padding_comes_back_from_the_megatron_dialect_and_is_refused_by_the_other() -> None:
    padded = row_of(([5, 6, 7, 8], [0, 1, 1, 0]), ([3, 2, 9], [1, 0, 0]), pad_to_multiple=4)

    assert same(thd_of(MegatronRow.of(padded).tensors()), padded)
    with pytest.raises(ScheduleError, match="3 padding tokens"):
        HuggingFaceRow.of(padded)


@pytest.mark.parametrize(
    ("kind", "key"), [(MegatronRow, "input_ids"), (MegatronRow, "cu_seq_lens_q"), (HuggingFaceRow, "tokens")]
)
def test_a_key_of_the_other_dialect_is_an_error_that_names_both(kind: type[Row], key: str) -> None:
    row = kind.of(TWO)

    for read in (row.__getitem__, row.get, row.pop):
        with pytest.raises(
            DialectError, match=rf"'{key}' is a key of the .* dialect, but this row uses the {row.dialect}"
        ):
            read(key)
    with pytest.raises(DialectError):
        copy.deepcopy(row).tensors()[key]


def test_other_keys_are_missing_as_in_any_dict_and_other_dialects_are_refused() -> None:
    row = MegatronRow.of(TWO)

    assert row.get("token_type_ids", 7) == row.pop("token_type_ids", 7) == 7
    with pytest.raises(KeyError, match="token_type_ids"):
        row["token_type_ids"]
    with pytest.raises(ConfigError, match="choose one of: megatron, huggingface"):
        require_dialect("megatorn")
