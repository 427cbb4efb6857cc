"""Stored data in Megatron-LM's `pretrain`: a provider of datasets for `--dataloader-type external`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from harness.errors import CheckpointError, ConfigError, ScheduleError
from harness.formats import PackReader, open_dataset
from harness.integrations import FixedRows, MegatronRow, RankStream, require
from harness.integrations.stream import saved_position
from harness.loader import LoaderConfig, RankLayout
from harness.megatron.data.feed import readable
from harness.megatron.job.runtime import place_in_groups
from harness.printing import count_of
from harness.schedule import ScheduleConfig
from harness.thd import padding_multiple

Provider = Callable[..., tuple["ExternalLoader | None", "ExternalLoader | None", "ExternalLoader | None"]]


class ExternalLoader(FixedRows):
    """Yields the rows of this rank, one a microbatch, without end; Megatron saves its state in checkpoints.

    Each batch has `num_microbatches` rows, padded to `pad_rows_to` tokens unless that is None; see `FixedRows`.
    """

    def __init__(self, stream: RankStream, *, num_microbatches: int, pad_rows_to: int | None = None) -> None:
        super().__init__(stream, rows_per_step=num_microbatches, pad_rows_to=pad_rows_to)
        self.stream = stream

    def __next__(self) -> MegatronRow:  # type: ignore[override]
        """Return the next row as tensors (see MegatronRow)."""
        return MegatronRow.of(super().__next__()).tensors()

    def save_state(self) -> dict[str, int | str]:
        """Return the position after the last global batch all rows of which were read: the same on every rank."""
        return self.position()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue after a position that `save_state` returned, on any number of ranks; see `RankStream`."""
        self.load_state_dict(state)


def datasets_provider(
    data: PackReader | str | None = None,
    *,
    validation: PackReader | str | None = None,
    test: PackReader | str | None = None,
    loader: LoaderConfig | None = None,
) -> Provider:
    """Return a provider of datasets for Megatron's `pretrain`.

    A pack is a sample of Megatron's, and a row is a pack: Megatron fixes the number of microbatches before it reads
    data, so the schedule is `as_packed`. Every rank reads only its own packs.

    Args:
        data, validation, test: a dataset or its path; None for `--data-path` or `--train-data-path`,
            `--valid-data-path` and `--test-data-path`.
        loader: how packs are read. Its global batch size is Megatron's; None also takes `--seed` and `--num-workers`.

    Raises:
        ConfigError: this version of Megatron-Core has no `megatron.training`. The provider raises HarnessErrors:
            arguments that do not fit packed rows, named with the flag to set, and those of a dataset or its position.
    """
    require("megatron_lm")

    def provider(
        train_val_test_num_samples: Any, vp_stage: int | None = None
    ) -> tuple[ExternalLoader | None, ExternalLoader | None, ExternalLoader | None]:
        from megatron.training import get_args

        args = get_args()
        _check(args)
        sizes = {"cp_size": args.context_parallel_size, "tp_size": args.tensor_model_parallel_size}
        layout = place_in_groups(pad_to_multiple=padding_multiple(**sizes, sequence_parallel=args.sequence_parallel))
        config = loader or LoaderConfig(seed=args.seed, num_workers=args.num_workers)
        path = _only(args.train_data_path or args.data_path, "--data-path") if data is None else data
        training = _open(path, replace(config, global_batch_size=args.global_batch_size), layout, args)
        if (state := _saved_position(args, training)) is not None:
            training.restore_state(state)
        # Megatron keeps the position by itself only for iterators that are no list.
        if args.save and not getattr(args, "dataloader_save", None) and vp_stage is None:
            args.dataloader_save = args.save
        if not args.eval_iters:
            return training, None, None
        size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
        once = replace(config, global_batch_size=size, shuffle=False, drop_last=False)
        path = _only(args.valid_data_path, "--valid-data-path") if validation is None else validation
        validating = _open(path, once, layout, args)
        validating.restore_state(_position_after(validating, args.consumed_valid_samples))
        if test is None and not args.test_data_path:
            return training, validating, None
        path = _only(args.test_data_path, "--test-data-path") if test is None else test
        return training, validating, _open(path, once, layout, args)

    return provider


def train_valid_test_datasets_provider(train_val_test_num_samples: Any, vp_stage: int | None = None) -> Any:
    """Return the loaders of the datasets that Megatron's arguments name; see `datasets_provider`."""
    return datasets_provider()(train_val_test_num_samples, vp_stage)


def _check(args: Any) -> None:
    loader = args.dataloader_type
    wrong = [
        (loader != "external", f"--dataloader-type is {loader}", "--dataloader-type external"),
        (args.micro_batch_size != 1, f"--micro-batch-size is {args.micro_batch_size}", "--micro-batch-size 1"),
        (not args.calculate_per_token_loss, "Megatron averages the mean losses of packs", "--calculate-per-token-loss"),
        (bool(args.rampup_batch_size), "the global batch size changes during training", "no --rampup-batch-size"),
        (bool(args.mtp_num_layers), "multi-token prediction reads the next sequence's tokens", "no --mtp-num-layers"),
        (bool(args.full_validation), "--full-validation needs a dataset with an end", "--eval-iters N instead"),
        (bool(args.eval_iters) and args.multiple_validation_sets, "several validation sets", "one --valid-data-path"),
    ]
    for is_wrong, what, flag in wrong:
        if is_wrong:
            raise ConfigError(what, where="the arguments of Megatron-LM", fix=f"start with {flag}")


def _open(data: PackReader | str, config: LoaderConfig, layout: RankLayout, args: Any) -> ExternalLoader:
    reader = open_dataset(data) if isinstance(data, str) else data
    if args.padded_vocab_size and reader.manifest is not None:
        stored = reader.manifest.provenance.counts.get("vocab_size", 0)
        if stored > args.padded_vocab_size:
            what = f"the dataset's tokenizer has {stored:,} tokens, but the model has {args.padded_vocab_size:,}"
            fix = "start with the tokenizer of the dataset, or a sufficient --vocab-size"
            raise ConfigError(what, where=str(reader.path), fix=fix)
    if args.seq_length % layout.cp_size:
        what = f"--seq-length {args.seq_length} is not a multiple of --context-parallel-size {layout.cp_size}"
        raise ConfigError(what, where="the arguments of Megatron-LM", fix="choose a multiple")
    try:
        # Stages that read nothing need only bounds.
        source = cast(PackReader, readable(reader, layout))
        schedule = ScheduleConfig("as_packed", args.seq_length // layout.cp_size)
        stream = RankStream(source, config, schedule=schedule, layout=layout)
    except ScheduleError as error:
        fix = "raise --seq-length, or prepare smaller packs"
        raise ScheduleError(error.what, where=f"--seq-length {args.seq_length}", fix=fix) from None
    num_microbatches = config.global_batch_size // layout.dp_size
    # Stages of a pipeline exchange tensors of one size.
    is_fixed = args.pipeline_model_parallel_size > 1 and not getattr(args, "variable_seq_lengths", False)
    return ExternalLoader(stream, num_microbatches=num_microbatches, pad_rows_to=args.seq_length if is_fixed else None)


def _only(paths: list[str] | None, flag: str) -> str:
    if not paths or len(paths) > 1:
        what = f"{flag} specifies {count_of(len(paths or []), 'dataset')}"
        fix = f"specify one dataset with {flag}, or pass an open one to datasets_provider"
        raise ConfigError(what, where="the arguments of Megatron-LM", fix=fix)
    return str(paths[0])


def _saved_position(args: Any, training: ExternalLoader) -> dict[str, Any] | None:
    """Return the position to continue from: that of the checkpoint that was loaded; None for the start of a run."""
    if not args.iteration:
        return None
    if args.virtual_pipeline_model_parallel_size is not None:
        return _position_after(training, args.consumed_train_samples)
    folders = [folder for folder in (getattr(args, "dataloader_save", None), args.load) if folder]
    fix = "start with --finetune to read the data from the beginning, or resume with the loader that saved it"
    return saved_position(folders, args.iteration, where="--dataloader-save, --load", fix=fix)


def _position_after(loader: ExternalLoader, samples: int) -> dict[str, Any]:
    """Return the position after this many of Megatron's samples, in whole global batches of the current size."""
    size, steps_per_epoch = loader.stream.config.global_batch_size, loader.stream.num_steps_per_epoch
    assert steps_per_epoch is not None
    if samples % size:
        what = f"{samples:,} samples were consumed, which is not a multiple of the global batch size {size:,}"
        raise CheckpointError(what, where="the checkpoint", fix="resume with the global batch size of the checkpoint")
    epoch, step = divmod(samples // size, steps_per_epoch)
    return {**loader.stream.state_dict(), "epoch": epoch, "packs_consumed": step * size}
