"""TODO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from harness.errors import ConfigError
from harness.loader.config import LoaderConfig
from harness.loader.corpus import CorpusConfig
from harness.loader.datasets import DataConfig
from harness.plan.layout import ParallelConfig
from harness.plan.model import ModelConfig
from harness.schedule import ScheduleConfig


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule.

    Attributes:
        lr, min_lr: largest and final learning rate.
        warmup_steps: linear from 0 to lr.
        decay_steps: where the schedule ends, None for the run's number of steps.
        decay: `cosine`, `linear`, `constant` or `inverse-square-root`.
        clip_grad: largest gradient norm, 0 for none.
    """

    lr: float = 2e-3
    min_lr: float = 2e-4
    warmup_steps: int = 5
    decay_steps: int | None = None
    decay: str = "cosine"
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_lr <= self.lr or self.lr <= 0:
            raise ConfigError(
                f"learning rates are {self.lr} (largest) and {self.min_lr} (smallest)",
                where="optimizer.lr, optimizer.min_lr",
                fix="0 <= min_lr <= lr, and lr above 0",
            )
        if self.decay not in ("cosine", "linear", "constant", "inverse-square-root"):
            raise ConfigError(
                f"decay {self.decay!r} is unknown",
                where="optimizer.decay",
                fix="one of cosine, linear, constant, inverse-square-root",
            )
        if self.warmup_steps < 0 or self.clip_grad < 0:
            raise ConfigError(
                f"warmup_steps is {self.warmup_steps} and clip_grad {self.clip_grad}",
                where="optimizer",
                fix="0 or more",
            )
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.eps > 0 and self.weight_decay >= 0):
            raise ConfigError(
                f"beta1 is {self.beta1}, beta2 {self.beta2}, eps {self.eps} and weight_decay {self.weight_decay}",
                where="optimizer",
                fix="betas of 0 to below 1, eps above 0, weight_decay of 0 or more",
            )
        if self.decay_steps is not None and self.decay_steps < 1:
            raise ConfigError(
                f"decay_steps is {self.decay_steps}",
                where="optimizer.decay_steps",
                fix="1 or more, or null for the run's number of steps",
            )


TRACKERS = ("tensorboard", "wandb", "mlflow")


_LEAST = {
    "steps": 1,
    "eval_interval": 0,
    "early_stop": 0,
    "checkpoint_interval": 0,
    "keep_checkpoints": 1,
    "sample_tokens": 1,
}


@dataclass
class TrainerConfig:
    """How long to train, when to look, and what to keep.

    Attributes:
        steps: optimizer steps of the whole run, those before a resume included.
        eval_interval: steps between validations, 0 for none; step `steps` is always validated.
        eval_batches: global batches of one validation, None for the whole validation set.
        checkpoint_interval: steps between checkpoints, 0 for only the last.
        early_stop: stop after so many validations in a row without a lower loss than the lowest before, 0 for never.
        keep_checkpoints: how many of the newest to keep.
        background_checkpoints: train on while a checkpoint is written; the next one waits for it.
        device: auto, cpu or cuda.
        timeout_s: a rank that makes no progress for so long ends the job, with a message that names it.
        startup_timeout_s: the same for each part of what comes before the first step: ranks meet, data is opened,
            indices are built, weights are loaded.
        record_digests: write digests of every step's data into the run's folder (`harness.train.digests`).
        record_batches: write the data itself too, for small runs: 28 bytes a token before compression.
        trackers: what shows the curves, any of tensorboard, wandb and mlflow; `metrics.jsonl` is always written. Their
            own variables say where: WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and so on.
        sample_prompts: what a user says; the model answers it at every evaluation, in `samples.jsonl`.
        sample_tokens: of an answer, at most.
    """

    steps: int = 60
    eval_interval: int = 20
    eval_batches: int | None = None
    early_stop: int = 0
    checkpoint_interval: int = 20
    keep_checkpoints: int = 2
    background_checkpoints: bool = True
    device: str = "auto"
    timeout_s: float = 600.0
    startup_timeout_s: float = 1800.0
    record_digests: bool = False
    record_batches: bool = False
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    sample_prompts: list[str] = field(default_factory=list)
    sample_tokens: int = 48

    def __post_init__(self) -> None:
        for name, low in _LEAST.items():
            if getattr(self, name) < low:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", where=f"trainer.{name}", fix=f"a number of {low} or more"
                )
        for name in ("timeout_s", "startup_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", where=f"trainer.{name}", fix="seconds above 0")
        if self.eval_batches is not None and self.eval_batches < 1:
            raise ConfigError(
                f"eval_batches is {self.eval_batches}", where="trainer.eval_batches", fix="1 or more, or null for all"
            )
        if not set(self.trackers) <= set(TRACKERS) or len(set(self.trackers)) < len(self.trackers):
            raise ConfigError(
                f"trackers are {', '.join(self.trackers)}",
                where="trainer.trackers",
                fix=f"[] or some of {', '.join(TRACKERS)}, each once",
            )

    @property
    def patience_s(self) -> float:
        """How long a collective waits: the watchdog speaks first, which knows for whom."""
        return max(self.startup_timeout_s, self.timeout_s) + 60


@dataclass
class RunConfig(ABC):
    """Settings that every recipe that trains has.

    Attributes:
        name: of the experiment; runs are numbered below `runs` under it.
        run_dir: the run's folder, None for the next (or, to resume, the newest) `<runs>/<name>-NNN`.
        resume: false, true or auto.
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

    def __post_init__(self) -> None:
        self.resume = str(self.resume).lower()
        if self.parallel.ranks is not None:
            self.check_layout(self.parallel.ranks)

    @abstractmethod
    def check_layout(self, world_size: int) -> None:
        """Refuse a model, a batch or rows that so many ranks cannot hold; raises ConfigError. Needs no data."""


@dataclass
class SftConfig(RunConfig):
    """Settings of a fine-tuning run: those of every run, its data, and how sequences become rows."""

    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    name: str = "sft"

    def check_layout(self, world_size: int) -> None:
        self.model.check(self.parallel)
        self.parallel.check(
            world_size,
            global_batch_size=self.loader.global_batch_size,
            max_tokens_per_rank=self.schedule.max_tokens_per_rank,
        )


@dataclass
class PretrainConfig(RunConfig):
    """Settings of a pretraining run: those of every run, and its corpus.

    Of `loader`, `global_batch_size` are samples, `seed` is that of Megatron's shuffle, and what shuffles packs is not
    used.
    """

    data: CorpusConfig = field(default_factory=CorpusConfig)
    name: str = "pretrain"

    def check_layout(self, world_size: int) -> None:
        data, parallel = self.data, self.parallel
        self.model.check(parallel)
        per_rank = -(-data.micro_batch_size * data.sequence_length // parallel.context_parallel_size)
        rows = -(-per_rank // parallel.pad_to_multiple) * parallel.pad_to_multiple
        parallel.check(world_size, global_batch_size=self.loader.global_batch_size, max_tokens_per_rank=rows)
