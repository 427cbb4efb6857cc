"""An export finds the data of its run, and the tokenizer that made it."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
import transformers

from harness.errors import ConfigError, PrepError
from harness.formats import Provenance
from harness.megatron.export import data
from harness.megatron.export.card import model_card
from harness.megatron.export.data import SpecialTokens, TrainedData, write_tokenizer
from harness.plan import ModelConfig, OptimizerConfig, SftConfig
from harness.prep.tokenize import train_bpe
from harness.settings import to_plain

LLAVA = (
    '{"model_type":"llava","image_token_index":299,"vision_config":{"model_type":"clip_vision_model","hidden_size":16,'
    '"intermediate_size":32,"num_hidden_layers":3,"num_attention_heads":2,"image_size":42,"patch_size":14}}'
)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no memory"), Exception("(os error 12)")])
def test_memory_that_runs_out_at_the_tokenizer_ends_an_export_and_a_damaged_tokenizer_is_listed(
    error, tmp_path, monkeypatch
):
    train_bpe(["one two"], tmp_path / "tokenizer", vocab_size=300)
    found, out = TrainedData(["data"], tokenizer=str(tmp_path / "tokenizer")), tmp_path / "out"
    out.mkdir()

    def fail(_folder, **_settings):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
        with pytest.raises(type(error)):
            write_tokenizer(found, out, vocab_size=300)
        found.template = "chatml"
        with pytest.raises(MemoryError, match=r"tokenizer .* cannot be loaded"):
            write_tokenizer(found, out, vocab_size=300)
    assert found.missing == []
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    assert write_tokenizer(found, out, vocab_size=300) is None
    assert len(found.missing) == 1


def test_a_template_that_could_not_be_rendered_ends_an_export_and_is_not_taken_for_none(tmp_path):
    train_bpe(["one two"], tmp_path, vocab_size=300)
    tokens, _ = data._hashes(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ 'x' | center(10**12) }}")
    with pytest.raises(PrepError, match="ran out of memory"):
        data._hashes(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    assert data._hashes(str(tmp_path)) == (tokens, "")


def test_a_tokenizer_that_needs_a_missing_package_is_listed_with_how_to_install_it(monkeypatch):
    def fail(_name):
        raise ConfigError("tokenizing requires `transformers`", where="here", fix="pip install 'package[extra]'")

    monkeypatch.setattr(data, "_hashes", fail)
    found, manifest = TrainedData(["data"]), SimpleNamespace(provenance=Provenance())
    reader = SimpleNamespace(manifest=manifest, path="data")
    data._find_tokenizer(found, reader, {"data": {"tokenizer": "mine"}, "model": {}})
    assert found.missing == [
        "tokenizer and chat template: mine: tokenizing requires `transformers` (pip install 'package[extra]')"
    ]


@pytest.mark.parametrize(
    ("encoder", "kind"), [(None, "AutoModelForCausalLM"), (LLAVA, "LlavaForConditionalGeneration")]
)
def test_the_card_loads_a_model_by_a_class_that_transformers_has_for_it(tmp_path, encoder, kind):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").write_text('{"step": 1}')
    config = SftConfig(model=ModelConfig(encoder=encoder, vocab_size=300), optimizer=OptimizerConfig(lr=1e-3))
    tokens = SpecialTokens((1,), None, None, {1: "</s>"})
    card = model_card(checkpoint, to_plain(config), TrainedData(["data"]), tokens, is_adapter=False)
    assert f"from transformers import {kind}, AutoTokenizer\n" in card
    assert f"model = {kind}.from_pretrained(folder)\n" in card
    compile(card.split("```python\n")[1].split("```")[0], "card", "exec")
