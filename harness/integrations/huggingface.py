"""Packed rows in the Hugging Face Trainer, TRL's SFTTrainer and loops with accelerate, without padding.

`PackedTraining` is a mixin for any class of Trainer: its steps are the global batches of a `RankStream`, and its
checkpoints hold the position. `StoredRows` with `join_rows` is a plain dataset and its collator, for a Trainer that
shuffles by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.integrations.registry import require
from harness.printing import count_of

require("huggingface")

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from harness.errors import ConfigError, LoaderError
from harness.integrations.dialects import HuggingFaceRow, Row
from harness.integrations.stream import RankStream
from harness.integrations.torch import PackedDataset, StepRows, StoredRows
from harness.thd import zero_loss_row

__all__ = ["PackedTraining", "StoredRows", "check_boundaries", "join_rows"]


def join_rows(rows: list[Row]) -> Row:
    """Lay several rows of the huggingface dialect end to end as one; `collate_fn` of a DataLoader over StoredRows.

    Only `input_ids`, `labels` and `position_ids` are read, so rows whose other keys a trainer removed are fine. Raise
    DialectError for rows in the Megatron dialect.
    """
    tokens = {name: torch.cat([row[name] for row in rows], dim=1) for name in ("input_ids", "labels", "position_ids")}
    starts = torch.nonzero(tokens["position_ids"][0] == 0).flatten()
    bounds = torch.cat([starts, torch.tensor([tokens["position_ids"].shape[1]])]).to(torch.int32)
    longest = int(bounds.diff().max())
    return HuggingFaceRow(
        **tokens, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds.clone(), max_length_q=longest, max_length_k=longest
    )


def check_boundaries(model: Any) -> None:
    """Raise ConfigError if one sequence of a row changes the logits of the next.

    Models that build their mask from `position_ids` keep sequences apart; others, models with a state that runs through
    the row, and releases before transformers 4.53 without flash attention, mix them and train on, with a worse loss.
    """
    vocab_size = model.config.get_text_config().vocab_size
    device = next(model.parameters()).device
    rows = []
    for first in (1, 2):
        ids = torch.tensor([[first % vocab_size] * 4 + [3 % vocab_size, 4 % vocab_size, 5 % vocab_size]])
        row = join_rows([HuggingFaceRow(input_ids=ids, labels=ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2]]))])
        del row["labels"]
        rows.append(row.to(device))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        one, other = (model(**row, use_cache=False).logits[0, 4:].float() for row in rows)
    model.train(was_training)
    allowed = 1e-5 if next(model.parameters()).dtype == torch.float32 else 1e-2
    difference = float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))
    if not difference <= allowed:
        what = f"a sequence changes the logits of the next sequence in its row by {difference:.2g} of the largest logit"
        where = f"{type(model).__name__}, attention {getattr(model.config, '_attn_implementation', 'unknown')}"
        fix = "use transformers 4.53 or later, or attn_implementation='flash_attention_2'; models with state-space "
        raise ConfigError(what, where=where, fix=fix + "layers are not supported")


class PackedTraining:
    """Mixin that makes a Trainer train the global batches of a stream: `class Mine(PackedTraining, SFTTrainer): ...`.

    Each optimizer step is one global batch, with the token-weighted loss over all its rows and ranks. A step has
    `gradient_accumulation_steps` rows; where the schedule gives fewer, rows of zero loss fill it. A checkpoint holds
    the position, and resumes exactly on another number of ranks with the same global batch.

    Attributes:
        packed: the dataset that is trained; its `state_dict` is the position.

    Args:
        stream: this rank's batches: dp_rank is `args.process_index`, dp_size `args.world_size`.
        args, kwargs: those of the Trainer, without `train_dataset` and `data_collator`.

    Raises:
        ConfigError: arguments of the Trainer do not go together with the stream.
    """

    def __init__(self, *args: Any, stream: RankStream, **kwargs: Any) -> None:
        arguments = kwargs.get("args") or next((value for value in args if hasattr(value, "process_index")), None)
        if arguments is None:
            raise ConfigError("the Trainer has no arguments", where=type(self).__name__, fix="pass args=...")
        for name in ("train_dataset", "data_collator"):
            if kwargs.get(name) is not None:
                raise ConfigError(f"{name} was passed with a stream", where=type(self).__name__, fix=f"omit {name}")
        _check_arguments(arguments, stream)
        self.packed = PackedDataset(stream, dialect="huggingface")
        self._packed_steps: Iterator[StepRows] | None = None
        kwargs["data_collator"] = join_rows
        if any(kind.__module__.startswith("trl.") for kind in type(self).__mro__):
            import datasets

            # One row, from which TRL learns that the data is tokenized.
            kwargs["train_dataset"] = datasets.Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})
            arguments.dataset_kwargs = {**(arguments.dataset_kwargs or {}), "skip_prepare_dataset": True}
        super().__init__(*args, **kwargs)
        trainer: Any = self
        trainer.add_callback(PackedPosition())
        if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
            what = f"{type(trainer.model).__name__} does not accept num_items_in_batch, so all rows would be weighted "
            what += "equally"
            fix = "accept **kwargs in its forward and pass them to its loss, or set the Trainer's compute_loss_func"
            raise ConfigError(what, where="the model's forward", fix=fix)

    def get_train_dataloader(self) -> Any:
        """Return a loader that only counts rows; `get_batch_samples` reads them."""
        trainer: Any = self
        rows = trainer.args.gradient_accumulation_steps
        stream = self.packed.stream
        most = max(stream.rows_per_step() or [0])
        if most > rows:
            raise _too_many(most, rows)
        check_boundaries(trainer.model)
        num_steps = stream.num_steps_per_epoch
        # Turns of the Trainer, which may skip any of them, because the rows come from the stream.
        turns: Any = _Endless() if num_steps is None else range(num_steps * rows)
        loader: Any = DataLoader(turns, batch_size=1)
        loader.packed = self.packed
        self._packed_steps = None
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any) -> Any:
        """Return the rows of the next global batch, and the trained tokens of all ranks."""
        if self._packed_steps is None:
            self._packed_steps = self.packed.steps()
        step = next(self._packed_steps)
        if len(step.rows) > num_batches:
            raise _too_many(len(step.rows), num_batches)
        empty = [HuggingFaceRow.of(zero_loss_row()).tensors() for _ in range(num_batches - len(step.rows))]
        trainer: Any = super()
        return trainer.get_batch_samples(iter([*step.rows, *empty]), num_batches, *args)


class PackedPosition(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Keeps the position of the data in the Trainer's own state file, and moves to it when training resumes."""

    def __init__(self) -> None:
        self._data: PackedDataset | None = None

    def state(self) -> dict[str, Any]:
        """Return the position as the Trainer stores it, in `trainer_state.json`."""
        return {"args": {}, "attributes": {} if self._data is None else {"position": self._data.state_dict()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move to the position of the checkpoint, and check that the Trainer counts the same steps."""
        data: PackedDataset = kwargs["train_dataloader"].packed
        self._data = data
        if state.global_step:
            stored = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("position")
            if stored is None:
                what = f"the checkpoint of step {state.global_step} contains no position in packed data"
                fix = "resume from a checkpoint that PackedTraining wrote"
                raise LoaderError(what, where="trainer_state.json", fix=fix)
            data.load_state_dict(stored)
        position = data.stream.state
        per_epoch = data.stream.num_steps_per_epoch
        size = data.stream.config.global_batch_size
        epoch, step = (0, state.global_step) if per_epoch is None else divmod(state.global_step, per_epoch)
        if (position.epoch, position.packs_consumed) != (epoch, step * size):
            what = f"the data is in epoch {position.epoch} after {count_of(position.packs_consumed, 'pack')}, but step "
            what += f"{state.global_step} of the Trainer is in epoch {epoch} after {count_of(step * size, 'pack')}"
            fix = "resume with the global batch size of the checkpoint, or start a new run with a new stream"
            raise LoaderError(what, where=f"LoaderConfig.global_batch_size {size}", fix=fix)


class _Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


def _check_arguments(arguments: Any, stream: RankStream) -> None:
    layout = stream.layout
    if (layout.dp_rank, layout.dp_size) != (arguments.process_index, arguments.world_size):
        what = f"the stream reads rank {layout.dp_rank} of {layout.dp_size}, but the Trainer is rank "
        what += f"{arguments.process_index} of {arguments.world_size}"
        fix = "open it with dp_rank=args.process_index, dp_size=args.world_size"
        raise ConfigError(what, where="RankStream", fix=fix)
    weighs_ranks = arguments.world_size > 1 and not arguments.average_tokens_across_devices
    wrong = {
        "per_device_train_batch_size": (arguments.per_device_train_batch_size != 1, "1: a row is already a batch"),
        "packing": (getattr(arguments, "packing", False), "False: the rows are already packed"),
        "padding_free": (getattr(arguments, "padding_free", False), "False: the rows have no padding"),
        "average_tokens_across_devices": (weighs_ranks, "True: ranks have different numbers of trained tokens"),
        "n_gpu": (arguments.n_gpu > 1, "1: start one process per GPU with torchrun or accelerate launch"),
    }
    for name, (is_wrong, fix) in wrong.items():
        if is_wrong:
            raise ConfigError(f"{name} is {getattr(arguments, name)}", where="arguments of the Trainer", fix=fix)


def _too_many(rows: int, accumulation: int) -> ConfigError:
    what = f"a step has {count_of(rows, 'row')} on this rank, but gradient_accumulation_steps is {accumulation}"
    fix = f"set gradient_accumulation_steps={rows}, or a smaller LoaderConfig.global_batch_size"
    return ConfigError(what, where="arguments of the Trainer", fix=fix)
