"""A CUDA graph of one row: its forward and backward pass, captured once and replayed for every row of every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel.random import get_all_rng_states

from harness.errors import ConfigError
from harness.megatron.batch import RowTensors


class RowGraph:
    """Computes rows of one shape in the same tensors, from the second step on without launching a kernel.

    Megatron's own graphs capture layers that are given tensors alone, or all microbatches of a step, whose number has
    to stay. One row is captured here, whose bounds are tensors of one width, so that a step has any number of rows.

    The rows of the first step are computed as they are: kernels are compiled, and communicators and workspaces made,
    when they are first needed, which a capture cannot do.

    Args:
        compute: adds the gradients of a row to their buffers, and returns a tensor; all that it does with a row must
            follow from shapes, and everything that it reads beside the row stay where it is.
        stream: of the capture, on which the parameters' gradient functions were made.
    """

    def __init__(self, compute: Callable[[RowTensors], torch.Tensor], stream: torch.cuda.Stream) -> None:
        self._compute, self._stream = compute, stream
        self._row: RowTensors | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: torch.Tensor | None = None
        self._is_warm = False

    def run(self, row: RowTensors) -> torch.Tensor:
        """Compute a row; the tensor returned is overwritten by the next."""
        if self._row is None:
            self._row = row
        else:
            self._row.fill(row)
        if self._graph is None and self._is_warm:
            self._capture(self._row)
        if self._graph is None:
            self._output = self._compute_aside(self._row)
        else:
            self._graph.replay()
        assert self._output is not None
        return self._output

    def end_step(self) -> None:
        """Capture the next row, if none is captured."""
        self._is_warm = True

    def _compute_aside(self, row: RowTensors) -> torch.Tensor:
        """Compute on the stream of the capture, whose kernels and workspaces are then made."""
        row.packed_seq_params.forget_angles()
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            output = self._compute(row)
        here.wait_stream(self._stream)
        return output

    def _capture(self, row: RowTensors) -> None:
        row.packed_seq_params.forget_angles()
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        try:
            # Other threads go on to call CUDA: those that pin memory, and NCCL's watchdog.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._output = self._compute(row)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"the pass of a row cannot be captured: {str(error).splitlines()[0]}",
                where="parallel.cuda_graphs",
                fix="parallel.cuda_graphs=false",
            ) from error
        self._graph = graph
