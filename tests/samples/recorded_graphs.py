"""CUDA graphs on a CPU: what is captured is recorded, and a replay runs it again on the very same tensors.

As on a GPU, a capture computes nothing, and reading a value on the host while it lasts is an error. A replay calls no
line of the program: numbers, shapes and tensors are those of the capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.distributed import Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from harness.megatron.model import gpt

READS = {"item", "tolist", "cpu", "numpy", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__"}
_READS_BELOW = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"}


class RecordedGraph:
    """Stands for `torch.cuda.CUDAGraph`.

    Attributes:
        operations: recorded, in order: an operation, its arguments and its result.
        replays: so far.
        stream: of the capture.
        generators: registered.
    """

    made: ClassVar[list[RecordedGraph]] = []

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.replays, self.is_replaying = 0, False
        self.stream: Any = None
        self.generators: list[Any] = []
        RecordedGraph.made.append(self)

    def register_generator_state(self, state: object) -> None:
        self.generators.append(state)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        self.is_replaying = True
        for operation, arguments, options, results in self.operations:
            made = operation(*arguments, **options)
            if hasattr(leaves := tree_leaves(made)[-1], "wait"):
                leaves.wait()  # an exchange between ranks
            given = _storages((arguments, options))
            for kept, new in zip(_tensors(results), _tensors(made), strict=True):
                if kept.untyped_storage()._cdata not in given:  # neither a view nor written in place
                    kept.copy_(new)
        self.is_replaying = False


class _NoReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph
        self._made: dict[int, Any] = {}  # kept: the place of one that is gone would be another's
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _READS_BELOW:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(named.get(argument.name))
        results = func(*args, **kwargs)
        given = _storages((args, kwargs))
        for tensor in _tensors(results):
            if (place := tensor.untyped_storage()._cdata) not in given:
                self._made[place] = tensor
        # A kernel has the memory of its tensors, whatever memory these get later (`tensor.data = other`).
        self._graph.operations.append(tree_map(_same_memory, (func, args, kwargs, results)))
        return results

    def _keep(self, value: Any) -> None:
        for tensor in _tensors(value):
            place = tensor.untyped_storage()._cdata
            if place not in self._made and place not in self._before:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._before[place] = whole, whole.clone()

    def undo(self) -> None:
        """Write back what tensors had that the capture did not make."""
        for tensor, before in self._before.values():
            tensor.copy_(before)


_wait_of_gloo = Work.wait


def _wait(work: Work, *arguments: Any) -> Any:
    # Gloo copies results in it, from a buffer that the next exchange does not have.
    with _disable_current_modes():
        return _wait_of_gloo(work, *arguments)


@contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


@contextmanager
def _capture(graph: RecordedGraph, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
    assert capture_error_mode == "thread_local"
    graph.stream = stream
    # Megatron compares states of the host's generator, tensors of the host on a GPU too.
    no_compare = mock.patch.object(CudaRNGStatesTracker, "fork", new=_nothing)
    with no_compare, mock.patch.object(Work, "wait", new=_wait), _NoReads():
        recorder = _Recorder(graph)
        with recorder:
            yield
    recorder.undo()


@contextmanager
def recorded_graphs() -> Iterator[list[RecordedGraph]]:
    """Let the program capture graphs on this CPU; yields those that it made."""
    RecordedGraph.made = []
    with (
        mock.patch.object(torch.cuda, "CUDAGraph", RecordedGraph),
        mock.patch.object(torch.cuda, "graph", _capture),
        mock.patch.object(gpt.compat, "has_streams", return_value=True),
    ):
        yield RecordedGraph.made


class Launches(TorchDispatchMode):
    """Counts the operations that the program calls itself, outside replays."""

    def __init__(self, graphs: list[RecordedGraph]) -> None:
        super().__init__()
        self._graphs, self.counts = graphs, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(graph.is_replaying for graph in self._graphs):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _same_memory(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _storages(values: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(values)}
