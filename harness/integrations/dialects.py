"""One row as the tensors that training code expects, in two dialects that cannot be confused.

Megatron's models get labels that are shifted already; models of Hugging Face get the tokens as labels and shift them
themselves. A row that is fed to the wrong one trains the token after the next, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np

from harness.checks import require_choice
from harness.errors import HarnessError, ScheduleError
from harness.thd import ThdBatch

IGNORED = -100


class DialectError(HarnessError, KeyError):
    """A row was asked for a key of the other dialect."""

    __str__ = HarnessError.__str__


class Row(dict[str, Any]):
    """One row as a dict of arrays, or of tensors after `tensors()`; the class is its dialect.

    Any key of another dialect raises DialectError, from `get` and `pop` too.
    """

    dialect: ClassVar[str]
    keys_of_dialect: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, row: ThdBatch) -> Self:
        """Return a row of the loader in this dialect, as arrays."""
        raise NotImplementedError

    def tensors(self, *, pin: bool = False) -> Self:
        """Return the row with tensors in place of arrays, in pinned memory if wanted; maxima stay integers."""
        import torch

        def tensor(value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            made = torch.from_numpy(np.ascontiguousarray(value))
            return made.pin_memory() if pin else made

        return type(self)({key: tensor(value) for key, value in self.items()})

    def to(self, device: Any, *, non_blocking: bool = False) -> Self:
        """Return the row with its tensors on `device`."""
        tensors = {key: value for key, value in self.items() if hasattr(value, "to")}
        return type(self)(self | {key: value.to(device, non_blocking=non_blocking) for key, value in tensors.items()})

    def __missing__(self, key: str) -> Any:
        self._refuse(key)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, or the default; raise DialectError for a key of another dialect."""
        self._refuse(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove and return the value of `key`; raise DialectError for a key of another dialect."""
        self._refuse(key)
        return super().pop(key, *default)

    def _refuse(self, key: str) -> None:
        for other in DIALECTS.values():
            if key in other.keys_of_dialect and key not in (*self.keys_of_dialect, *self):
                what = f"{key!r} is a key of the {other.dialect} dialect, but this row uses the {self.dialect} dialect "
                what += f"({', '.join(self)})"
                fix = f"open the data with dialect={other.dialect!r}, or use the keys of {self.dialect}, whose "
                fix += "labels are shifted differently"
                raise DialectError(what, where=type(self).__name__, fix=fix)


class MegatronRow(Row):
    """One row as Megatron's models take it: T model tokens with padding, S sequences, labels already shifted.

    Keys:
        tokens, labels, position_ids: int64 [1, T]; labels[0, i] is the token after tokens[0, i].
        loss_mask: float32 [1, T].
        cu_seqlens, cu_seqlens_padded: int32 [S + 1].
        max_seqlen: padded tokens of the longest sequence, int.
        padding_mask: bool [1, T], True at padding.
    """

    dialect = "megatron"
    of_sequences = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
    keys_of_dialect = ("tokens", "labels", "loss_mask", "position_ids", *of_sequences, "padding_mask")

    @classmethod
    def of(cls, row: ThdBatch) -> Self:
        values = {name: getattr(row, name) for name in cls.keys_of_dialect}
        return cls({name: value if name in cls.of_sequences else value[None] for name, value in values.items()})


class HuggingFaceRow(Row):
    """One row as models of Hugging Face take it without padding: T stored tokens, S sequences; the model shifts.

    Every sequence has one token more than in the Megatron dialect: its last one, which is only a label.

    Keys:
        input_ids, position_ids: int64 [1, T]; positions count from 0 in every sequence.
        labels: int64 [1, T], `input_ids` where the token is trained and -100 elsewhere; -100 at the first token of
            every sequence, so that none is predicted from the sequence before it.
        cu_seq_lens_q, cu_seq_lens_k: int32 [S + 1].
        max_length_q, max_length_k: tokens of the longest sequence, int.
    """

    dialect = "huggingface"
    of_sequences = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    keys_of_dialect = ("input_ids", "labels", "position_ids", *of_sequences)

    @classmethod
    def of(cls, row: ThdBatch) -> Self:
        """Return a row of the loader in this dialect, as arrays; raise ScheduleError for padding or odd labels."""
        lengths = np.diff(row.cu_seqlens).astype(np.int64)
        # Not the padding mask: it is True for all of a row that has nothing to train.
        if padding := int(row.cu_seqlens_padded[-1] - row.cu_seqlens[-1]):
            what = f"a row has {padding:,} padding tokens, which the huggingface dialect does not support"
            raise ScheduleError(what, where="RankLayout.pad_to_multiple", fix="set it to 1")
        stops = np.cumsum(lengths + 1)
        is_last = np.zeros(int(stops[-1]), dtype=np.bool_)
        is_last[stops - 1] = True
        is_first = np.roll(is_last, 1)
        input_ids = np.empty(is_last.shape[0], dtype=np.int64)
        input_ids[~is_last] = row.tokens
        input_ids[is_last] = row.labels[np.cumsum(lengths) - 1]
        if not np.array_equal(input_ids[~is_first], row.labels):
            what = "a row has labels that differ from the next tokens, which the huggingface dialect does not support"
            raise ScheduleError(what, where="the row", fix="use dialect='megatron'")
        labels = np.full_like(input_ids, IGNORED)
        labels[~is_first] = np.where(row.loss_mask > 0, row.labels, IGNORED)
        bounds = np.concatenate([[0], stops]).astype(np.int32)
        longest = int(lengths.max()) + 1
        positions = np.arange(input_ids.shape[0], dtype=np.int64) - np.repeat(bounds[:-1].astype(np.int64), lengths + 1)
        tokens = {"input_ids": input_ids[None], "labels": labels[None], "position_ids": positions[None]}
        sizes = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.copy()}
        return cls(**tokens, **sizes, max_length_q=longest, max_length_k=longest)


DIALECTS: Mapping[str, type[Row]] = MappingProxyType({kind.dialect: kind for kind in (MegatronRow, HuggingFaceRow)})


def require_dialect(name: str) -> type[Row]:
    """Return the class of a dialect's rows; raise ConfigError for a name that is none."""
    require_choice(name, DIALECTS, setting="dialect")
    return DIALECTS[name]
