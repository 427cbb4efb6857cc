"""An export finds the data of its run, and the tokenizer that made it."""

from __future__ import annotations

import errno

import pytest
import transformers

from harness.errors import is_of_memory
from harness.megatron.export.data import TrainedData, write_tokenizer
from harness.prep.tokenize import train_bpe


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no memory"), Exception("(os error 12)")])
def test_memory_that_runs_out_at_the_tokenizer_ends_an_export_and_a_damaged_tokenizer_is_listed(
    error, tmp_path, monkeypatch
):
    train_bpe(["one two"], tmp_path / "tokenizer", vocab_size=300)
    data, out = TrainedData(["data"], tokenizer=str(tmp_path / "tokenizer")), tmp_path / "out"
    out.mkdir()

    def fail(_folder, **_settings):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
        with pytest.raises(type(error)):
            write_tokenizer(data, out, vocab_size=300)
        data.template = "chatml"
        with pytest.raises(MemoryError, match=r"tokenizer .* cannot be loaded"):
            write_tokenizer(data, out, vocab_size=300)
    assert data.missing == []
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    assert write_tokenizer(data, out, vocab_size=300) is None
    assert len(data.missing) == 1


def test_an_error_in_place_of_one_of_memory_is_one_of_memory():
    later = ValueError("too large")
    later.__context__ = MemoryError()
    assert is_of_memory(later)
    assert not is_of_memory(ValueError("too large"))
