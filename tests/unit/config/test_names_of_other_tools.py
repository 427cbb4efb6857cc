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

# Of TRL, axolotl, LLaMA-Factory, Megatron-Bridge and ms-swift.
WORDS = (
    *("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "max_seq_length"),
    *("seq_length", "cutoff_len", "sequence_len", "micro_batch_size", "num_train_epochs", "num_epochs", "max_steps"),
    *("tp", "pp", "cp", "ep", "tensor_model_parallel_size", "dataset", "datasets", "model_name_or_path", "base_model"),
    *("template", "chat_template", "lora_r", "lora_alpha", "lora_dropout", "warmup_ratio", "output_dir", "save_steps"),
    *("logging_steps", "eval_steps", "packing", "bf16", "gradient_checkpointing", "weight_decay", "seed", "report_to"),
    *("deepspeed", "train_iters", "val_set_size", "run_name", "lr_scheduler_type", "max_grad_norm", "lr", "min_lr"),
    *("epochs", "batch_size", "max_seq_len", "dataset_name", "num_proc", "num_gpus", "adapter", "dp", "r", "fp16"),
    *("recompute_granularity", "attn_implementation", "load_in_4bit", "neftune_noise_alpha", "flash_attention"),
    *("target_modules", "fsdp", "completion_only_loss", "assistant_only_loss", "train_on_inputs", "optim"),
    *("tolerance", "gpu_memory", "eval_dataset", "truncation_strategy", "special_tokens", "lora_target", "fp8_format"),
    *("finetuning_type", "tuner_type", "padding_free", "neat_packing", "trust_remote_code", "recompute_activations"),
    *("virtual_pipeline_model_parallel_size", "moe_aux_loss_coeff", "world_size", "loss_scale", "wandb_project"),
    *("per_gpu_train_batch_size", "max_len", "block_size", "resume_from", "train_files", "lr_decay_style", "use_dora"),
    *("mixed_precision", "eval_data", "prompt_column", "torch_compile", "random_seed", "rope_theta", "walltime"),
)


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("train sft learning_rate=1e-5", "did you mean optimizer.lr=1e-5? "),
        ("train sft --learning-rate 1e-5", "did you mean optimizer.lr=1e-5? "),
        ("train sft trainer.max_steps=60", "did you mean trainer.steps=60? "),
        ("train sft bf16=true", "did you mean model.dtype=bfloat16? "),
        ("train sft bf16=false", "did you mean model.dtype? "),
        ("train sft report_to=wandb", "did you mean 'trainer.trackers=[wandb]'? "),
        ("train sft report_to=none", "did you mean 'trainer.trackers=[]'? "),
        ("train sft target_modules=q_proj", "did you mean 'model.lora_targets=[linear_qkv]'? "),
        ("train sft target_modules=[o_proj,down_proj]", "did you mean 'model.lora_targets=[linear_proj,linear_fc2]'? "),
        ("train sft attn_implementation=flash_attention_2", "did you mean model.attention=flash? "),
        ("train sft flash_attention=true", "did you mean model.attention=flash? "),
        ("train sft gradient_checkpointing=false", "did you mean model.recompute=none? "),
        ("train sft warmup_steps=10", "did you mean optimizer.warmup_steps=10? "),
        ("train sft lr_scheduler_type=constant_with_warmup", "did you mean optimizer.decay=constant? "),
        ("train sft load_in_4bit=true", "quantized weights are not supported; model.lora_rank trains adapters "),
        ("train sft --lr 3", "did you mean optimizer.lr=3? "),
        ("train sft batch_size=8", "did you mean loader.global_batch_size=8? "),
        ("train sft min_lr=1e-6", "optimizer.min_lr_ratio is the final learning rate as a fraction of optimizer.lr; "),
        ("train sft adapter=lora", "model.lora_rank trains LoRA adapters; without it, all weights are trained; "),
        ("prepare num_proc=4", "did you mean data.num_workers=4? "),
        ("prepare source.mix=[{path:a.jsonl,weight:3}]", "did you mean source.mix[].epochs? "),
        ("sft tiny chats.jsonl --num_train_epochs 3", "did you mean trainer.epochs=3? settings are key=value; "),
        ("sft tiny chats.jsonl out --max-length=512", "did you mean data.pack_size=512? settings are key=value; "),
        ("train sft modle.seed=3", "did you mean model.seed=3? "),
        ("train sft max_length=2048", "`harness prepare data.pack_size=2048` sets it; "),
        ("train sft --packing", "conversations are always packed, into packs of data.pack_size tokens; "),
        ("train pretrain seq_length=2048", "did you mean data.sequence_length=2048? "),
        ("train pretrain micro_batch_size=2", "did you mean data.micro_batch_size=2? "),
        ("train sft micro_batch_size=2", "microbatches are planned from the lengths of sequences: "),
        ("prepare --max_length=2048", "did you mean data.pack_size=2048? "),
        ("prepare learning_rate=3", "`harness train sft optimizer.lr=3` sets it; "),
        ("plan sft_tiny --tp 2", "did you mean parallel.tensor_parallel_size=2? "),
        ("submit sft_tiny lora_r=8", "did you mean model.lora_rank=8? "),
        ("repack a b --max-length 2048", "did you mean data.pack_size=2048? "),
        ("repack a b --seed=3", "did you mean data.seed=3? "),
        ("convert a b npy cutoff_len=2048", "did you mean data.pack_size=2048? "),
        ("compare a b tolerance=1e-9", "did you mean tolerance.loss=1e-9? "),
        ("compare a b --rtol 1e-9", "did you mean tolerance.loss=1e-9? "),
        ("plan sft_tiny gpu_memory=24", "did you mean gpu_gib=24? "),
        ("submit sft_tiny gpu_memory=24", "did you mean cluster.gpu_gib=24? "),
        ("submit sft_tiny nnodes=2", "did you mean nodes=2? "),
        ("train sft gpu_memory=24", "`harness plan sft gpu_gib=24` sets it; "),
        ("train sft vpp=2", "did you mean parallel.virtual_pipeline_parallel_size=2? "),
        ("train sft tp_size=2", "did you mean parallel.tensor_parallel_size=2? "),
        ("train sft model_path=Qwen/Qwen3-0.6B", "did you mean model.init_from=Qwen/Qwen3-0.6B? "),
        ("train sft total_epochs=2", "did you mean trainer.epochs=2? "),
        ("train sft use_fp8=true", "did you mean model.fp8? "),
        ("train sft moe_aux_loss_coef=0.1", "did you mean model.aux_loss=0.1? "),
        ("train sft optimizer.name=muon", "AdamW is the only optimizer; "),
        ("prepare train_on_last_turn=true", "did you mean tokenizer.train_on=last_turn? "),
        ("train sft load=x", "with resume=true, the run in run_dir continues; "),
        ("train sft untie_embeddings_and_output_weights=true", "did you mean model.tie_embeddings=false? "),
        ("prepare truncation_strategy=delete", "did you mean data.over_long=drop? "),
        ("train sft model=Qwen/Qwen3-0.6B", "did you mean model.init_from=Qwen/Qwen3-0.6B? "),
        ("train sft model=qwen3_8bb", "did you mean model=qwen3_8b? "),
        ("train sft data=chats.jsonl", "did you mean data.path=chats.jsonl? "),
        ("prepare model=Qwen/Qwen3-8B", "did you mean tokenizer.name=Qwen/Qwen3-8B? "),
        ("prepare format=memmap", "did you mean data.packed_storage=memmap? "),
        ("prepare model.num_layers=8", "`harness train sft model.num_layers=8` sets it; "),
        ("train sft data.pack_size=512", "`harness prepare data.pack_size=512` sets it; "),
        ("train sft source.path=chats.jsonl", "`harness prepare source.path=chats.jsonl` sets it; "),
        ("train sft cluster=h100_ib", "`harness submit sft cluster=h100_ib` sets it; "),
        ("train sft tolerance=1e-9", "`harness compare RUN RUN tolerance.loss=1e-9` sets it; "),
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


def test_the_words_that_people_use_are_known():
    assert [word for word in WORDS if word not in SYNONYMS] == []


def test_a_missing_plugin_of_hydra_is_named_with_its_extra():
    known = KnownSettings("harness train sft", SftConfig, [CONFIGS])
    error = known.explain(ValueError("Could not find 'hydra/launcher/submitit_slurm'"), "sft", [])
    assert error.what == "Hydra has no file 'hydra/launcher/submitit_slurm'"
    assert "pip install 'megatron-sft-harness[slurm]'" in error.fix
