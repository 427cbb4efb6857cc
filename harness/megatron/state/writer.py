"""Writes checkpoints while training goes on.

Megatron-Core plans a checkpoint together on all ranks, copies what is on GPUs, and writes in a forked process of each
rank; on a CPU the fork itself is the copy. It is written beside its final name and renamed once every rank has written
its part, so a folder `step-...` is whole, and older ones go only then.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from harness.errors import CheckpointError
from harness.megatron import compat
from harness.megatron.job import on_rank_0
from harness.megatron.state.checkpoint import Progress, model_state
from harness.megatron.step import MegatronStep
from harness.train import RUN_FILE, whole_checkpoints


class CheckpointWriter:
    """Writes the checkpoints of one run; every rank has one, and calls its methods at the same places.

    Args:
        folder: of the run's checkpoints.
        keep: how many of the newest stay.
        in_background: `start` returns once the state is copied; else once it is on disk.
        on_whole: called on rank 0 with the progress of each checkpoint that has become whole.
    """

    def __init__(
        self,
        folder: Path,
        step: MegatronStep,
        *,
        keep: int,
        in_background: bool = True,
        on_whole: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._folder = folder
        self._step = step
        self._keep = keep
        self._in_background = in_background
        self._on_whole = on_whole
        compat.keep_checkpoint_results_in_a_file()
        self._calls = AsyncCallsQueue()
        self._writing: Progress | None = None
        self._unfinished = folder

    def start(self, progress: Progress) -> None:
        """Begin to write a checkpoint of the state of now; one that is still being written is waited for.

        Raises:
            CheckpointError: this one or the one before cannot be written.
        """
        self.finish()
        self._unfinished = on_rank_0(lambda: self._make_folder(progress))
        self._writing = progress
        try:
            request = dist_checkpointing.save(
                model_state(self._step, is_loading=False)[0],
                str(self._unfinished),
                validate_access_integrity=False,
                async_sharded_save=True,
                **compat.async_checkpoint_arguments(dist_checkpointing.save),
            )
            self._calls.schedule_async_request(request)
        except CheckpointException as error:
            self._fail_together(error)
        except (OSError, RuntimeError) as error:
            if isinstance(error, OSError) or "PytorchStreamWriter" in str(error):  # torch.save's own kind
                raise self._failed(str(error)) from error
            raise
        if not self._in_background:
            self.finish()

    def poll(self) -> None:
        """Finish the checkpoint that is being written if every rank has written its part."""
        self._finalize(blocking=False)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._finalize(blocking=True)

    def _finalize(self, *, blocking: bool) -> None:
        if self._writing is None:
            return
        try:
            finished = self._calls.maybe_finalize_async_calls(blocking=blocking)
        except CheckpointException as error:
            self._fail_together(error)
        if finished:
            progress, self._writing = self._writing, None
            on_rank_0(lambda: self._put_in_place(progress))

    def _make_folder(self, progress: Progress) -> Path:
        # A name of this process's own: a writer left by a run that was killed may still be at work in its.
        for what in ("unfinished*", "removed"):  # when that run was killed
            for old in self._folder.glob(f"step-*.{what}"):
                shutil.rmtree(old, ignore_errors=True)
        name = f"step-{progress.step:08d}.unfinished-{socket.gethostname()}-{os.getpid()}"
        path = self._folder / name
        path.mkdir(parents=True)
        return path

    def _put_in_place(self, progress: Progress) -> None:
        files = sorted(path for path in self._unfinished.rglob("*") if path.is_file())
        document = {
            "step": progress.step,
            "loader": progress.loader.to_json(),
            "megatron_core": compat.MEGATRON_VERSION,
            "torch": torch.__version__,
            "world_size": torch.distributed.get_world_size(),
            "files": {str(path.relative_to(self._unfinished)): path.stat().st_size for path in files},
        }
        for path in files:
            _sync(path)
        with (self._unfinished / RUN_FILE).open("w") as file:
            json.dump(document, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _sync(self._unfinished)
        final = self._folder / f"step-{progress.step:08d}"
        if final.exists():  # of an earlier attempt at the same step, resumed from before it
            _remove(final)
        self._unfinished.rename(final)
        _sync(self._folder)
        for old in whole_checkpoints(self._folder)[: -self._keep]:
            _remove(old)
        self._on_whole(progress)

    def _fail_together(self, error: CheckpointException) -> NoReturn:
        """Every rank is here, and rank 0 knows why."""

        def raise_it() -> NoReturn:
            failures = sorted((rank, cause) for rank, (cause, _) in error.failures.items())
            raise self._failed("; ".join(f"rank {rank}: {cause}" for rank, cause in failures))

        on_rank_0(raise_it)
        raise AssertionError("rank 0 raised an error, and it was not shared") from error

    def _failed(self, why: str) -> CheckpointError:
        assert self._writing is not None
        return CheckpointError(
            f"the checkpoint of step {self._writing.step} cannot be written: {why}",
            where=str(self._unfinished),
            fix="make room or name another disk with runs= or run_dir=; the checkpoints before it are whole",
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse it for folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(checkpoint: Path) -> None:
    # Renamed first: killed half-way, what is left must not pass for whole.
    removed = checkpoint.rename(checkpoint.with_suffix(".removed"))
    shutil.rmtree(removed)
