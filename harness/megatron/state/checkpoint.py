"""Checkpoints in Megatron-Core's `dist_checkpointing` format, written in the background; any layout can load them.

A checkpoint contains the model, the optimizer and the learning-rate schedule, and in `run.json` the step, the state of
the loader and the settings of the run. It contains no random state: nothing uses a generator after the weights are
initialized (dropout is not supported).
`checksums.json` contains the hash of every file, computed while writing and verified before anything is loaded.

All ranks plan a checkpoint together in Megatron-Core, which copies tensors on GPUs to pinned memory and writes in a
forked process of each rank. Each rank copies and writes only its own share: its part of the distributed optimizer's
state, and an equal part of the weights that the ranks of a data-parallel group share. A checkpoint is written
under a temporary name and renamed once every rank has written its part. A folder `step-...` is therefore whole, and
older checkpoints are removed only after that.
"""

from __future__ import annotations

import re
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil  # noqa: F401 - Megatron's writer needs it, and misses it at the first checkpoint only
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from harness.errors import CheckpointError, LoaderError
from harness.megatron import compat
from harness.megatron.job.runtime import gather_on_rank_0, on_rank_0, place_among_ranks
from harness.megatron.job.watchdog import is_about_ranks
from harness.megatron.state import loading
from harness.megatron.state import optimizer as optimizer_state
from harness.megatron.step import MegatronStep
from harness.printing import print_text
from harness.storage import StoredFile, make_folder
from harness.storage.checksums import CHECKSUMS_FILE, list_hash_problems, share_of
from harness.storage.files import sync_path, sync_tree
from harness.train import Progress, checkpoints

# Messages of torch's C++ code for a failed write, which hide the system's reason.
_TORCHS = re.compile(
    r"basic_ios::clear: (iostream error)|\[enforce fail at inline_container\.cc:\d+\] \. (unexpected pos \d+ vs \d+)"
)


def _models(step: MegatronStep) -> dict[str, Any]:
    names = ["model"] if len(step.chunks) == 1 else [f"model{index}" for index in range(len(step.chunks))]
    return {name: chunk.module for name, chunk in zip(names, step.chunks, strict=True)}


def _run_state(step: MegatronStep, *, is_loading: bool) -> tuple[dict[str, Any], list[list[torch.Tensor]]]:
    """Return the tree that `dist_checkpointing` saves or loads, and the local tensors of each optimizer in it."""
    weights = {name: loading.sharded_weights(model) for name, model in _models(step).items()}
    parts, named = optimizer_state.parts_of(step.optimizer), weights["model"] if len(weights) == 1 else weights
    of = {"is_float32": step.config.params_dtype == torch.float32, "is_loading": is_loading}
    tensors = [optimizer_state.sharded_tensors(part, named, **of) for part in parts]
    state = {
        **weights,
        "optimizer": {str(number): sharded for number, (sharded, _) in enumerate(tensors)},
        "optimizer_steps": max(map(optimizer_state.steps_taken, parts)),
        "scheduler": step.scheduler.state_dict(),
    }
    return state, [values for _, values in tensors]


def count_sharded_tensors(step: MegatronStep) -> int:
    """Return the number of tensors, or parts of tensors, that this rank contributes to a checkpoint."""
    state, _ = _run_state(step, is_loading=False)
    return sum(isinstance(value, ShardedBase) for value in nested_values(state))


def stored_moments(path: Path) -> str | None:
    """Return the dtype of the optimizer's moments in a checkpoint, such as `float32`, or None without moments."""
    with (path / loading.METADATA_FILE).open("rb") as file:
        stored = loading.read_metadata(file, path).state_dict_metadata
    for name, tensor in stored.items():
        if name.startswith("optimizer.state.exp_avg.") and isinstance(tensor, TensorStorageMetadata):
            return str(tensor.properties.dtype).removeprefix("torch.")
    return None


def find_newest(folder: Path, *, unchecked: bool = False) -> tuple[Path | None, list[CheckpointError]]:
    """Return the newest undamaged checkpoint in `folder`, or None; print and return the errors of newer ones.

    In a job every rank takes part, reads a share of the files, and gets the same result.

    Raises:
        CheckpointError: `folder` contains checkpoints, and all are damaged.
        ConfigError: a newer version of the harness wrote the newest one.
        LoaderError: none of them can be read, which may succeed at the next attempt.
    """
    passed_over: list[CheckpointError] = []

    def report() -> None:
        for one in passed_over:
            print_text(f"skipped: {one.what}\n  where: {one.where}", file=sys.stderr)

    for path in on_rank_0(lambda: checkpoints.list_checkpoints(folder))[::-1]:
        error = find_damage(path, unchecked=unchecked)
        if error is None:
            on_rank_0(report)
            return path, passed_over
        passed_over.append(error)
    if passed_over:
        error, is_unreadable = passed_over[0], all(isinstance(one, checkpoints.UnreadableError) for one in passed_over)
        refused = LoaderError(error.what, where=error.where, fix=error.fix) if is_unreadable else error
        refused.is_shared = True
        raise refused
    return None, []


def find_damage(path: Path, *, unchecked: bool = False) -> CheckpointError | None:
    """Return an error for the first damage found in a checkpoint, None if it is whole; every rank takes part.

    A file that a rank cannot read counts as damage; the file system of that rank's node needs a fix. So do missing
    checksums, unless `unchecked`: loading then compares the tensors against the checksums of `torch.save`.
    """
    try:
        files = on_rank_0(lambda: checkpoints.read_checkpoint(path, unchecked=unchecked)[1])
    except CheckpointError as error:
        return error
    if not files:
        what = f"unchecked: damage to .metadata and run.json is not detected without {CHECKSUMS_FILE}\n  where: {path}"
        on_rank_0(lambda: print_text(what, file=sys.stderr))
    rank, size = place_among_ranks()
    found: list[CheckpointError] = []
    try:
        for problem in list_hash_problems(path, share_of(files, rank, size)):
            what = f"the checkpoint's {problem.what.removeprefix('the ')}"
            found.append(CheckpointError(what, where=str(path), fix=checkpoints.CHECKPOINT_FIX))
    except OSError as error:
        found.append(checkpoints.unreadable(path, error))
    everywhere = gather_on_rank_0(found)
    return on_rank_0(lambda: next((error for errors in everywhere for error in errors), None))


def load_checkpoint(path: Path, step: MegatronStep) -> None:
    """Load model, optimizer and learning-rate schedule; every rank takes part. Raise the errors of `load_tree`."""
    wanted, tensors = _run_state(step, is_loading=True)
    fix = "resume with the model settings of the run that wrote it (its config.yaml)"
    state = loading.load_tree(wanted, path, fix=fix)
    for name, model in _models(step).items():
        loading.put_weights(model, state[name])
    parts = optimizer_state.parts_of(step.optimizer)
    for number, (part, asked) in enumerate(zip(parts, tensors, strict=True)):
        optimizer_state.put_back(part, asked, state["optimizer"][str(number)], state["optimizer_steps"])
    step.scheduler.load_state_dict(state["scheduler"])


class CheckpointWriter:
    """Writer of a run's checkpoints; every rank creates one and calls its methods at the same points.

    Args:
        in_background: `start` returns once the state is copied, not once it is on disk.
        before_whole: called on rank 0 before a checkpoint is renamed; makes the records of its steps durable.
        on_whole: called on rank 0 with the progress of each complete checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        step: MegatronStep,
        *,
        keep: int,
        in_background: bool = True,
        before_whole: Callable[[], None] = lambda: None,
        on_whole: Callable[[Progress], None] = lambda progress: None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._step = folder, step
        self._keep, self._in_background = keep, in_background
        self._before_whole, self._on_whole = before_whole, on_whole
        self._facts = facts or {}
        compat.keep_checkpoint_results_in_a_file()
        self._hashes = compat.WrittenHashes()
        self._calls = AsyncCallsQueue()
        # Every rank of a data-parallel group writes a share of the replicated state. The shares stay the same.
        self._strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            do_cache_distribution=True,
        )
        self._writing: Progress | None = None
        self._unfinished = folder

    def start(self, progress: Progress) -> None:
        """Start writing a checkpoint of the current state, after waiting for one that is still being written."""
        self.finish()
        self._writing = progress
        self._unfinished = on_rank_0(lambda: self._make_folder(progress))
        self._step.gather_weights()
        self._hashes.take()  # discard the hashes of a failed one
        options = compat.async_checkpoint_arguments(dist_checkpointing.save)
        try:
            with compat.rank_0_goes_on() as errors:
                state, place = _run_state(self._step, is_loading=False)[0], str(self._unfinished)
                request = dist_checkpointing.save(state, place, self._strategy, **options)
            on_rank_0(lambda: self._raise_first(errors))
            self._calls.schedule_async_request(self._hashes.of_files_written_by(request))
        except CheckpointException as error:
            self._fail_together(error)
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and is_about_ranks(error):
                raise
            # Torch's C++ code raises a RuntimeError without the system's reason.
            raise self._failed(error) from error
        if not self._in_background:
            self.finish()

    def finish(self, *, wait: bool = True) -> None:
        """Complete the checkpoint being written; with `wait=False`, only if every rank has written its part."""
        if (progress := self._writing) is None:
            return
        try:
            with compat.rank_0_goes_on() as errors:
                finished = self._calls.maybe_finalize_async_calls(blocking=wait)
        except CheckpointException as error:
            self._fail_together(error)
        if finished:
            on_rank_0(lambda: self._raise_first(errors))
            hashed = [file for files in gather_on_rank_0(self._hashes.take()) for file in files]
            on_rank_0(lambda: self._put_in_place(progress, hashed))
            self._writing = None

    def _make_folder(self, progress: Progress) -> Path:
        # Use a unique name: the writer of a killed run may still be writing to its own folder.
        for leftover in ("unfinished*", "removed"):  # left by a killed run
            for old in self._folder.glob(f"step-*.{leftover}"):
                shutil.rmtree(old, ignore_errors=True)
        path = self._folder / f"step-{progress.step:08d}.unfinished-{secrets.token_hex(8)}"
        try:
            make_folder(path)
        except OSError as error:
            raise self._failed(error) from error
        return path

    def _put_in_place(self, progress: Progress, hashed: list[StoredFile]) -> None:
        try:
            sync_tree(self._unfinished)
            self._before_whole()
            facts = {
                "megatron_core": compat.MEGATRON_VERSION,
                "torch": torch.__version__,
                "world_size": torch.distributed.get_world_size(),
                **self._facts,
            }
            # Libraries write some files without our `open`: `common.pt` (by torch's C++ code) and `.metadata`.
            files = (str(path.relative_to(self._unfinished)) for path in self._unfinished.rglob("*") if path.is_file())
            others = sorted(set(files).difference(file.path for file in hashed))
            checkpoints.write_run_file(self._unfinished, progress, facts, hashed, others)
            checkpoints.read_checkpoint(self._unfinished)
            sync_path(self._unfinished)
            final = self._folder / f"step-{progress.step:08d}"
            if final.exists():  # from an earlier attempt; this one resumed from an earlier step
                _remove(final)
            self._unfinished.rename(final)
            sync_path(self._folder)
            # Newer ones must be damaged, or this step would not have been trained again: do not count them as kept.
            for old in [path for path in checkpoints.whole_checkpoints(self._folder) if path <= final][: -self._keep]:
                _remove(old)
        except OSError as error:
            raise self._failed(error) from error
        self._on_whole(progress)

    def _fail_together(self, error: CheckpointException) -> NoReturn:
        """Raise the causes known to rank 0 on every rank."""

        def raise_it() -> NoReturn:
            failures = sorted((rank, cause) for rank, (cause, _) in error.failures.items())
            raise self._failed("; ".join(f"rank {rank}: {_reason(cause)}" for rank, cause in failures))

        on_rank_0(raise_it)
        raise AssertionError("the error of rank 0 was not shared") from error

    def _raise_first(self, errors: Sequence[Exception]) -> None:
        if errors:
            raise self._failed(errors[0]) from errors[0]

    def _failed(self, why: object) -> CheckpointError:
        assert self._writing is not None
        reason = _reason(why)
        # Megatron's message for a process that left no result.
        reason = reason.replace("results_queue should not be empty", "the process that writes it was killed")
        fix = "free disk space or select another disk with runs= or run_dir=; earlier checkpoints are not affected"
        if "process that writes it" in reason:
            fix = "check the system's log for the cause (usually out of memory), then continue with resume=true"
        what = f"the checkpoint of step {self._writing.step} cannot be written: {reason}"
        return CheckpointError(what, where=str(self._unfinished), fix=fix)


def _reason(why: object) -> str:
    """Return one line: the system's reason and the file, or the first line of a library's error."""
    if isinstance(why, OSError) and why.strerror:
        return f"{why.strerror}, {why.filename}" if why.filename else why.strerror
    line = (str(why).splitlines() or [type(why).__name__])[0]
    return _TORCHS.sub(lambda found: f"the disk is full or failing ({found[1] or found[2]})", line)


def _remove(checkpoint: Path) -> None:
    # Rename first, so that a partial removal does not look like a whole checkpoint.
    shutil.rmtree(checkpoint.rename(checkpoint.with_suffix(".removed")))
