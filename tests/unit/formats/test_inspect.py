"""Counts in the summary of a dataset, and marks of trained tokens in the text of a pack."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console
from small_packs import write_packs

from harness.errors import ConfigError
from harness.formats import Provenance, open_dataset
from harness.formats.inspect import (
    TRAINED_STYLE,
    find_tokenizer,
    inspect_dataset,
    render_pack,
    render_runs,
    render_summary,
    text_runs,
)
from harness.prep.tokenize.bpe import train_bpe
from harness.records import Pack, SequenceView


class Letters:
    def decode(self, ids):
        return "".join(chr(one) for one in ids)


def text_of(renderable) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()


def trained_parts(text) -> str:
    return "".join(text.plain[span.start : span.end] for span in text.spans if span.style == TRAINED_STYLE)


def letters(text: str, mask: str) -> SequenceView:
    return SequenceView(np.array([ord(c) for c in text], np.int32), np.array([int(m) for m in mask], np.uint8))


PACKS = [
    Pack(input_ids=[72, 105, 33, 66, 121, 101], loss_mask=[1, 1, 0, 0, 1, 0], seq_start_id=[0, 3]),
    Pack(input_ids=[65, 66], loss_mask=[1, 0], seq_start_id=[0]),
]


@pytest.fixture
def dataset(tmp_path):
    write_packs(
        tmp_path / "train",
        PACKS,
        pack_size=8,
        provenance=Provenance(tokenizer="../tokenizer", packer="next_fit", counts={"records": 3}),
    )
    return tmp_path / "train"


def test_a_summary_counts_packs_sequences_tokens_and_lengths(dataset):
    summary = inspect_dataset(str(dataset))
    assert [summary[name] for name in ("packs", "sequences", "tokens", "trained_tokens")] == [2, 3, 8, 4]
    assert [summary[name] for name in ("fill", "shortest", "median", "longest")] == [0.5, 2, 3, 3]
    assert summary["histogram"] == [(2, 3, 3)]
    assert json.loads(json.dumps(summary))["provenance"]["counts"] == {"records": 3}
    shown = text_of(render_summary(summary))
    for words in ["2 of up to 8 tokens", "4 (50.0%)", "50.00%", "next_fit", "2-3", "█"]:
        assert words in shown


def test_the_token_after_a_trained_position_is_marked_and_control_characters_are_shown():
    # Position j of the mask trains the token after it.
    assert trained_parts(render_runs(text_runs(letters("abcdef", "001100"), Letters()))) == "de"
    assert trained_parts(render_runs(text_runs(letters("ab", "00"), Letters()))) == ""
    assert trained_parts(render_runs(text_runs(letters("abc", "110"), Letters()))) == "bc"
    text = render_runs(text_runs(letters("a\x1b[31m\n\x9bz", "000000000"), Letters()))
    assert text.plain == "a\u241b[31m\n\ufffdz"


def test_a_sequence_of_many_turns_is_decoded_in_linear_time():
    class CountingLetters(Letters):
        num_ids = 0

        def decode(self, ids):
            self.num_ids += len(ids)
            return super().decode(ids)

    tokenizer = CountingLetters()
    assert len(render_runs(text_runs(letters("ab" * 500, "01" * 500), tokenizer)).plain) == 1000
    assert tokenizer.num_ids < 4 * 1000


def test_a_pack_is_shown_sequence_by_sequence(dataset):
    reader = open_dataset(str(dataset))
    shown = text_of(render_pack(reader, 0, Letters()))
    assert "pack 0: 2 sequences, 6 tokens, 3 trained" in shown
    assert shown.index("Hi!") < shown.index("sequence 1: 3 tokens, 1 trained") < shown.index("Bye")
    assert "pack 1" in text_of(render_pack(reader, -1, Letters()))


def test_the_tokenizer_beside_a_dataset_is_found_after_both_move(dataset, tmp_path):
    train_bpe(["some text"], tmp_path / "tokenizer", vocab_size=300)
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ["train", "tokenizer"]:
        (tmp_path / name).rename(moved / name)
    tokenizer = find_tokenizer(open_dataset(str(moved / "train")))
    assert tokenizer.decode([1, 2]) == "<|im_start|><|im_end|>"
    with pytest.raises(ConfigError, match="no token 9,999"):
        tokenizer.decode([9999])


def test_a_missing_tokenizer_and_a_missing_pack_are_errors(dataset, tmp_path):
    with pytest.raises(ConfigError, match="the tokenizer cannot be loaded: No such file"):
        find_tokenizer(open_dataset(str(dataset)))
    with pytest.raises(ConfigError, match="the tokenizer cannot be loaded: No such file"):
        find_tokenizer(open_dataset(str(dataset)), str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="there is no pack 2"):
        render_pack(open_dataset(str(dataset)), 2, Letters())
