"""A dataset of the harness in Megatron-Bridge: `cfg.dataset = HarnessDataset(path=...)`, and nothing else changes.

Bridge builds it through its `DatasetProvider`, reads it with `dataloader_type="external"` in its own `gpt_step`, and
saves its position with the checkpoint. A resume on another number of data-parallel ranks reads exactly the rest.

Bridge runs global_batch_size / data-parallel size microbatches in every step, so only `as_packed` fits: one stored pack
is one microbatch. Balanced schedules need another number in each step. For them Bridge would have to take the number
from the iterator, where `train_step`, `_dummy_train_step` and `evaluate` take that of Megatron's calculator; to count
the samples of a step by the packs that were read; and, with a pipeline, to exchange the sizes of rows between stages.

Written for megatron-bridge 0.3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch

from harness.checks import bounded, check_numbers
from harness.errors import ConfigError
from harness.formats import open_dataset
from harness.integrations import FixedRows, RankStream, as_packed_rows, require, require_as_packed
from harness.integrations.fixed_rows import saved_position
from harness.loader import LoaderConfig, RankLayout
from harness.megatron.job.runtime import place_in_groups
from harness.thd import ThdBatch, padding_multiple

require("megatron_bridge")

from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_micro_batch_size,
    get_num_microbatches,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine

# Settings of the loader that Bridge has already.
_OF_BRIDGE = ("global_batch_size", "num_workers", "persistent_workers", "seed")


@dataclass(kw_only=True)
class HarnessDataset(DatasetProvider):  # type: ignore[misc]
    """Bridge's settings of a dataset that `harness prepare` wrote.

    `num_workers`, `pin_memory` and `persistent_workers` are Bridge's; the global batch size is that of `cfg.train`,
    whose micro_batch_size has to be 1.

    Attributes:
        path: the dataset, as `open_dataset` takes it.
        valid_path, test_path: datasets of the evaluations; every evaluation reads the same packs, from the first on.
        seq_length: pad every row to this many tokens, which has to be cfg.model.seq_length: needed with a pipeline,
            whose stages exchange activations of that size. None leaves every row as long as its pack.
        schedule: as_packed; others need a number of microbatches that Bridge does not know.
        seed: of the order.
        loader: other settings of `LoaderConfig` by name, such as block_packs, shuffle or allow_other_data.
        dataloader_save: folder of the positions, usually cfg.checkpoint.save; None to keep none.
        dataloader_load: folder to resume from; None for `dataloader_save`.
    """

    path: str
    valid_path: str | None = None
    test_path: str | None = None
    seq_length: int | None = bounded(None, lowest=1)
    schedule: str = "as_packed"
    seed: int = 0
    loader: dict[str, Any] = field(default_factory=dict)
    dataloader_type: str | None = "external"
    dataloader_save: str | None = None
    dataloader_load: str | None = None

    def __post_init__(self) -> None:
        require_as_packed(self.schedule, trainer="Megatron-Bridge", setting="dataset.schedule")
        if self.dataloader_type != "external":
            raise ConfigError(
                f"dataloader_type is {self.dataloader_type!r}",
                where="dataset.dataloader_type",
                fix="use 'external': the harness defines the order and the rows of each rank",
            )
        check_numbers(self, "dataset")
        self._loader_config(1)

    def build_datasets(
        self, context: DatasetBuildContext
    ) -> tuple[BridgeRows | None, BridgeRows | None, BridgeRows | None]:
        """Open the datasets of this rank; Bridge calls it once the process groups exist.

        Raises:
            HarnessError: a layout or a batch size that does not fit, or a dataset that cannot be read.
        """
        layout = self._layout()
        if get_micro_batch_size() != 1:
            what = f"micro_batch_size is {get_micro_batch_size()}, but a packed row is a whole microbatch"
            raise ConfigError(what, where="train.micro_batch_size", fix="set it to 1; global_batch_size counts packs")
        # Megatron has no public function for it; without this check the run would stop where the batch first grows.
        calculator = vars(num_microbatches_calculator).get("_GLOBAL_NUM_MICROBATCHES_CALCULATOR")
        if hasattr(calculator, "batch_size_increment"):
            raise _changing_batch_size("the global batch grows during training")
        size = get_current_global_batch_size()
        evaluation_steps = context.test_samples // size

        def rows(path: str | None, wanted: int, steps: int | None) -> BridgeRows | None:
            return None if path is None or wanted == 0 else self._open(path, layout, size, evaluation_steps=steps)

        return (
            rows(self.path, context.train_samples, None),
            rows(self.valid_path, context.valid_samples, evaluation_steps),
            rows(self.test_path, context.test_samples, evaluation_steps),
        )

    def _open(self, path: str, layout: RankLayout, size: int, *, evaluation_steps: int | None) -> BridgeRows:
        reader = open_dataset(path)
        # Evaluations read the first packs as they are stored.
        config = self._loader_config(
            size, **({} if evaluation_steps is None else {"shuffle": False, "drop_last": False})
        )
        schedule = as_packed_rows(
            reader.pack_offsets,
            reader.sequence_lengths,
            layout,
            pad_rows_to=self.seq_length,
            setting="dataset.seq_length",
        )
        stream = RankStream(reader, config, schedule=schedule, layout=layout)
        rows = FixedRows(stream, rows_per_step=size // layout.dp_size, pad_rows_to=self.seq_length)
        pin = bool(self.pin_memory) and torch.cuda.is_available()
        if evaluation_steps is not None:
            return BridgeRows(rows, pin_memory=pin, repeat_steps=evaluation_steps)
        return BridgeRows(rows, pin_memory=pin, resume_from=self.dataloader_load or self.dataloader_save)

    def _loader_config(self, size: int, **changes: Any) -> LoaderConfig:
        known = [one.name for one in fields(LoaderConfig) if one.name not in _OF_BRIDGE]
        for name in self.loader:
            if name not in known:
                what = f"the loader has no setting {name!r}, or Bridge and dataset.seed set it"
                raise ConfigError(what, where="dataset.loader", fix=f"choose one of {', '.join(known)}")
        return LoaderConfig(
            global_batch_size=size,
            seed=self.seed,
            num_workers=self.num_workers,
            persistent_workers=self.persistent_workers,
            **{**self.loader, **changes},
        )

    def _layout(self) -> RankLayout:
        if not parallel_state.model_parallel_is_initialized():
            raise ConfigError(
                "Megatron's global process groups do not exist",
                where="HarnessDataset.build_datasets",
                fix="build the dataset with Bridge and cfg.dist.use_decentralized_pg=False",
            )
        num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        if num_stages > 2:
            raise ConfigError(
                f"the pipeline has {num_stages} stages: Bridge's gpt_step reads no batch between the first and the "
                "last, whose attention would cross from one sequence into the next",
                where="model.pipeline_model_parallel_size",
                fix="set it to 1 or 2, or train with recipes.sft, which sends the bounds to every stage",
            )
        if num_stages > 1 and self.seq_length is None:
            what = "rows differ in length, but the stages of Bridge's pipeline exchange activations of model.seq_length"
            raise ConfigError(what, where="dataset.seq_length", fix="set it to model.seq_length")
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        if (chunks or 1) > 1 and (self.dataloader_save or self.dataloader_load):
            raise ConfigError(
                f"the pipeline has {chunks} model chunks per rank: Bridge reads each with a separate iterator and "
                "does not save their positions",
                where="dataset.dataloader_save",
                fix="set model.virtual_pipeline_model_parallel_size=None, or do not save positions",
            )
        layout = place_in_groups()
        # Whether the model is sequence-parallel is not known here; its padding is right for both.
        tp_size, cp_size = layout.tp_size, layout.cp_size
        multiple = padding_multiple(cp_size=cp_size, tp_size=tp_size, sequence_parallel=tp_size > 1)
        return replace(layout, pad_to_multiple=multiple)


class BridgeRows:
    """The iterator that Bridge takes as an external dataloader: one microbatch at a time, as a dict of tensors.

    It moves to the position of a checkpoint when its first row is read, because only then Bridge's step is known.

    Args:
        pin_memory: return tensors in pinned memory.
        resume_from: folder of the positions that Bridge saved; None to begin at the first pack.
        repeat_steps: begin again after this many steps, as evaluations do; None to read on.
    """

    def __init__(
        self, rows: FixedRows, *, pin_memory: bool, resume_from: str | None = None, repeat_steps: int | None = None
    ) -> None:
        self._rows = rows
        self._pin_memory = pin_memory
        self._resume_from = resume_from
        self._repeat_steps = repeat_steps
        self._start = rows.state_dict()
        self._is_placed = False
        self._num_steps = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._rows.starts_step:
            self._begin_step()
        batch = bridge_batch(next(self._rows))
        return {key: value.pin_memory() for key, value in batch.items()} if self._pin_memory else batch

    def save_state(self) -> dict[str, int | str]:
        """Return the position after the steps so far, the same on every rank; Bridge saves it with its checkpoint."""
        return self._rows.state_dict()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Move to a position that `save_state` returned, on any number of data-parallel ranks.

        Raises:
            LoaderError: it is no such position, or of another dataset, seed, order or tokenizer.
        """
        self._rows.load_state_dict(state)
        self._is_placed = True

    def _begin_step(self) -> None:
        if self._repeat_steps is not None:
            if self._num_steps == self._repeat_steps:
                self._rows.load_state_dict(self._start)
                self._num_steps = 0
            self._num_steps += 1
            return
        if get_num_microbatches() != self._rows.rows_per_step:
            raise _changing_batch_size(
                f"the step has {get_num_microbatches()} microbatches, but the data was opened for "
                f"{self._rows.rows_per_step}"
            )
        if not self._is_placed:
            # Megatron counts a step before it reads it.
            step = get_rerun_state_machine().current_iteration - 1
            if step > 0:
                folders = [self._resume_from] if self._resume_from else []
                fix = (
                    "set dataset.dataloader_save to the folder of the checkpoints in both runs; to read from the first "
                    "pack, load the checkpoint with cfg.checkpoint.finetune=True"
                )
                self.restore_state(saved_position(folders, step, where="dataset.dataloader_save", fix=fix))
            self._is_placed = True


def bridge_batch(row: ThdBatch) -> dict[str, torch.Tensor]:
    """Return a row of T padded tokens and S sequences as Bridge's `gpt_step` takes it.

    Returns:
        tokens, labels, position_ids: int64 [1, T].
        loss_mask: float32 [1, T].
        cu_seqlens: int32 [1, S + 1], padded bounds, and `cu_seqlens_argmin` int64 [1, 1], its length.
        cu_seqlens_unpadded, cu_seqlens_unpadded_argmin: the same of real tokens, only where some are padded.
        max_seqlen: int32 [1, 1].
    """
    bounds = {"cu_seqlens": row.cu_seqlens_padded}
    if not (row.cu_seqlens == row.cu_seqlens_padded).all():
        bounds["cu_seqlens_unpadded"] = row.cu_seqlens
    batch = {name: torch.from_numpy(getattr(row, name))[None] for name in ("tokens", "labels", "position_ids")}
    batch["loss_mask"] = torch.from_numpy(row.loss_mask)[None]
    for name, values in bounds.items():
        batch[name] = torch.from_numpy(values)[None]
        # Bridge cuts the bounds here; it marks the end of its own with -1, which ours do not need.
        batch[f"{name}_argmin"] = torch.tensor([[len(values)]])
    batch["max_seqlen"] = torch.tensor([[row.max_seqlen]], dtype=torch.int32)
    return batch


def _changing_batch_size(what: str) -> ConfigError:
    return ConfigError(
        what,
        where="train.rampup_batch_size",
        fix="keep the global batch size: set rampup_batch_size=None and decrease_batch_size_if_needed=False",
    )
