"""Settings of a training run as plain dataclasses: `SftConfig`, `PretrainConfig` and the settings that both share.

Each dataclass checks its values on construction and reads nothing from disk. `check_layout` (sizes alone) and `check`
(everything that needs no data) refuse settings that do not fit a number of ranks, before any process group exists.
Nothing here imports torch, Megatron-Core or Hydra, so `harness plan` and `harness submit` run without them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Self

from harness.checks import (
    LONGEST_S,
    SET,
    Bounds,
    CheckedSettings,
    Condition,
    Rule,
    bounded,
    check_rules,
    includes,
    one_of,
    other_than,
    read_rules,
    require_bounds,
    show_value,
)
from harness.errors import ConfigError
from harness.loader import CorpusConfig, DataConfig, LoaderConfig
from harness.plan.hf_config import check_exported
from harness.plan.layout import DTYPE_BYTES, ParallelConfig, fp8_rank_multiple, fp8_row_multiple
from harness.plan.model import ModelConfig
from harness.plan.model_checks import check_division, check_scan_offsets, scan_numbers
from harness.printing import count_of
from harness.schedule import DYNAMIC, ScheduleConfig
from harness.thd import LOSS_AVERAGES, shared_multiple

_USUAL_STEPS, _NO_LAST_STEP = 60, 1 << 31
_USUAL_LR = {"random": 2e-3, "pretrained": 1e-5, "LoRA": 2e-4}
_USUAL_WARMUP = 5
TRACKERS = ("tensorboard", "wandb", "mlflow")
ON_STRAGGLER = ("report", "exclude")
# Adjacent bfloat16 numbers differ by up to 2**-7 of their value; changes of less than half of that can be lost.
_LARGEST_BETA = 1 - 2**-8
_TOO_SLOW = Condition(f"above {_LARGEST_BETA}", lambda beta: beta > _LARGEST_BETA)


@dataclass
class OptimizerConfig(CheckedSettings, section="optimizer"):
    """AdamW and its learning-rate schedule.

    `config.yaml` in the run's folder records the values that null stands for, and a run that resumes keeps them.

    Attributes:
        lr: peak learning rate. Null uses 2e-4 with LoRA, 1e-5 for full training of pretrained weights
            (`model.init_from`), and 2e-3 for training from random weights.
        min_lr_ratio: final learning rate as a fraction of lr.
        warmup_ratio: length of the linear warm-up from 0 to lr as a fraction of decay_steps, rounded up.
        warmup_steps: length of the warm-up in steps; overrides warmup_ratio. Null uses warmup_ratio, or 5 if it is
            unknown.
        decay_steps: step at which the learning rate reaches its final value. Null uses the number of steps of the run;
            if that is unknown, the learning rate stays at lr.
        decay: `cosine`, `linear`, `constant` or `inverse-square-root`.
        weight_decay: weight decay coefficient of AdamW.
        beta1, beta2: decay rates of AdamW's first and second moment.
        eps: term added to AdamW's denominator for numerical stability.
        clip_grad: maximum gradient norm; 0 disables clipping.
        moments_dtype: dtype of the stored moments. bfloat16 reduces the optimizer's memory to two thirds, and updates
            are still computed in float32. Requires Transformer Engine's Adam, a bfloat16 model and the distributed
            optimizer.
        offload: fraction of the optimizer state, 0 to 1, that is kept in host memory and updated by the CPU, which
            makes steps slower. Requires a bfloat16 model and the distributed optimizer.
    """

    lr: float | None = bounded(None, above=0, highest=100)
    min_lr_ratio: float = bounded(0.1, lowest=0, highest=1)
    warmup_ratio: float = bounded(0.03, lowest=0, highest=1)
    warmup_steps: int | None = bounded(None)
    decay_steps: int | None = bounded(None, lowest=1)
    decay: str = one_of("cosine", ("cosine", "linear", "constant", "inverse-square-root"))
    weight_decay: float = bounded(0.01, lowest=0, highest=100)
    beta1: float = bounded(0.9, lowest=0, below=1)
    beta2: float = bounded(0.95, lowest=0, below=1)
    eps: float = bounded(1e-8, above=0, highest=1)
    clip_grad: float = bounded(1.0, lowest=0)
    moments_dtype: str = one_of("float32", DTYPE_BYTES)
    offload: float = bounded(0.0, lowest=0, highest=1)

    rules = (
        *(
            Rule(
                {f"optimizer.{beta}": _TOO_SLOW, "optimizer.moments_dtype": "bfloat16"},
                f"a change of less than {1 - _LARGEST_BETA:.2g} of a moment is rounded away in bfloat16",
                f"optimizer.{beta}={_LARGEST_BETA} or less, or optimizer.moments_dtype=float32",
            )
            for beta in ("beta1", "beta2")
        ),
        *read_rules("""
            optimizer.moments_dtype=bfloat16, optimizer.offload | Megatron-Core keeps the moments of an optimizer on the
              host in float32 | optimizer.moments_dtype=float32, or optimizer.offload=0
        """),
    )

    def resolved(self, model: ModelConfig, steps: int | None) -> OptimizerConfig:
        """Return a copy with null values replaced, for a run of `steps` steps; None if their number is unknown."""
        kind = "LoRA" if model.lora_rank else "random" if model.init_from is None else "pretrained"
        decay = self.decay_steps or steps
        # Rounded before `ceil`: in floating point, 0.07 * 100 is slightly more than 7.
        warmup = min(math.ceil(round(self.warmup_ratio * decay, 6)), decay - 1) if decay else _USUAL_WARMUP
        return replace(
            self,
            lr=_USUAL_LR[kind] if self.lr is None else self.lr,
            warmup_steps=warmup if self.warmup_steps is None else self.warmup_steps,
            decay_steps=decay,
        )

    def describe(self) -> str:
        """Describe the learning-rate schedule of resolved settings."""
        assert self.lr is not None
        assert self.warmup_steps is not None
        text = f"learning rate {self.lr:g} after {count_of(self.warmup_steps, 'warm-up step')}"
        if self.decay == "inverse-square-root":
            return f"{text}, {self.decay} decay"
        if self.decay == "constant" or self.decay_steps is None:
            return f"{text}, without decay"
        steps = count_of(self.decay_steps, "step")
        return f"{text}, {self.decay} decay to {self.lr * self.min_lr_ratio:g} over {steps}"


@dataclass
class TrainerConfig(CheckedSettings, section="trainer"):
    """Length of the training, validation, checkpoints and records.

    Attributes:
        steps: total number of optimizer steps, resumes included. Null uses `epochs`, or on live data, the end of the
            stream.
        epochs: passes over the packed dataset, instead of steps. If neither is set, a run trains 1 epoch from
            pretrained weights and 60 steps otherwise.
        loss_average: unit over which the loss and validation losses are averaged. `token` weights every trained token
            equally; `conversation` weights every conversation (a sequence with trained tokens) equally.
        eval_interval: steps between validations; 0 disables them. The last step is always validated.
        eval_batches: global batches per validation; null uses the whole validation set.
        early_stop: stop after this many consecutive validations without a new lowest loss; 0 disables early stopping.
        checkpoint_interval: steps between checkpoints; 0 saves only the last.
        keep_checkpoints: number of newest checkpoints to keep.
        background_checkpoints: continue training while a checkpoint is written. The next checkpoint waits for it.
        device: auto, cpu or cuda.
        deterministic: use only kernels with bit-identical results, even if they are slower.
        timeout_s: seconds without progress of a rank after which the job ends with an error that names the rank.
        startup_timeout_s: the same limit for each stage of the startup: connecting the ranks, opening the data,
            building indices, loading weights.
        drift_interval: steps between comparisons of the parameters that are replicated on several ranks. A run whose
            replicas differ ends with an error. The last step is always compared; 0 disables the comparison.
        collect_interval: number of steps, or of validation batches, after which all ranks collect Python's garbage at
            the same time. The first collection takes about 0.1 s, later ones 1 ms. With 0, every rank collects at
            other times, and all ranks wait for each collection.
        record_digests: write digests of the data of every step into the run's folder (`harness.train.digests`).
        record_batches: also write the data itself: 28 bytes per token before compression. Intended for small runs.
        trackers: experiment trackers, any of tensorboard, wandb and mlflow; `metrics.jsonl` is always written. Trackers
            are configured with their own environment variables, such as WANDB_PROJECT or MLFLOW_TRACKING_URI.
        straggler_ratio: report a rank as slow if the time that it spends computing in a step exceeds that of the other
            ranks by this factor; null disables the check.
        straggler_steps: number of consecutive slow steps before a rank is reported.
        on_straggler: `report` slow ranks in the log, metrics and report, or `exclude`: a job of `harness submit` saves
            a checkpoint and restarts without the rank's node.
        sample_prompts: user messages that the model answers at every validation, in `samples.jsonl`.
        sample_tokens: maximum number of tokens per answer.
    """

    steps: int | None = bounded(None, lowest=1)
    epochs: int | None = bounded(None, lowest=1)
    loss_average: str = one_of("token", LOSS_AVERAGES)
    eval_interval: int = bounded(20)
    eval_batches: int | None = bounded(None, lowest=1)
    early_stop: int = bounded(0)
    checkpoint_interval: int = bounded(20)
    keep_checkpoints: int = bounded(2, lowest=1)
    background_checkpoints: bool = True
    device: str = "auto"
    deterministic: bool = False
    timeout_s: float = bounded(600.0, above=0, highest=LONGEST_S)
    startup_timeout_s: float = bounded(1800.0, above=0, highest=LONGEST_S)
    drift_interval: int = bounded(20)
    collect_interval: int = bounded(100)
    record_digests: bool = False
    record_batches: bool = False
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    straggler_ratio: float | None = bounded(1.5, above=1, highest=1_000_000)
    straggler_steps: int = bounded(10, lowest=1)
    on_straggler: str = one_of("report", ON_STRAGGLER)
    sample_prompts: list[str] = field(default_factory=list)
    sample_tokens: int = bounded(48, lowest=1)

    rules = read_rules("""
        trainer.steps, trainer.epochs | both define the length of the run
          | omit one, or override it with null if a file sets it, such as trainer.steps=null
    """)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not set(self.trackers) <= set(TRACKERS) or len(set(self.trackers)) < len(self.trackers):
            fix = f"[] or some of {', '.join(TRACKERS)}, each once"
            raise ConfigError(f"trackers are {', '.join(self.trackers)}", where="trainer.trackers", fix=fix)

    @property
    def last_step(self) -> int:
        """The last step, or a number that no run reaches if only the end of a stream ends the run."""
        return self.steps if self.steps is not None else _NO_LAST_STEP

    @property
    def patience_s(self) -> float:
        """Timeout of collectives: longer than the watchdog's, so that the watchdog can first name the missing rank."""
        return max(self.startup_timeout_s, self.timeout_s) + 60


_FLOAT32, _ON_CPU = {"model.dtype": "float32"}, {"trainer.device": "cpu"}
_ENGINE = Condition("a kernel of Transformer Engine", lambda attention: attention not in ("auto", "torch"))
_DTYPES = read_rules("""
    parallel.gradient_dtype=bfloat16, model.dtype!=bfloat16 | gradients cannot have lower precision than weights
      | model.dtype=bfloat16, or parallel.gradient_dtype=float32
    model.dtype=float32, model.attention=flash | this kernel does not support float32
      | model.dtype=bfloat16, or model.attention=torch
    model.dtype=float32, model.attention=fused | this kernel does not support float32
      | model.dtype=bfloat16, or model.attention=torch
""")
# Optimizer settings that depend on the model and the layout.
_OF_DISTRIBUTED = tuple(
    Rule(
        {**choice, **other},
        "Megatron-Core supports it only with the distributed optimizer and a bfloat16 model",
        f"parallel.distributed_optimizer=true and model.dtype=bfloat16, or omit {next(iter(choice))}",
    )
    for choice in ({"optimizer.moments_dtype": "bfloat16"}, {"optimizer.offload": SET})
    for other in ({"parallel.distributed_optimizer": False}, {"model.dtype": other_than("bfloat16")})
)
_FP8 = tuple(
    Rule(
        {"model.fp8": other_than("off"), **other},
        "FP8 requires a GPU, Transformer Engine, a bfloat16 model and training of all weights",
        "model.fp8=off, or the other setting",
    )
    for other in (_FLOAT32, {"model.attention": "torch"}, _ON_CPU, {"model.lora_rank": SET})
)
_ON_A_GPU = (
    *read_rules("""
        optimizer.moments_dtype=bfloat16, trainer.device=cpu | Transformer Engine's Adam requires a GPU
          | optimizer.moments_dtype=float32
        parallel.overlap_weights_with_step=true, optimizer.offload | it is not supported with an optimizer on the host
          | parallel.overlap_weights_with_step=false, or optimizer.offload=0
        parallel.cuda_graphs=true, trainer.device=cpu | CUDA graphs require a GPU | parallel.cuda_graphs=false
        parallel.overlap_tensor_parallel=true, trainer.device=cpu | it requires a GPU and bfloat16, and excludes sample
          prompts, which can be longer than a row | parallel.overlap_tensor_parallel=false, or the other setting
        parallel.overlap_tensor_parallel=true, model.dtype=float32 | it requires a GPU and bfloat16, and excludes sample
          prompts, which can be longer than a row | parallel.overlap_tensor_parallel=false, or the other setting
        parallel.overlap_tensor_parallel=true, trainer.sample_prompts | it requires a GPU and bfloat16, and excludes
          sample prompts, which can be longer than a row | parallel.overlap_tensor_parallel=false, or the other setting
    """),
    Rule(
        {"model.attention": _ENGINE, **_ON_CPU},
        "Transformer Engine requires a GPU",
        "model.attention=auto, which selects PyTorch's attention on a CPU",
    ),
)


@dataclass
class RunConfig(CheckedSettings, ABC):
    """Settings shared by all training recipes.

    Attributes:
        loader, model, optimizer, parallel, trainer: see each group.
        name: name of the experiment, used to number its runs in `runs`.
        runs: folder that contains the numbered runs.
        run_dir: folder of the run. Null uses `<runs>/<name>-NNN`: the next number, or the newest when resuming.
        resume: false, true, or auto (resume if there is a checkpoint).
        resume_unchecked: resume even from a checkpoint without `checksums.json`.
    """

    loader: LoaderConfig = field(default_factory=LoaderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    name: str = "run"
    runs: str = "runs"
    run_dir: str | None = None
    resume: str = "false"
    resume_unchecked: bool = False

    job_rules = (*_DTYPES, *_FP8, *_OF_DISTRIBUTED, *_ON_A_GPU)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resume = str(self.resume).lower()
        if self.trainer.epochs is not None and self.data_ends_with != "epochs":
            what = f"trainer.epochs is {self.trainer.epochs:,}, but only packed datasets support epochs"
            raise ConfigError(what, where="trainer.epochs", fix="trainer.steps=N trainer.epochs=null")
        if self.parallel.ranks is not None:
            self.check_layout(self.parallel.ranks)

    @property
    def data_ends_with(self) -> str:
        """Kind of end of the data: after its `epochs`, at the end of its `stream`, or none ("")."""
        return ""

    @property
    def shares_rows(self) -> bool:
        """True if data-parallel ranks may share rows."""
        return False

    def with_steps(self) -> Self:
        """Return a copy with the default number of steps or epochs if neither is set and the data is not a stream."""
        trainer, length = self.trainer, dict[str, Any]()
        if trainer.steps is None and trainer.epochs is None and self.data_ends_with != "stream":
            is_one_epoch = self.data_ends_with == "epochs" and self.model.init_from is not None
            length = {"epochs": 1} if is_one_epoch else {"steps": _USUAL_STEPS}
        return replace(self, trainer=replace(trainer, **length))

    def on(self, device: str) -> Self:
        """Return a copy with `auto` resolved for a device, `cpu` or `cuda`."""
        return replace(self, model=self.model.on(device), parallel=self.parallel.on(device))

    def planned(self) -> Self:
        """Return a copy resolved for the device in the settings; `auto` means a GPU."""
        return self.on("cpu" if self.trainer.device == "cpu" else "cuda")

    def warnings(self) -> list[str]:
        """Return a warning for each setting that the run will not follow as written, with the name of the setting."""
        found, warmup, steps, of = [], self.optimizer.warmup_steps, self.optimizer.decay_steps, "optimizer.decay_steps"
        if steps is None or steps == self.trainer.steps:
            steps, of = self.with_steps().trainer.last_step, "trainer.steps"
        if warmup and warmup >= steps:
            ends = f"the warm-up ends at step {steps - 1:,}"
            found.append(f"optimizer.warmup_steps is {warmup:,} and {of} is {steps:,}: {ends}")
        return found

    def check_dtypes(self) -> None:
        """Raise ConfigError for a dtype or device that kernels, gradients or the optimizer do not support."""
        config = self.planned()
        check_rules(config, RunConfig.job_rules)
        pads = config.parallel.padding_setting or ("schedule.name" if config.shares_rows else None)
        if _ENGINE.test(config.model.attention) and config.model.dtype == "float32" and pads is not None:
            what = f"model.dtype is float32 and {pads} is {show_value(attrgetter(pads)(config))}: Transformer Engine "
            what += "does not support float32 attention on padded or divided sequences"
            fix = "model.dtype=bfloat16, or model.attention=torch"
            raise ConfigError(what, where=f"model.dtype, {pads}", fix=fix)

    @property
    @abstractmethod
    def max_tokens_per_rank(self) -> int:
        """Tokens per context-parallel rank of the largest row."""

    @property
    def max_tokens_per_row(self) -> int:
        """Tokens of the largest row over all its context-parallel ranks."""
        return self.max_tokens_per_rank * self.parallel.context_parallel_size

    def check_layout(self, world_size: int) -> None:
        """Raise ConfigError if this many ranks cannot hold the model, the batch or the rows."""
        check_division(self.model, self.parallel)
        self.parallel.check(
            world_size, global_batch_size=self.loader.global_batch_size, max_tokens_per_rank=self.max_tokens_per_rank
        )
        if "M" in (self.model.layer_pattern or "") and self.trainer.device != "cpu" and not self.trainer.deterministic:
            sizes = self.parallel.tensor_parallel_size, self.parallel.context_parallel_size
            check_scan_offsets(self.max_tokens_per_row, scan_numbers(self.model, *sizes))

    def check(self, world_size: int) -> None:
        """Raise ConfigError for everything that can be refused without data, layout included."""
        check_exported(self.model)
        self.check_layout(world_size)
        self.check_dtypes()


_BALANCED = read_rules("""
    data.live.window_sequences, schedule.name=as_packed | this schedule trains each pack on the rank that reads it
      | schedule=dp_balanced or schedule=cost_balanced
    data.live.blend, schedule.name=as_packed | this schedule trains each pack on the rank that reads it
      | schedule=dp_balanced or schedule=cost_balanced
""")
_UNTESTED = "no test covers it with rows that ranks share"
_UNKNOWN = "the lengths of sequences that are still being generated are unknown"
_SHARED = (
    *(
        Rule({"schedule.name": DYNAMIC, name: refused}, why, f"{name}={usual}, or schedule=cost_balanced")
        for name, refused, usual, why in (
            ("parallel.context_parallel_size", other_than(1), 1, "this schedule decides how many ranks share a row"),
            ("parallel.cuda_graphs", True, "false", "a captured graph communicates within one fixed group of ranks"),
            ("data.live.path", SET, "''", _UNKNOWN),
            ("data.live.blend", SET, "[]", _UNKNOWN),
            ("model.fp8", other_than("off"), "off", _UNTESTED),
            ("parallel.expert_dispatcher", other_than("alltoall"), "alltoall", _UNTESTED),
            ("parallel.overlap_tensor_parallel", True, "false", _UNTESTED),
            ("model.recompute_modules", includes("moe"), "[core_attn]", _UNTESTED),
        )
    ),
    *read_rules(f"""
        schedule.name={DYNAMIC}, model.aux_loss, model.aux_loss_scope=row
          | the tokens of a row, which are balanced together, depend on the number of ranks that share it
          | model.aux_loss_scope=sequence, model.aux_loss=0, or schedule=cost_balanced
    """),
)


@dataclass
class SftConfig(RunConfig):
    """Settings of a fine-tuning run: the shared settings, its data, and the schedule that forms rows.

    Attributes:
        data, schedule: see each group.
    """

    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    name: str = "sft"

    job_rules = (*RunConfig.job_rules, *_BALANCED, *_SHARED)

    @property
    def data_ends_with(self) -> str:
        return "stream" if self.data.live.folders else "epochs"

    @property
    def shares_rows(self) -> bool:
        return self.schedule.name == DYNAMIC

    def on(self, device: str) -> Self:
        made = super().on(device)
        if self.shares_rows and made.model.attention == "auto" and made.model.dtype == "float32":
            # Transformer Engine does not support float32 attention on sequences divided among ranks.
            made = replace(made, model=replace(made.model, attention="torch"))
        return made

    def warnings(self) -> list[str]:
        warnings, trainer, live = super().warnings(), self.trainer, self.data.live
        decays = self.optimizer.decay not in ("constant", "inverse-square-root")
        if live.folders and trainer.steps is None and self.optimizer.decay_steps is None and decays:
            warnings.append(
                "trainer.steps and optimizer.decay_steps are null and the length of the stream is unknown: "
                "the learning rate stays at optimizer.lr after the warm-up"
            )
        if live.folders and live.completed == "trained" and trainer.checkpoint_interval == 0:
            warnings.append(
                "live.completed=trained and trainer.checkpoint_interval=0: no chunk is released before the run ends, "
                "and the producer pauses when chunks.max_waiting chunks are unread"
            )
        if live.folders and self.data.path not in ("", DataConfig().path):
            warnings.append(f"data.path={self.data.path} is ignored: the run trains on the chunks of data.live")
        return warnings

    @property
    def max_tokens_per_rank(self) -> int:
        return self.schedule.max_tokens_per_rank

    def check_layout(self, world_size: int) -> None:
        live = self.data.live
        check_rules(self, (*_BALANCED, *_SHARED))
        if live.window_sequences is not None and not live.folders:
            what = "data.live.window_sequences is set, but the run has no live data"
            fix = "omit it, or train on live chunks with data=live data.live.path=DIR"
            raise ConfigError(what, where="data.live.window_sequences", fix=fix)
        if live.folders and self.parallel.cuda_graphs:
            what = "parallel.cuda_graphs requires the maximum number of sequences in a row, unknown for live data"
            raise ConfigError(what, where="parallel.cuda_graphs, data.live", fix="parallel.cuda_graphs=false")
        super().check_layout(world_size)
        fp8, multiple = self.model.fp8, fp8_rank_multiple(self.model.fp8, self.parallel)
        if self.max_tokens_per_rank % multiple:
            what = f"model.fp8={fp8} pads rows to a multiple of {fp8_row_multiple(fp8, self.parallel)} tokens, but the "
            what += f"largest row has {self.max_tokens_per_row:,}"
            raise ConfigError(what, where="schedule.max_tokens_per_rank, model.fp8", fix=f"a multiple of {multiple}")
        chunks = shared_multiple(self.parallel.pad_to_multiple, 2) // 2
        if self.shares_rows and self.max_tokens_per_rank % chunks:
            what = f"schedule.max_tokens_per_rank is {self.max_tokens_per_rank:,}, and ranks that share a sequence "
            what += f"have two equal chunks of it, together a multiple of {chunks} tokens"
            fix = f"a multiple of {chunks}, or schedule=cost_balanced"
            raise ConfigError(what, where="schedule.max_tokens_per_rank, schedule.name", fix=fix)
        if live.window_sequences is not None and live.window_sequences < self.parallel.dp_size(world_size):
            what = f"a window of {count_of(live.window_sequences, 'sequence')} is too small for "
            what += f"{self.parallel.dp_size(world_size)} data-parallel ranks"
            raise ConfigError(what, where="data.live.window_sequences", fix="use a larger window or fewer ranks")


_CORPUS = read_rules("""
    data.reset_position_ids=true, data.reset_attention_mask=false | rotary positions follow the bounds of attention, so
      this setting alone would have no effect | add data.reset_attention_mask=true, or omit both
    data.reset_attention_mask=true, parallel.static_rows=true | the maximum row size is unknown if each document in a
      row is padded | parallel.static_rows=false, or data.reset_attention_mask=false
    trainer.loss_average!=token | a corpus has no conversations | trainer.loss_average=token
    model.vocab_size=null, model.init_from=null | the vocabulary size is unknown, because a corpus does not store it
      | model.vocab_size=N, the vocabulary size of the corpus's tokenizer
    trainer.sample_prompts | sample prompts require a tokenizer, which a corpus does not specify
      | omit them; export the run with `harness export` and generate with transformers
""")


@dataclass
class PretrainConfig(RunConfig):
    """Settings of a pretraining run: the shared settings and its corpus.

    `loader.global_batch_size` counts samples, `loader.seed` seeds Megatron's shuffle, and the loader's settings for
    shuffling packs are not used.

    Attributes:
        data: see the group.
    """

    data: CorpusConfig = field(default_factory=CorpusConfig)
    name: str = "pretrain"

    job_rules = (*RunConfig.job_rules, *_CORPUS)

    def __post_init__(self) -> None:
        super().__post_init__()
        # The seeds that Megatron's shuffle accepts.
        require_bounds(self.loader.seed, Bounds(0, highest=2**32 - 1), "seed", "loader")

    def on(self, device: str) -> Self:
        parallel = self.parallel
        if self.data.reset_attention_mask and parallel.static_rows is None:
            # Rows of padded documents have no maximum size.
            parallel = replace(parallel, static_rows=False)
        return super(PretrainConfig, replace(self, parallel=parallel)).on(device)

    @property
    def max_tokens_per_rank(self) -> int:
        data, multiple = self.data, self.parallel.pad_to_multiple
        per_rank = -(-data.micro_batch_size * data.sequence_length // self.parallel.context_parallel_size)
        return -(-per_rank // multiple) * multiple

    def check(self, world_size: int) -> None:
        super().check(world_size)
        check_rules(self, _CORPUS)
        data, size = self.data, self.loader.global_batch_size
        dp_size, group = self.parallel.dp_size(world_size), self.parallel.group_size
        if size % (data.micro_batch_size * dp_size * group):
            what = f"a global batch of {size} samples is not a multiple of {data.micro_batch_size * dp_size * group} "
            what += f"({data.micro_batch_size} in a row * {dp_size} data-parallel ranks"
            what += f" * {group} stages)" if group > 1 else ")"
            fix = "change it, data.micro_batch_size, or the layout"
            raise ConfigError(what, where="loader.global_batch_size", fix=fix)
        if data.sequence_length > self.model.max_sequence_length:
            what = f"samples of {data.sequence_length:,} tokens are longer than the model's max_sequence_length "
            what += f"{self.model.max_sequence_length:,}"
            raise ConfigError(what, where="data.sequence_length", fix="lower it, or raise model.max_sequence_length")
        weighted = any(source.weight is not None for some in data.sources().values() for source in some)
        if weighted and self.trainer.eval_batches is None:
            what = "a weighted blend is endless, so the length of its validation must be set"
            raise ConfigError(what, where="trainer.eval_batches", fix="set a number of global batches, such as 10")
