"""A dataset of the harness in Megatron-Bridge: `cfg.dataset = HarnessDataset(path=...)`, trained by `forward_step`.

Bridge builds it through `DatasetProvider`. Its source calls that class deprecated, but 0.6.2 takes no other settings of
a dataset than its own and those of this class. It reads the rows with `dataloader_type="external"`, runs them with its
`gpt_step` in our `forward_step`, and saves their position with the checkpoint. A resume on another number of
data-parallel ranks reads exactly the rest.

Bridge runs global_batch_size / data-parallel size microbatches in every step, so only `as_packed` fits: one stored pack
is one microbatch. Balanced schedules need another number in each step. For them Bridge would have to take the number
from the iterator, where `train_step`, `_dummy_train_step` and `evaluate` take that of Megatron's calculator; to count
the samples of a step by the packs that were read; and, with a pipeline, to exchange the sizes of rows between stages.

Written for megatron-bridge 0.6.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from harness.checks import bounded, check_numbers
from harness.errors import ConfigError
from harness.formats import open_dataset
from harness.integrations import FixedRows, RankStream, as_packed_rows, require, require_as_packed
from harness.integrations.stream import saved_position
from harness.loader import LoaderConfig, RankLayout
from harness.megatron.batch import padding_argument
from harness.megatron.job.runtime import place_in_groups
from harness.thd import ThdBatch, context_parallel_indices, padding_multiple

require("megatron_bridge")

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.data.packing.config import PackedSequenceSpecs
from megatron.bridge.training import gpt_step
from megatron.bridge.training.state import GlobalState
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches

# Settings of the loader that a dataset of Bridge has already, beside the global batch size.
_OF_BRIDGE = ("num_workers", "persistent_workers", "seed")


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
        dataloader_save: folder of the positions; None for Bridge's, the subfolder energon of cfg.checkpoint.save.
        dataloader_load: folder to resume from; None for `dataloader_save`, or Bridge's folder in the checkpoint.
    """

    # With these, stages between the first and the last read a batch too, and get the bounds of its sequences. Bridge
    # wants a size, and reads no file for it.
    enable_offline_packing: ClassVar[bool] = True
    offline_packing_specs: ClassVar[PackedSequenceSpecs] = PackedSequenceSpecs(packed_sequence_size=1)

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
            fix = "use 'external': the harness defines the order and the rows of each rank"
            raise ConfigError(f"dataloader_type is {self.dataloader_type!r}", where="dataset.dataloader_type", fix=fix)
        check_numbers(self, "dataset")
        self._loader_config(1)

    def build_datasets(
        self, context: DatasetBuildContext
    ) -> tuple[BridgeRows | None, BridgeRows | None, BridgeRows | None]:
        """Open the datasets of this rank; Bridge calls it once the process groups exist.

        Raise HarnessError for a layout or a batch size that does not fit, or a dataset that cannot be read.
        """
        layout, size, pad_to = self._layout(), get_current_global_batch_size(), self.seq_length
        evaluation_steps, pin = context.test_samples // size, bool(self.pin_memory) and torch.cuda.is_available()

        def rows(path: str | None, wanted: int, steps: int | None) -> BridgeRows | None:
            if path is None or wanted == 0:
                return None
            reader = open_dataset(path)
            # Evaluations read the first packs as they are stored.
            config = self._loader_config(size, **({} if steps is None else {"shuffle": False, "drop_last": False}))
            schedule = as_packed_rows(
                reader.pack_offsets, reader.sequence_lengths, layout, pad_rows_to=pad_to, setting="dataset.seq_length"
            )
            stream = RankStream(reader, config, schedule=schedule, layout=layout)
            fixed = FixedRows(stream, rows_per_step=size // layout.dp_size, pad_rows_to=pad_to)
            return BridgeRows(fixed, self, pin_memory=pin, repeat_steps=steps)

        return (
            rows(self.path, context.train_samples, None),
            rows(self.valid_path, context.valid_samples, evaluation_steps),
            rows(self.test_path, context.test_samples, evaluation_steps),
        )

    def _loader_config(self, size: int, **changes: Any) -> LoaderConfig:
        known = [one.name for one in fields(LoaderConfig) if one.name not in ("global_batch_size", *_OF_BRIDGE)]
        for name in self.loader:
            if name not in known:
                what = f"the loader has no setting {name!r}, or Bridge and dataset.seed set it"
                raise ConfigError(what, where="dataset.loader", fix=f"choose one of {', '.join(known)}")
        own = {name: getattr(self, name) for name in _OF_BRIDGE}
        return LoaderConfig(global_batch_size=size, **own, **{**self.loader, **changes})

    def _layout(self) -> RankLayout:
        if not parallel_state.model_parallel_is_initialized():
            what = "Megatron's global process groups do not exist"
            fix = "build the dataset with Bridge and cfg.dist.use_decentralized_pg=False"
            raise ConfigError(what, where="HarnessDataset.build_datasets", fix=fix)
        num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        if num_stages > 1 and self.seq_length is None:
            what = "rows differ in length, but the stages of Bridge's pipeline exchange activations of model.seq_length"
            raise ConfigError(what, where="dataset.seq_length", fix="set it to model.seq_length")
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        if (chunks or 1) > 1 and (self.dataloader_save or self.dataloader_load):
            what = f"the pipeline has {chunks} model chunks per rank: Bridge reads each with a separate iterator and "
            what += "does not save their positions"
            fix = "set model.virtual_pipeline_model_parallel_size=None, or do not save positions"
            raise ConfigError(what, where="dataset.dataloader_save", fix=fix)
        layout = place_in_groups()
        # Whether the model is sequence-parallel is not known here; its padding is right for both.
        tp_size, cp_size = layout.tp_size, layout.cp_size
        multiple = padding_multiple(cp_size=cp_size, tp_size=tp_size, sequence_parallel=tp_size > 1)
        return replace(layout, pad_to_multiple=multiple)


class BridgeRows:
    """The iterator that Bridge takes as an external dataloader: one microbatch at a time, as a dict of tensors.

    It moves to the position of a checkpoint at the first row, because only then Bridge's step is known. Bridge's own
    loading, for which an iterator has a `restore_state`, refuses a rank that had no file when the checkpoint was saved.
    It begins again after `repeat_steps`, as evaluations do; None to read on.
    """

    def __init__(
        self, rows: FixedRows, dataset: HarnessDataset, *, pin_memory: bool, repeat_steps: int | None = None
    ) -> None:
        self._rows, self._dataset, self._pin_memory = rows, dataset, pin_memory
        self._repeat_steps, self._num_steps = repeat_steps, 0
        self._start, self._is_placed = rows.state_dict(), False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if not self._is_placed:
            what = "Bridge reads the rows in a forward step without their padding mask and without their position"
            fix = "use this module's forward step: from harness.integrations.megatron_bridge import forward_step"
            raise ConfigError(what, where="the forward step of finetune or pretrain", fix=fix)
        if self._rows.starts_step and self._repeat_steps is not None:
            if self._num_steps == self._repeat_steps:
                self._rows.load_state_dict(self._start)
                self._num_steps = 0
            self._num_steps += 1
        elif self._rows.starts_step and get_num_microbatches() != self._rows.rows_per_step:
            what = f"the step has {get_num_microbatches()} microbatches, but the data was opened for "
            raise _changing_batch_size(f"{what}{self._rows.rows_per_step}")
        batch = bridge_batch(next(self._rows))
        return {key: value.pin_memory() for key, value in batch.items()} if self._pin_memory else batch

    def save_state(self) -> dict[str, int | str]:
        """Return the position after the steps so far, the same on every rank; Bridge saves it with its checkpoint."""
        return self._rows.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position that `save_state` returned, on any number of ranks; see `RankStream.load_state_dict`."""
        self._rows.load_state_dict(state)
        self._is_placed = True

    def place(self, state: GlobalState) -> None:
        """Move to the position of the checkpoint that Bridge continues from, before the first row.

        Raise CheckpointError if there is none, and ConfigError if settings of Bridge do not fit the rows.
        """
        if self._is_placed:
            return
        if state.cfg.train.rampup_batch_size is not None:
            raise _changing_batch_size("the global batch grows during training")
        if state.cfg.model.mtp_num_layers:
            what = "Bridge passes no loss mask to MTP layers, which would train prompts and padding"
            raise ConfigError(what, where="model.mtp_num_layers", fix="set it to None")
        size, expected = self._dataset.seq_length, state.cfg.model.seq_length
        if size not in (None, expected) and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            what = f"rows have {size:,} tokens, but the stages of the pipeline exchange activations of {expected:,}"
            raise ConfigError(what, where="dataset.seq_length", fix="set it to model.seq_length")
        evaluation = state.cfg.validation
        sizes = evaluation.eval_global_batch_size, evaluation.eval_micro_batch_size
        if self._repeat_steps is not None and sizes != (get_current_global_batch_size(), 1):
            what = f"evaluations have global batches of {sizes[0]} and microbatches of {sizes[1]}"
            where = "validation.eval_global_batch_size, validation.eval_micro_batch_size"
            raise ConfigError(what, where=where, fix="leave both unset: the sizes of training are used")
        if self._repeat_steps is None and (step := state.train_state.step) > 0:
            fix = "set dataset.dataloader_load to the folder of the positions; to read from the first pack, load the "
            fix += "checkpoint with cfg.checkpoint.finetune=True"
            folders = self._folders(state.cfg.checkpoint)
            self.load_state_dict(saved_position(folders, step, where="dataset.dataloader_load", fix=fix))
        self._is_placed = True

    def _folders(self, checkpoint: Any) -> list[str]:
        if self._dataset.dataloader_load:
            return [self._dataset.dataloader_load]
        roots = [Path(root) for root in (checkpoint.load, checkpoint.save) if root]
        # Bridge can load the folder of one iteration, too.
        roots = [root.parent if root.name.startswith("iter_") else root for root in roots]
        saved = [self._dataset.dataloader_save] if self._dataset.dataloader_save else []
        return [*saved, *(str(folder) for root in roots for folder in (root / "energon", root))]


def forward_step(state: GlobalState, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    """Run Bridge's `gpt_step.forward_step` on the next row; routers of experts get the mask of its padding.

    Raise HarnessError if the rows cannot be continued, or settings of Bridge do not fit them.
    """
    if return_schedule_plan:
        what = "Bridge schedules overlapped expert communication without sequence boundaries"
        raise ConfigError(what, where="comm_overlap.overlap_moe_expert_parallel_comm", fix="set it to False")
    rows = getattr(data_iterator, "iterable", None)
    if not isinstance(rows, BridgeRows):
        what = f"this forward step requires a HarnessDataset, but the data is {type(rows).__name__}"
        raise ConfigError(what, where="cfg.dataset", fix="pass the forward step of Bridge's gpt_step to finetune")
    rows.place(state)
    batch = next(data_iterator)
    mask, cp_size = batch.pop("padding_mask"), parallel_state.get_context_parallel_world_size()
    if cp_size > 1:
        rank = parallel_state.get_context_parallel_rank()
        mask = mask[:, context_parallel_indices(batch["cu_seqlens"][0].numpy(), cp_size=cp_size, cp_rank=rank)]
    added = padding_argument(model, mask.cuda(non_blocking=True))
    with model.register_forward_pre_hook(lambda _, args, named: (args, {**named, **added}), with_kwargs=True):
        return gpt_step.forward_step(state, iter([batch]), model)


def bridge_batch(row: ThdBatch) -> dict[str, torch.Tensor]:
    """Return a row of T padded tokens and S sequences as Bridge's `gpt_step` takes it.

    Returns:
        tokens, labels, position_ids: int64 [1, T].
        loss_mask: float32 [1, T].
        cu_seqlens: int32 [1, S + 1], padded bounds, and `cu_seqlens_argmin` int64 [1, 1], its length.
        cu_seqlens_unpadded, cu_seqlens_unpadded_argmin: the same of real tokens, only where some are padded.
        max_seqlen: int32 [1, 1].
        padding_mask: bool [1, T], True at padding.
    """
    bounds = {"cu_seqlens": row.cu_seqlens_padded}
    if not (row.cu_seqlens == row.cu_seqlens_padded).all():
        bounds["cu_seqlens_unpadded"] = row.cu_seqlens
    names = ("tokens", "labels", "position_ids", "loss_mask", "padding_mask")
    batch = {name: torch.from_numpy(getattr(row, name))[None] for name in names}
    for name, values in bounds.items():
        batch[name] = torch.from_numpy(values)[None]
        # Bridge cuts the bounds here; it marks the end of its own with -1, which ours do not need.
        batch[f"{name}_argmin"] = torch.tensor([[len(values)]])
    batch["max_seqlen"] = torch.tensor([[row.max_seqlen]], dtype=torch.int32)
    return batch


def _changing_batch_size(what: str) -> ConfigError:
    fix = "keep the global batch size: set rampup_batch_size=None and decrease_batch_size_if_needed=False"
    return ConfigError(what, where="train.rampup_batch_size", fix=fix)
