"""The Trainer of Hugging Face and TRL's on packed data: losses of unpacked conversations, and an exact resume."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import LoaderConfig
from harness.errors import ConfigError, LoaderError
from harness.integrations import RankStream

from .conftest import ROOT, run_ranks

pytest.importorskip("accelerate")  # the image has the nightly tests' packages only
from harness.integrations.huggingface import check_boundaries

from .huggingface_ranks import OPTIMIZER, trainer
from .test_experts import losses_of_plain_training


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama, saved by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2}
    LlamaForCausalLM(LlamaConfig(**sizes, **more, vocab_size=300, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def losses(built: Any) -> list[float]:
    return [line["loss"] for line in built.state.log_history if "loss" in line]


@pytest.mark.parametrize("kind", ["trainer", pytest.param("sft", marks=pytest.mark.nightly)])
def test_each_step_has_the_loss_of_the_same_conversations_unpacked(llama, dataset, tmp_path, kind) -> None:
    data = str(dataset / "train")
    built = trainer(load(llama), data, tmp_path, kind=kind, gradient_accumulation_steps=6, max_steps=8)
    built.train()

    # 40 packs in batches of 6: the seventh step has 4 packs, the eighth begins an epoch.
    batches = list(islice(RankStream(data, LoaderConfig(global_batch_size=6, num_workers=0, block_packs=4)), 8))
    model = load(llama)
    expected = losses_of_plain_training(model, lambda ids: [model(ids).logits[0]], batches, OPTIMIZER["learning_rate"])
    np.testing.assert_allclose(losses(built), [loss for loss, _ in expected], rtol=1e-5)


def test_the_loop_of_the_page_trains_the_weights_of_one_rank_on_two(llama, dataset, tmp_path) -> None:
    loops = [
        block.removeprefix("python\n")
        for block in (ROOT / "docs" / "trainers.md").read_text().split("```")
        if "num_items_in_batch" in block and block.startswith("python\n")
    ]
    assert len(loops) == 1
    (tmp_path / "loop.py").write_text(loops[0])
    weights = []
    for ranks in (1, 2):
        out = tmp_path / f"on-{ranks}"
        run_ranks(ranks, "loop_ranks", tmp_path / "loop.py", llama, dataset / "train", out)
        weights += [torch.load(f"{out}.{rank}") for rank in range(ranks)]

    for name, alone in weights[0].items():
        assert torch.isfinite(alone).all()
        torch.testing.assert_close(weights[1][name], alone, rtol=1e-5, atol=1e-6)
        assert torch.equal(weights[2][name], weights[1][name])
    assert any((load(llama).state_dict()[name] != alone).any() for name, alone in weights[0].items())


def test_a_resume_in_the_middle_of_an_epoch_trains_the_rest(llama, dataset, tmp_path) -> None:
    data = str(dataset / "train")
    options = {"gradient_accumulation_steps": 6, "num_train_epochs": 2, "schedule": "dp_balanced"}
    whole = trainer(load(llama), data, tmp_path, save_strategy="steps", save_steps=9, **options)
    whole.train()
    assert len(losses(whole)) == 14
    again = trainer(load(llama), data, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))

    assert losses(again) == losses(whole)
    assert again.packed.state_dict()["epoch"] == 2
    other = trainer(load(llama), data, tmp_path, size=5, **options)
    with pytest.raises(LoaderError, match="1 after 12 packs, but step 9 of the Trainer is in epoch 1 after 5 packs"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    stored = json.loads((tmp_path / "checkpoint-9" / "trainer_state.json").read_text())
    del stored["stateful_callbacks"]["PackedPosition"]
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text(json.dumps(stored))
    with pytest.raises(LoaderError, match="step 9 contains no position"):
        trainer(load(llama), data, tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


@pytest.mark.nightly
def test_a_resume_on_another_number_of_ranks_has_the_same_losses(llama, dataset, tmp_path) -> None:
    data = str(dataset / "train")
    options = {"max_steps": 10, "save_strategy": "steps", "save_steps": 5, "average_tokens_across_devices": True}

    def run(ranks: int, out: str, **more: Any) -> list[float]:
        settings = {**options, "gradient_accumulation_steps": 6 // ranks, **more}
        run_ranks(ranks, "huggingface_ranks", llama, data, tmp_path / out, json.dumps(settings))
        return json.loads((tmp_path / out / "losses.json").read_text())

    one, two = run(1, "one"), run(2, "two")
    np.testing.assert_allclose(two, one, rtol=1e-5)
    # The rows of its steps are compared in tests/integrations/test_global_batches.py.
    three = run(3, "three", resume=str(tmp_path / "two" / "checkpoint-5"))
    np.testing.assert_allclose(three, one, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size is 2"),
        ({"kind": "sft", "packing": True}, "packing is True"),
        ({"gradient_accumulation_steps": 5}, "a step has 6 rows on this rank, but gradient_accumulation_steps is 5"),
    ],
)
def test_arguments_that_would_train_rows_wrong_are_refused(llama, dataset, tmp_path, options, message) -> None:
    options = {"gradient_accumulation_steps": 6, "max_steps": 1, **options}
    with pytest.raises(ConfigError, match=message):
        trainer(load(llama), str(dataset / "train"), tmp_path, **options).train()


def test_a_model_that_mixes_the_sequences_of_a_row_is_refused(llama) -> None:
    model = load(llama)
    check_boundaries(model)
    assert not model.training
    without = model.forward
    model.forward = lambda *, position_ids, **inputs: without(**inputs)
    with pytest.raises(ConfigError, match="changes the logits of the next sequence"):
        check_boundaries(model)
