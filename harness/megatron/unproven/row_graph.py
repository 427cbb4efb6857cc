"""CUDA graph of one row's forward and backward pass, captured once and replayed for every row of every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.random import get_all_rng_states

from harness.errors import ConfigError
from harness.megatron.batch import RowsAhead, RowTensors, run_row, sum_loss
from harness.thd import ThdBatch

if TYPE_CHECKING:
    from harness.megatron.step import MegatronStep


class RowGraph:
    """Runner for rows of one shape in the same tensors; from the second step on, it launches no single kernels.

    Megatron's own graphs capture either layers whose inputs are all tensors, or all microbatches of a step, whose
    number must then not change. Here one row is captured, with bounds in tensors of a fixed size, so that a step can
    have any number of rows. The rows of the first step run without a graph: a capture cannot compile kernels or create
    communicators and workspaces, which happens when they are first needed.

    All work on a row depends only on shapes, and everything else that it reads stays at the same addresses.
    """

    def __init__(self, step: MegatronStep, to_shape: Callable[[ThdBatch], ThdBatch]) -> None:
        self._step, self._to_shape = step, to_shape
        # Stream for the capture; the gradient functions of the parameters were created on it.
        self._stream: torch.cuda.Stream = step.chunks[0].capture_stream
        self._row: RowTensors | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: torch.Tensor | None = None
        self._is_warm = False

    def run_rows(self, rows: Sequence[ThdBatch]) -> torch.Tensor:
        """Run rows like Megatron's schedule, but each through the graph; return the sums of their reports."""
        step = self._step
        copied = RowsAhead(map(self._to_shape, rows), partial(step.copy_row, is_static=True), step.copies)
        sums = torch.zeros(3, dtype=torch.float64, device=step.device)
        for _ in rows:
            arrays, row = copied.take()
            step.check_tokens(arrays)
            sums += self._run(row)
        self._is_warm = True  # capture the next row, unless one is captured
        step.config.finalize_model_grads_func(step.chunks, sums[1].to(torch.int))
        return sums

    def _run(self, row: RowTensors) -> torch.Tensor:
        """Compute a row; return its report in a tensor that the next row overwrites."""
        if self._row is None:
            self._row = row
        else:
            self._row.fill(row)
        if self._graph is None and self._is_warm:
            self._capture(self._row)
        if self._graph is not None:
            self._graph.replay()
        else:  # on the capture stream, which creates its kernels and workspaces
            self._row.packed_seq_params.forget_angles()
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                self._output = self._compute(self._row)
            here.wait_stream(self._stream)
        assert self._output is not None
        return self._output

    def _compute(self, row: RowTensors) -> torch.Tensor:
        """Add a row's gradients to their buffers, without reducing them over ranks; return its report."""
        step, config = self._step, self._step.config

        def forward(_: Any, model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
            return run_row(model, row), partial(sum_loss, row.loss_mask, row.divisor)

        finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
        try:
            reports: list[torch.Tensor] = step.forward_backward(
                forward_step_func=forward,
                data_iterator=None,
                model=step.chunks[0],
                num_microbatches=1,
                seq_length=row.tokens.shape[1],
                micro_batch_size=1,
                forward_only=False,
            )
        finally:
            config.finalize_model_grads_func = finalize
        return reports[0]

    def _capture(self, row: RowTensors) -> None:
        row.packed_seq_params.forget_angles()
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        try:
            # Other threads keep calling CUDA: those that pin memory, and NCCL's watchdog.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._output = self._compute(row)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            what = f"the pass of a row cannot be captured: {str(error).splitlines()[0]}"
            raise ConfigError(what, where="parallel.cuda_graphs", fix="parallel.cuda_graphs=false") from error
        self._graph = graph
