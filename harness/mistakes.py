"""Mistakes in settings: converts errors of Hydra and OmegaConf to errors that name the setting, its place and a fix."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import yaml

from harness.errors import ConfigError
from harness.settings import explain_settings, nearest_name

_OVERRIDE = re.compile(r"([+~]*)([A-Za-z_][\w./@-]*)(=?)(.*)", re.DOTALL)
# Excludes lists, sweeps and references.
_FILE_NAME = re.compile(r"[\w.+/-]+")
_FILE = re.compile(r"In '([^']+)'")
_NO_FILE = re.compile(r"Could not (?:find|load) '([^']+)'")
_KEY = re.compile(r"full_key: (\S+)")
_MERGED = re.compile(r"Error merging override (\S+?)=")
_NO_TYPE = re.compile(r"Value (.*) of type '\w+' could not be converted to (\w+)", re.DOTALL)
_TYPES = {"Integer": "int", "Float": "float", "Boolean": "bool", "String": "str"}
_NO_NAME = re.compile(r"Interpolation key '([^']+)' not found")
# Integers below this are exact as floats.
_EXACT = 2**53
# Values that Hydra does not read as text.
_NUMBER = re.compile(r"(?i)[+-]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)(e[+-]?\d[\d_]*)?|[+-]?(inf|nan)|true|false")
# Lines of messages that do not help users.
_NOISE = (
    *("full_key", "object_type", "reference_type", "To append to your", "See https:", "raised while composing"),
    *("Could not override", "Error merging override", "Did you mean to override"),
)

# Commands with the settings of a section; all others belong to training runs.
_HOMES = {
    **dict.fromkeys(("data", "source", "tokenizer"), "harness prepare"),
    **dict.fromkeys(("model", "parallel", "optimizer", "trainer", "loader", "schedule"), "harness train sft"),
    **{"tolerance": "harness compare RUN RUN", "gpu_gib": "harness plan sft"},
    **dict.fromkeys(("nodes", "cluster"), "harness submit sft"),
}
# Settings, some with a fixed value, and their names in TRL, axolotl, LLaMA-Factory, Megatron-Bridge and ms-swift.
_NAMES_ELSEWHERE = (
    "optimizer.lr:learning_rate,lr optimizer.min_lr_ratio:cosine_min_lr_ratio optimizer.decay_steps:lr_decay_iters "
    "optimizer.weight_decay:weight_decay optimizer.beta1:adam_beta1 optimizer.beta2:adam_beta2 "
    "optimizer.eps:adam_epsilon,adam_eps optimizer.clip_grad:max_grad_norm,grad_clip,gradient_clipping,"
    "gradient_clip_val,max_norm optimizer.decay:lr_scheduler_type,lr_scheduler,lr_decay_style,decay_style "
    "optimizer.warmup_ratio:warmup_ratio,lr_warmup_fraction,lr_warmup_steps_ratio "
    "optimizer.warmup_steps:lr_warmup_iters,num_warmup_steps,warmup,warmup_iters "
    "loader.global_batch_size:train_batch_size,batch_size,global_batch_size,gbs "
    "loader.num_workers:dataloader_num_workers loader.shuffle:shuffle_merged_datasets "
    "data.over_long:truncation_strategy,excess_length_strategy data.num_workers:num_proc,dataset_num_proc,"
    "preprocessing_num_workers data.packed_storage:format,packed_storage data.validation_fraction:val_size,"
    "val_set_size,split_dataset_ratio,test_size,val_ratio data.path:dataset_prepared_path,cached_dataset "
    "data.overwrite:overwrite_cache source.path:dataset,datasets,dataset_name,dataset_path,train_file,train_dataset,"
    "train_data,train_data_path,train_files,data_files,training_data,dataset_dir source.split:dataset_train_split "
    "source.subset:dataset_config,dataset_config_name source.limit:max_samples,max_train_samples "
    "tokenizer.name:tokenizer_name,tokenizer_name_or_path,tokenizer_model,tokenizer_path "
    "tokenizer.chat_template:template,chat_template,chat_template_jinja,chat_template_path,chat_format,"
    "conversation_template tokenizer.train_on=last_turn:mask_history,train_on_last_turn,only_last_turn "
    "tokenizer.train_on:loss_scale model.init_from:model_name_or_path,base_model,pretrained_checkpoint,pretrained,"
    "from_pretrained,partial_pretrain model.max_sequence_length:max_position_embeddings "
    "model.tie_embeddings=false:untie_embeddings_and_output_weights model.train_encoder=false:freeze_vit,"
    "freeze_vision_tower model.experts_per_token:moe_router_topk,num_experts_per_tok model.aux_loss:moe_aux_loss_coeff,"
    "moe_aux_loss_coef,router_aux_loss_coef model.fp8:fp8_format model.dtype=bfloat16:bf16,pure_bf16 "
    "model.dtype:torch_dtype,precision,mixed_precision model.attention:attn_implementation,flash_attention,flash_attn,"
    "use_flash_attn,attention_backend,attn_impl model.recompute:recompute_granularity,recompute_method,"
    "recompute_activations,gradient_checkpointing,activation_checkpointing,gradient_checkpointing_kwargs "
    "model.lora_rank:r,lora_r,lora_rank model.lora_alpha:lora_alpha model.lora_targets:lora_target_modules,"
    "target_modules,lora_target,lora_target_linear parallel.tensor_parallel_size:tp,tensor_model_parallel_size "
    "parallel.pipeline_parallel_size:pp,pipeline_model_parallel_size parallel.virtual_pipeline_parallel_size:vpp,"
    "virtual_pipeline_model_parallel_size parallel.pipeline_layout:pipeline_model_parallel_layout "
    "parallel.context_parallel_size:cp,sequence_parallel_degree,sequence_parallel_size "
    "parallel.expert_parallel_size:ep,expert_model_parallel_size parallel.expert_tensor_parallel_size:etp "
    "parallel.overlap_gradients:overlap_grad_reduce parallel.overlap_weights:overlap_param_gather "
    "parallel.overlap_weights_with_step:overlap_param_gather_with_optimizer_step "
    "parallel.ranks:num_gpus,gpus,nproc_per_node,num_processes,world_size,ngpus "
    "parallel.distributed_optimizer:use_distributed_optimizer parallel.distributed_optimizer=true:deepspeed,fsdp,"
    "fsdp_config,fsdp_sharding_strategy trainer.epochs:num_train_epochs,num_epochs,max_epochs,epochs,epoch "
    "trainer.loss_average:calculate_per_token_loss,loss_agg_mode trainer.timeout_s:ddp_timeout "
    "trainer.early_stop:early_stopping_patience trainer.sample_tokens:max_new_tokens trainer.steps:max_steps,"
    "train_iters,iterations,max_iters trainer.eval_interval:eval_steps,eval_every,test_freq "
    "trainer.eval_batches:eval_iters trainer.checkpoint_interval:save_steps,save_interval,save_every,save_freq "
    "trainer.keep_checkpoints:save_total_limit trainer.trackers:report_to,wandb_project,tensorboard_dir,logging_dir,"
    "wandb_entity,log_dir schedule.name:sequence_packing_scheduler nodes:nodes,nnodes,num_nodes "
    "cluster.partition:partition,queue cluster.account:account cluster.time:time,time_limit,walltime "
    "cluster.image:image,container_image tolerance.loss:tolerance,atol,rtol name:run_name,experiment_name,run_id "
    "resume=true:resume_from_checkpoint,resume_from optimizer.offload:offload_optimizer,cpu_offload "
    "source.schema:dataset_format,dataset_type tokenizer.history=kept:preserve_thinking model.rotary_base:rope_theta"
)
# Answers to further names: text, or settings of which the first one that the command has is suggested.
_ANSWERS = {
    "optimizer.min_lr_ratio is the final learning rate as a fraction of optimizer.lr": "min_lr min_learning_rate",
    "loader.global_batch_size is packs per step; schedule.max_tokens_per_rank limits microbatches": "eval_batch_size "
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps accumulate_grad_batches "
    "per_gpu_train_batch_size local_batch_size",
    "data.micro_batch_size|microbatches are planned from the lengths of sequences: schedule.max_tokens_per_rank is "
    "the number of tokens per rank and microbatch": "micro_batch_size micro_batch mbs",
    "loader.seed|data.seed": "seed random_seed random_state",
    "data.sequence_length|data.pack_size": "max_length max_seq_length max_seq_len seq_length sequence_len cutoff_len "
    "pack_size max_len max_token_length max_tokens block_size context_length model_max_length",
    "conversations are always packed, into packs of data.pack_size tokens": "packing sample_packing padding_free "
    "pad_to_sequence_len eval_packing eval_sample_packing neat_packing packing_strategy group_by_length "
    "pad_to_max_length pad_to_multiple_of padding_side",
    "source.columns names the fields of records": "dataset_text_field field_messages message_property_mappings "
    "prompt_column response_column text_column input_key output_key prompt_key response_key messages_field",
    "source.mix lists sources, and data.blend lists datasets with weights": "mix_strategy interleave_probs",
    "data.validation_path is another prepared dataset": "eval_dataset val_dataset test_datasets eval_data val_data "
    "validation_data validation_file val_files test_file",
    "datasets are always streamed, and data.live.path trains on data that is still being generated": "streaming",
    "data.blend[].weight|source.mix[].epochs": "weight",
    "special tokens are those of the tokenizer": "special_tokens eos_token pad_token",
    "the system prompt is a message of each conversation": "system system_prompt system_message",
    "a record sets it in its chat_template_kwargs": "enable_thinking",
    "only tokens that the assistant generates are trained; tokenizer.mask with the value all trains every token, and "
    "tokenizer.train_on selects turns": "assistant_only_loss completion_only_loss mask_prompt train_on_inputs "
    "train_on_responses_only train_on_prompt roles_to_train response_template instruction_template",
    "with resume=true, the run in run_dir continues; model.init_from starts from weights": "load checkpoint ckpt "
    "resume_checkpoint",
    "tokenizer.name|model.init_from": "model",
    "code in a model's folder is never run": "trust_remote_code",
    "model.fuse_swiglu and model.fuse_cross_entropy select fused kernels": "use_liger_kernel liger_kernel liger",
    "float16 is not supported, because it requires loss scaling; model.dtype with the value bfloat16 does not": "fp16",
    "quantized weights are not supported; model.lora_rank trains adapters on weights in model.dtype": "load_in_4bit "
    "load_in_8bit quantization_bit",
    "model.recompute_layers applies to model.recompute with the value full": "recompute_num_layers",
    "noise on embeddings is not supported": "neftune_noise_alpha",
    "models and adapters are trained without dropout": "lora_dropout attention_dropout hidden_dropout",
    "model.lora_rank trains LoRA adapters; without it, all weights are trained": "adapter lora peft "
    "train_type tuner_type finetuning_type freeze_trainable_layers",
    "the ranks that the other sizes leave are data-parallel; parallel.ranks is the number of all ranks": "dp dp_size "
    "data_parallel_size",
    "cluster.gpu_gib|gpu_gib": "gpu_memory gpu_mem vram",
    "every step is printed and kept in the run's metrics.jsonl": "logging_steps log_interval logging_strategy",
    "every run plots its losses in loss.png": "plot_loss",
    "run_dir|data.path|out": "output_dir output_path output out_dir out save_dir save",
    "`harness export` writes a folder, which `hf upload` publishes": "push_to_hub",
    "trainer.eval_interval and trainer.checkpoint_interval are numbers of steps": "eval_strategy save_strategy "
    "evals_per_epoch saves_per_epoch evaluation_strategy do_eval",
    "the loss is the cross entropy of trained tokens; trainer.loss_average selects how it is averaged": "loss_type "
    "loss_fn label_smoothing label_smoothing_factor",
    "products of matrices are computed in model.dtype": "tf32",
    "the batch size is constant": "rampup_batch_size auto_find_batch_size",
    "parallel.distributed_optimizer shards the optimizer's state; weights and gradients are divided by tensor, "
    "pipeline and expert parallelism": "zero_stage zero_optimization",
    "kernels are those of Megatron-Core and Transformer Engine": "torch_compile compile",
    "preference training is not supported": "beta dpo_beta",
    "adapters are LoRA without variants; model.lora_targets selects the layers that have one": "use_dora use_rslora "
    "modules_to_save lora_modules_to_save lora_bias",
    "AdamW is the only optimizer": "optim optimizer optimizer.name optimizer.type",
}
# Our values of a setting, each with those of other tools that it stands for. A list has all that stand for a word.
_VALUES = {
    "optimizer.decay": "cosine=cosine_with_min_lr linear constant=constant_with_warmup "
    "inverse-square-root=inverse_sqrt",
    "model.dtype": "bfloat16=bf16,bf16-mixed,bf16-true float32=fp32,32,32-true auto",
    "model.attention": "flash=true,fa2,flash_attention_2,flash_attention_3 torch=false,eager,sdpa fused unfused auto",
    "model.recompute": "full=true,unsloth none=false,null selective",
    "model.fp8": "off=false,null tensorwise blockwise mxfp8",
    "data.packed_storage": "parquet memmap binidx jsonl npy virtual",
    "data.over_long": "drop=delete cut=truncate,right split",
    "tokenizer.train_on": "last_turn=last_round all_assistant=default",
    "trainer.loss_average": "token=true conversation",
    "schedule.name": "as_packed dp_balanced cost_balanced dynamic_context",
    "trainer.trackers": "=none tensorboard=all wandb=all mlflow=all",
    "model.lora_targets": "linear_qkv=q_proj,k_proj,v_proj,qkv_proj,in_proj,all,all-linear "
    "linear_proj=o_proj,out_proj,all,all-linear linear_fc1=gate_proj,up_proj,gate_up_proj,all,all-linear "
    "linear_fc2=down_proj,all,all-linear",
}
# Affixes to remove before a word is looked up.
_AFFIXES = re.compile(r"^(use|enable|hf|n|num|total|train|training)_|_(size|path|dir|id|name|degree)$")
_LISTS = ("trainer.trackers", "model.lora_targets")
_ROWS = [row.split(":") for row in _NAMES_ELSEWHERE.split()]
SYNONYMS = {word: answer for answer, words in _ANSWERS.items() for word in words.split()}
SYNONYMS |= {word: setting for setting, words in _ROWS for word in words.split(",")}
_OWN_NAMES = {name for text in SYNONYMS.values() for name in text.split("|")}
# Settings that take a name or a path, by the group that users often pass it to instead.
_NAMES = {"model": "model.init_from", "tokenizer": "tokenizer.name"}
_NAMES |= {"data": "source.path data.path", "source": "source.path"}


def word_of(name: str) -> str:
    """Return the key of `SYNONYMS` for a name: `max_length` for `--max-length` and `trainer.max_length`."""
    return name.lstrip("-").rpartition(".")[2].replace("-", "_")


def suggest_setting(key: str, value: str, known: Collection[str]) -> str:
    """Return the start of a fix for an unknown setting: its equivalent, or the nearest setting; otherwise empty.

    `known` contains the settings of the command; `value` is empty if it is unknown. Values are quoted for a shell.
    """
    word, names = word_of(key), sorted(known)
    near = nearest_name(key, names) or nearest_name(_AFFIXES.sub("", word), names) or ""
    has_name = near.rpartition(".")[2] == key.rpartition(".")[2]
    meant = next((SYNONYMS[name] for name in (key, word, _AFFIXES.sub("", word)) if name in SYNONYMS), "")
    if key in known or ("." in key and has_name and key not in SYNONYMS):
        meant = ""
    section, _, leaf = key.partition(".")
    home = "" if section in {name.partition(".")[0] for name in known} else _HOMES.get(section, "")
    # Without a dot, `model` and `loader` are words of other tools.
    is_elsewhere = home and ((leaf and key not in SYNONYMS) or (home != "harness train sft" and not meant))
    if key not in known and (is_elsewhere or (key in _OWN_NAMES and near.startswith("data.live."))):
        meant = key
    if not meant:
        return f"did you mean {_assigned(near, value if has_name and near != key else '')}? " if near else ""
    names = meant.split("|")
    name = next((name for name in names if name.partition("=")[0] in known), None)
    if name is None and " " in names[-1]:
        return f"{names[-1]}; "
    setting, _, fixed = (name or names[-1]).partition("=")
    setting = _assigned(setting, _value_of(setting, value) if not fixed else "" if value.lower() == "false" else fixed)
    if name is not None:
        return f"did you mean {setting}? "
    return f"`{_HOMES.get(re.split('[.=]', setting)[0], 'harness train sft')} {setting}` sets it; "


def _assigned(setting: str, value: str) -> str:
    return shlex.quote(f"{setting}={value}") if value and "[]" not in setting else setting


def _value_of(setting: str, value: str) -> str:
    """Translate the value of another tool's setting; empty if there is no equivalent."""
    if setting not in _VALUES or not value:
        return value
    words = {word.strip(" '\"").lower() for word in value.strip("[]").split(",")}
    rows = (row.partition("=") for row in _VALUES[setting].split())
    ours = [our for our, _, theirs in rows if not words.isdisjoint([our, *theirs.split(",")])]
    return f"[{','.join(ours)}]" * bool(ours) if setting in _LISTS else next(iter(ours), "")


@dataclass(frozen=True)
class KnownSettings:
    """Settings that a command accepts, for its errors.

    Attributes:
        command: command that prints all settings with `--cfg`.
        schema: dataclass of the settings.
        folders: folders of YAML files with one subfolder per group; may be empty.
        also: further settings of the command.
        recipe: name of the command's own file, which comes first in the defaults of other primary files.
    """

    command: str
    schema: type[Any]
    folders: Sequence[Path]
    also: frozenset[str] = field(default_factory=frozenset)
    recipe: str = ""

    @cached_property
    def types(self) -> Mapping[str, str]:
        """Type of each setting by dotted name."""
        return _types_of(cast(Hashable, self.schema))

    @cached_property
    def sections(self) -> frozenset[str]:
        """Dotted names of the dataclasses that contain the settings."""
        return frozenset(key[: dot.start()] for key in self.types for dot in re.finditer(r"\.", key))

    @cached_property
    def _records(self) -> frozenset[str]:
        return frozenset(key[: dot.start()] for key in self.types for dot in re.finditer(r"(?<=\[\])\.", key))

    @cached_property
    def groups(self) -> frozenset[str]:
        """Groups of files to choose from: those of sections, `experiment` for runs, and all of the user's folders."""
        if not self.folders:
            return frozenset()
        built_in, *own = ({entry.name for entry in folder.iterdir() if entry.is_dir()} for folder in self.folders)
        return frozenset(built_in & {*self.sections, *(["experiment"] if "run_dir" in self.types else [])}).union(*own)

    def files(self, group: str) -> list[str]:
        """List the files of a group that contain settings of this command, without suffix."""
        prefix = f"{group}." if group in self.sections else ""
        names = {key.removeprefix(prefix).split(".")[0] for key in self.types if key.startswith(prefix)}
        files = {file.stem: file for folder in self.folders for file in (folder / group).glob("*.yaml")}
        return sorted(stem for stem, file in files.items() if _top_keys(file) <= names)

    def find(self, name: str) -> Path | None:
        """Return the path of a file such as `model/tiny`, if it exists."""
        return next((path for folder in self.folders if (path := folder / f"{name}.yaml").is_file()), None)

    def check(self, text: str) -> str:
        """Return the value of a `key=value`; raise ConfigError for invalid text or an unknown key, group or file."""
        match = _OVERRIDE.fullmatch(text)
        if match is None or (not match[3] and match[1] != "~"):
            word, _, value = text.partition("=")
            fix = f"{suggest_setting(word_of(word), value, self.types)}settings are key=value; "
            raise self.error(f"{text!r} is not a setting", where=self.command, fix=fix)
        prefix, key, _, value = match.groups()
        group = key.partition("@")[0]
        if self.folders and key.startswith(("hydra.", "hydra/")):
            return value
        if group in self.groups:
            if value != "null" and _FILE_NAME.fullmatch(value):
                self.check_file(f"{group}/{value}", where=text)
            return value
        is_map = any(kind.startswith("map of ") and key.startswith(f"{name}.") for name, kind in self.types.items())
        if key in self.sections and not (self.folders and value.startswith("{")):
            fix = suggest_setting(key, value, self.types) if key in SYNONYMS else f"{key}.NAME=VALUE; "
            raise self.error(f"{key} is a section of settings, not one of them", where=text, fix=fix)
        if key not in self.types and key not in self.sections and not is_map:
            raise self.unknown(key, value, where=text)
        if prefix and not (self.folders and (prefix == "++" or is_map)):
            raise self.error(f"{prefix} changes groups, and {key} is a setting", where=text, fix=f"{key}=VALUE; ")
        return value

    def check_kinds(self, key: str, value: Any, *, where: str, written: Any = None) -> None:
        """Raise ConfigError for values that YAML or OmegaConf would change: 2.7 as int, 5 as bool, 1:30 as text.

        Args:
            key: dotted name of a setting or section; `value` is its parsed YAML.
            where: location for the error.
            written: the same value with every scalar as written in the file; None if unknown.
        """
        if isinstance(value, Mapping):
            for name, inner in value.items():
                text = written.get(name) if isinstance(written, Mapping) else None
                self.check_kinds(f"{key}.{name}" if key else str(name), inner, where=where, written=text)
        elif isinstance(value, list):
            if _is_text(self.types.get(key, "")):
                fix = f"{self.as_list(key, list(map(str, value))) or f'{key}=TEXT'}; "
                raise self.error(f"{key} is one text, not a list", where=where, fix=fix)
            for inner, text in zip(value, written if isinstance(written, list) else [None] * len(value), strict=True):
                if isinstance(inner, list | Mapping) and f"{key}[]" not in self._records:
                    raise self.error(f"{inner} is not an item of {key}", where=where, fix=f"{key}: [A, B]; ")
                inner_key = f"{key}[]" if isinstance(inner, Mapping) else key
                self.check_kinds(inner_key, inner, where=where, written=text)
        kind = self._kind(key)
        if _is_text(kind) and isinstance(value, int | float):
            text = written if isinstance(written, str) else str(value) if type(value) is int else "text"
            if str(value) != text:
                raise self.error(f"{key}: {text} is read as {value}", where=where, fix="write it in quotes; ")
        # YAML reads 012 as 10, and 1:30 as 90.
        digits = written.replace("_", "") if isinstance(written, str) else ""
        if type(value) is int and digits[:2].lower() not in ("0x", "0b") and digits not in ("", str(value)):
            raise self.error(f"{key}: {written} is read as {value}", where=where, fix=f"{key}: {value}; ")
        is_fraction = isinstance(value, float) and not (abs(value) < _EXACT and value.is_integer())
        if (kind == "int" and is_fraction) or (kind == "bool" and _is_other_number(value)):
            raise self.error(f"{value} is not of type {kind}", where=where, fix=f"{key}={kind.upper()}; ")

    def as_list(self, key: str, values: Sequence[str] = ("A", "B")) -> str:
        """Return an assignment for a list setting, or for the list of records next to it; empty if there is neither."""
        section, _, leaf = key.rpartition(".")
        records = re.compile(rf"{re.escape(key)}\[\]\.\w+|{re.escape(section)}\.\w+\[\]\.{re.escape(leaf)}")
        if record := next(filter(records.fullmatch, self.types), ""):
            key, _, leaf = record.partition("[].")
            values = [f"{{{leaf}: {value}}}" for value in values]
        elif not self.types.get(key, "").startswith("list"):
            return ""
        return f"{key}={shlex.quote('[' + ', '.join(values) + ']')}"

    def _kind(self, key: str) -> str:
        """Return the type of a setting, list item or map entry."""
        of_map = self.types.get(key.rpartition(".")[0], "")
        return re.sub("^(map|list) of | or null$", "", of_map if of_map.startswith("map") else self.types.get(key, ""))

    def as_hydra(self, text: str) -> str:
        """Return a `key=value` in Hydra's syntax, which requires `++` before map entries."""
        match = _OVERRIDE.fullmatch(text)
        if match is None or match[1]:
            return text
        _, key, _, value = match.groups()
        maps = (name for name, kind in self.types.items() if kind.startswith("map of "))
        name = next((name for name in maps if key == name or key.startswith(f"{name}.")), key)
        kind, inner = self.types.get(name, ""), key.removeprefix(f"{name}.")
        if _is_text(kind) and _NUMBER.fullmatch(value):
            value = f"'{value}'"  # keep text as written: Hydra would turn 1e30 into 1e+30
            text = f"{key}={value}"
        if key != name and "." in inner and "map of map" not in kind:
            return f"++{name}={{{inner}:{value}}}"
        return f"++{text}" if kind.startswith("map of ") and (key != name or value.strip("{} ")) else text

    def check_file(self, name: str, *, where: str) -> None:
        """Raise ConfigError unless a file such as `model/tiny` exists."""
        if self.find(name) is None:
            group, _, stem = name.partition("/")
            near = nearest_name(stem, names := self.files(group))
            of_names = next((key for key in _NAMES.get(group, "").split() if key in self.types), None)
            meant = f"{group}={near}" if near else f"{of_names}={stem}" if of_names else ""
            fix = (f"did you mean {meant}? " if meant else "") + f"files of {group}: {', '.join(names) or 'none'}"
            raise ConfigError(f"the group {group} has no file {stem!r}", where=where, fix=fix)

    def unknown(self, key: str, value: str, *, where: str) -> ConfigError:
        """Return the error for an unknown setting, with a suggestion."""
        known = {*self.types, *self.sections, *self.groups, *self.also}
        known = {name for name in known if not key.startswith(f"{name}.") or name in self.types}
        hint = suggest_setting(key, value, known)
        if key in self.groups:
            hint = f"a file of the group {key} begins with `# @package _global_`; "
        return self.error(f"unknown setting {key!r}", where=where, fix=hint)

    def error(self, what: str, *, where: str, fix: str) -> ConfigError:
        """Return an error whose fix ends with the command that prints all settings."""
        return ConfigError(what, where=where, fix=f"{fix}`{self.command} --cfg` prints every setting with its value")

    def other_recipe(self, root: str) -> ConfigError:
        """Return the error for a primary file without the settings of this command."""
        fix = f"a file for this command begins with `defaults: [{self.recipe}, _self_]`; "
        return self.error(f"{root}.yaml is a file of another recipe", where=str(self.find(root)), fix=fix)

    def explain(self, error: Exception, root: str, overrides: Iterable[str]) -> ConfigError:
        """Return the error for settings that failed to compose; `root` is the name of the primary file."""
        message, given = f"{error}\n{error.__cause__ or ''}", list(overrides)
        in_file = _FILE.search(message)
        place = self.find(in_file[1] if in_file else root)
        key = next((match[1] for pattern in (_KEY, _MERGED) if (match := pattern.search(message))), "")
        inside = re.compile(rf"\b{re.escape(key)}\s*:")  # a record in a list
        own = [text for text in given if key and (text.lstrip("+~").startswith(f"{key}=") or inside.search(text))]
        where = own[-1] if own else (str(place) if place else f"{root}.yaml") + (f", key {key}" if key else "")
        if missing := _NO_FILE.search(message):
            if missing[1].endswith("_schema"):
                return self.other_recipe(root)
            if missing[1].startswith("hydra/"):
                fix = "install its plugin: pip install 'megatron-sft-harness[slurm]' for submitit"
                return ConfigError(f"Hydra has no file {missing[1]!r}", where=where, fix=fix)
            try:
                self.check_file(missing[1], where=where)
            except ConfigError as refused:
                return refused
        if re.search(r"Key '[^']*' (is )?not in", message) and key:
            value = own[-1].partition(f"{key}=")[2] if own else ""  # empty inside a list
            return self.unknown(key, value, where=where)
        if wrong := _NO_TYPE.search(message):
            kind = _TYPES.get(wrong[2], wrong[2])
            return self.error(f"{wrong[1]} is not of type {kind}", where=where, fix=f"{key}={kind.upper()}; ")
        if "is not Optional" in message:
            fix = f"{key}={self.types.get(key, 'value').upper()}; "
            return self.error(f"{key} cannot be null", where=where, fix=fix)
        if "is not a ListConfig" in message:
            return self.error(f"{key} is a list", where=where, fix=f"{self.as_list(key)}; ")
        if "is not a subclass of" in message:
            what = f"{key or 'a section of settings'} has a value in place of its settings"
            listed = self.as_list(key.partition("[")[0]) if "[" in key else ""
            return self.error(what, where=where, fix=f"{listed or (key or 'SECTION') + '.NAME=VALUE'}; ")
        if unknown := _NO_NAME.search(message):
            what = f"the reference ${{{unknown[1]}}} names no setting"
            return self.error(what, where=where, fix="write the value itself, or another name; ")
        # Omit the search path, whose folders are already named.
        lines = [line.strip().rstrip(".:") for line in message.partition("search path")[0].splitlines()]
        lines = [line for line in lines if line and not any(word in line for word in _NOISE)]
        return self.error("; ".join(dict.fromkeys(lines)) or "the settings do not compose", where=where, fix="")


@cache
def _types_of(schema: Hashable) -> Mapping[str, str]:
    return {setting.key: setting.type for setting in explain_settings(cast(Any, schema))}


def _is_text(kind: str) -> bool:
    return kind in ("str", "str or null", "map of str")


def _is_other_number(value: Any) -> bool:
    """Return True for a number, quoted or not, other than 0 and 1, which OmegaConf would read as true."""
    try:
        return isinstance(value, int | float | str) and float(value) not in (0, 1)
    except ValueError:
        return False


def _top_keys(file: Path) -> set[str]:
    """Return the top-level keys of a file; none for invalid YAML, which is refused when the file is chosen."""
    try:
        # All experiments are read for a suggestion, so use the C loader if PyYAML has it.
        content = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return set()
    return set(content) - {"defaults"} if isinstance(content, dict) else set()
