"""Settings by the names that other tools give them: refused, with our name and the value that was given."""

from __future__ import annotations

import re

import pytest

from harness.cli.launch import PlanSettings
from harness.cli.parity import CompareRunsSettings
from harness.config import TRAINING
from harness.launch.cluster import SubmitConfig
from harness.mistakes import SYNONYMS, KnownSettings
from harness.plan import SftConfig
from harness.prep import PrepareConfig
from harness.settings import CONFIGS, explain_settings


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("train sft learning_rate=1e-5", "did you mean optimizer.lr=1e-5? "),
        ("train sft --learning-rate 1e-5", "did you mean optimizer.lr=1e-5? "),
        ("train sft trainer.max_steps=60", "did you mean trainer.steps=60? "),
        ("train sft bf16=true", "did you mean model.dtype=bfloat16? "),
        ("train sft bf16=false", "did you mean model.dtype? "),
        ("train sft report_to=none", "did you mean 'trainer.trackers=[]'? "),
        ("train sft target_modules=[o_proj,down_proj]", "did you mean 'model.lora_targets=[linear_proj,linear_fc2]'? "),
        ("train sft attn_implementation=flash_attention_2", "did you mean model.attention=flash? "),
        ("train sft gradient_checkpointing=false", "did you mean model.recompute=none? "),
        ("train sft warmup_steps=10", "did you mean optimizer.warmup_steps=10? "),
        ("train sft load_in_4bit=true", "quantized weights are not supported; model.lora_rank trains adapters "),
        ("train sft min_lr=1e-6", "optimizer.min_lr_ratio is the final learning rate as a fraction of optimizer.lr; "),
        ("train sft adapter=lora", "model.lora_rank trains LoRA adapters; without it, all weights are trained; "),
        ("prepare source.mix=[{path:a.jsonl,weight:3}]", "did you mean source.mix[].epochs? "),
        ("sft tiny chats.jsonl --num_train_epochs 3", "did you mean trainer.epochs=3? settings are key=value; "),
        ("train sft modle.seed=3", "did you mean model.seed=3? "),
        ("train sft max_length=2048", "`harness prepare data.pack_size=2048` sets it; "),
        ("train sft --packing", "conversations are always packed, into packs of data.pack_size tokens; "),
        ("train pretrain micro_batch_size=2", "did you mean data.micro_batch_size=2? "),
        ("train sft micro_batch_size=2", "microbatches are planned from the lengths of sequences: "),
        ("prepare learning_rate=3", "`harness train sft optimizer.lr=3` sets it; "),
        ("plan sft_tiny --tp 2", "did you mean parallel.tensor_parallel_size=2? "),
        ("submit sft_tiny lora_r=8", "did you mean model.lora_rank=8? "),
        ("repack a b --max-length 2048", "did you mean data.pack_size=2048? "),
        ("convert a b npy cutoff_len=2048", "did you mean data.pack_size=2048? "),
        ("compare a b tolerance=1e-9", "did you mean tolerance.loss=1e-9? "),
        ("plan sft_tiny gpu_memory=24", "did you mean gpu_gib=24? "),
        ("submit sft_tiny gpu_memory=24", "did you mean cluster.gpu_gib=24? "),
        ("train sft gpu_memory=24", "`harness plan sft gpu_gib=24` sets it; "),
        ("train sft optimizer.name=muon", "AdamW is the only optimizer; "),
        ("train sft untie_embeddings_and_output_weights=true", "did you mean model.tie_embeddings=false? "),
        ("prepare truncation_strategy=delete", "did you mean data.over_long=drop? "),
        ("train sft model=Qwen/Qwen3-0.6B", "did you mean model.init_from=Qwen/Qwen3-0.6B? "),
        ("train sft model=qwen3_8bb", "did you mean model=qwen3_8b? "),
        ("train sft data=chats.jsonl", "did you mean data.path=chats.jsonl? "),
        ("prepare model=Qwen/Qwen3-8B", "did you mean tokenizer.name=Qwen/Qwen3-8B? "),
        ("prepare format=memmap", "did you mean data.packed_storage=memmap? "),
        ("train sft data.pack_size=512", "`harness prepare data.pack_size=512` sets it; "),
        ("train sft cluster=h100_ib", "`harness submit sft cluster=h100_ib` sets it; "),
        ("train sft nodes=2", "`harness submit sft nodes=2` sets it; "),
        ("prepare data=chats.jsonl", "did you mean source.path=chats.jsonl? "),
        ("submit sft_tiny tf32=1", "products of matrices are computed in model.dtype; `harness submit sft_tiny --"),
        ("plan auto clip_gard=1", "did you mean optimizer.clip_grad? `harness plan auto --cfg` prints "),
        ("prepare --preview source.path=chats.jsonl", "--preview 3 shows three records"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # recipes are imported by other tests
def test_a_setting_of_another_tool_is_refused_with_our_name_and_its_value(harness, command, fix):
    code, _, error = harness(*command.split())
    assert code == 2
    assert f"fix:   {fix}" in error


SCHEMAS = (*TRAINING.values(), PrepareConfig, PlanSettings, SubmitConfig, CompareRunsSettings)
SETTINGS = {setting.key for schema in SCHEMAS for setting in explain_settings(schema)}


def test_every_name_of_another_tool_stands_for_a_setting_that_exists():
    texts = [text for texts in SYNONYMS.values() for text in texts.split("|")]
    meant = {text.partition("=")[0] for text in texts if " " not in text}
    named = {word for text in texts if " " in text for word in text.replace(",", "").split() if "." in word}
    assert {name for name in meant | named if name not in SETTINGS} == {"metrics.jsonl", "loss.png"}


def test_a_word_that_is_the_name_of_a_setting_stands_for_it():
    own = {key.rpartition(".")[2] for key in SETTINGS if "[" not in key}
    assert {word: text for word, text in SYNONYMS.items() if word in own and word not in re.split(r"\W", text)} == {}


def test_a_missing_plugin_of_hydra_is_named_with_its_extra():
    known = KnownSettings("harness train sft", SftConfig, [CONFIGS])
    error = known.explain(ValueError("Could not find 'hydra/launcher/submitit_slurm'"), "sft", [])
    assert error.what == "Hydra has no file 'hydra/launcher/submitit_slurm'"
    assert "pip install 'megatron-sft-harness[slurm]'" in error.fix
