"""All differences between the supported versions of Megatron-Core (0.16 to 0.19), and between a CPU and a GPU.

Megatron-Core uses `device="cuda"` and `torch.cuda.current_device()` in many places. On a CPU the same code runs under a
function mode that maps these to the CPU, so that a CPU trains with the same code paths as a GPU.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import io
import json
import os
import pickle
import queue
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import process
from pathlib import Path
from typing import Any
from unittest import mock

import megatron.core
import torch
import xxhash
from megatron.core import optimizer, utils
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common, filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_format
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.overrides import TorchFunctionMode

from harness.errors import ConfigError
from harness.storage import StoredFile

MEGATRON_VERSION: str = megatron.core.__version__
_ENGINE = "transformer_engine.pytorch"
_HAS_PADDING_FIELD = "pad_between_seqs" in PackedSeqParams.__dataclass_fields__
# False for newer versions, which store the common values of a checkpoint with its other objects.
COMMON_VALUES_HAVE_A_FILE = not hasattr(serialization, "_legacy_common_state_exists")


@dataclasses.dataclass
class PackedRow(PackedSeqParams):  # type: ignore[misc]
    """PackedSeqParams of a row with known positions, so that its rotary angles are gathered once per microbatch.

    Attributes:
        positions: int64 [T / cp], positions of this rank's tokens in their sequences.
        grid: int64 [3, T / cp], positions in time, height and width; None if all three equal `positions`.
        lengths: padded length of each nonempty sequence, for layers that split a row on the host.
        padding_mask: bool [1, T / cp], True at padding.
        is_static: rows differ only in the values of tensors; no computation reads a value on the host.
        ahead: inputs of the layers that predict further tokens, one entry per number of tokens ahead, starting at 1.
        media: `harness.megatron.model.media.MediaTensors` of this rank's tokens, or None.
    """

    positions: torch.Tensor | None = None
    grid: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()
    padding_mask: torch.Tensor | None = None
    ahead: tuple[Any, ...] = ()
    is_static: bool = False
    media: Any = None
    _angles: list[tuple[Any, ...]] = dataclasses.field(default_factory=list, repr=False)
    _scanned: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None

    def forget_angles(self) -> None:
        """Discard the cached angles and scan order: the positions now belong to another row."""
        self._angles.clear()
        self._scanned = None

    def angles(
        self, freqs: torch.Tensor, dtype: torch.dtype, *, mscale: float, axes: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine [T / cp, 1, 1, d] of `freqs` [max_seqlen, 1, 1, d] at the positions, times `mscale`.

        Layers that share `freqs` share the result. `axes`, int64 [d], gives the row of `grid` for each head dimension.
        """
        for known, of_dtype, of_scale, cos, sin in self._angles:
            if known is freqs and of_dtype == dtype and of_scale == mscale:
                return cos, sin
        assert self.positions is not None
        if axes is None or self.grid is None:
            chosen = freqs.index_select(0, self.positions)
        else:
            chosen = freqs[:, 0, 0].gather(0, self.grid[axes].T)[:, None, None]
        cos, sin = (torch.cos(chosen) * mscale).to(dtype), (torch.sin(chosen) * mscale).to(dtype)
        self._angles.append((freqs, dtype, mscale, cos, sin))
        return cos, sin

    def scan_order(self, cp_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the sequences and token order for a scan of the whole row, without a host synchronization.

        Returns:
            sequence bounds, int64 [S + 1], padding included (padding at the end of a row is one more sequence); the
            sequence of each token, int32 [1, T]; and, if ranks share the row, the index of each token in their
            concatenated slices, int64 [T] (`harness.thd.context_parallel_indices`). All layers share the result.
        """
        if self._scanned is None:
            assert self.positions is not None
            held = len(self.positions)
            bounds = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
            owners = torch.repeat_interleave(bounds.diff(), output_size=held * cp_size)
            order = None
            if cp_size > 1:
                chunk = bounds.diff()[owners] // (2 * cp_size)
                places = torch.arange(held * cp_size, device=bounds.device) - bounds[owners]
                number = places // chunk
                # Rank r holds chunks r and 2 * cp_size - 1 - r of a sequence.
                rank = torch.minimum(number, 2 * cp_size - 1 - number)
                second = torch.where(number < cp_size, 0, chunk)
                order = rank * held + bounds[owners] // cp_size + second + places % chunk
            self._scanned = bounds.long(), owners.to(torch.int32).unsqueeze(0), order
        return self._scanned


def packed_seq_params(
    *,
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor | None,
    max_seqlen: int,
    positions: torch.Tensor | None = None,
    is_padded: bool | None = None,
    cp_group: Any = None,
    **of_row: Any,
) -> PackedSeqParams:
    """Return the PackedSeqParams of one row whose queries and keys are the same tokens.

    `total_tokens` of newer versions is not set: with it, they look up the sequence of every token, which only layers
    with a state scan need.

    Args:
        cu_seqlens: int32 [S + 1], cumulative lengths without padding.
        cu_seqlens_padded: int32 [S + 1], cumulative lengths with padding; None if nothing is padded.
        max_seqlen: length of the longest padded sequence.
        positions: int64 [T / cp], positions of this rank's tokens in their sequences; if given, returns a `PackedRow`.
        cp_group: process group of the row's context-parallel ranks, if it varies by row.
        is_padded: False if the padded bounds equal the real ones; None if they are given only when they differ.
    """
    values: dict[str, Any] = {"qkv_format": "thd"}
    for of in ("q", "kv"):
        values |= {f"cu_seqlens_{of}": cu_seqlens, f"cu_seqlens_{of}_padded": cu_seqlens_padded}
        values[f"max_seqlen_{of}"] = max_seqlen
    if _HAS_PADDING_FIELD:
        # Without it, some versions of Transformer Engine compare the bounds on the device in every layer, and wait.
        values["pad_between_seqs"] = cu_seqlens_padded is not None if is_padded is None else is_padded
    if cp_group is not None:
        values["local_cp_size"] = cp_group.size()
        # Transformer Engine's layers keep the ring of the previous row unless given another, or size 1 without a group.
        values["cp_group"] = cp_group if cp_group.size() > 1 else None
    if positions is None:
        return PackedSeqParams(**values)
    return PackedRow(**values, positions=positions, **of_row)


def make_ring_stream() -> None:
    """Give Transformer Engine's attention a stream for the exchanges between ranks that share a row.

    Megatron creates it only for layouts in which every row is shared.
    """
    if _can_import(_ENGINE):
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        TEDotProductAttention.cp_stream = TEDotProductAttention.cp_stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]


def missing_kernels(*, delta_rule: bool) -> str | None:
    """Return the package with the kernels of Mamba-2 or the gated delta rule if it cannot be imported, or None."""
    if delta_rule:
        return None if _can_import("fla.ops.gated_delta_rule") else "flash-linear-attention"
    return None if _can_import("mamba_ssm.ops.triton.ssd_combined") else "mamba-ssm"


class WholeLinear(torch.nn.Module):
    """A linear layer without bias, replicated on every tensor-parallel rank, which applies it to its own tokens.

    Megatron builds some layers only with Transformer Engine's linear layer, which accepts the arguments in `rest`.
    """

    def __init__(self, inputs: int, outputs: int, *, config: Any, init_method: Any = None, **rest: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        (init_method or config.init_method)(self.weight)
        # Read by finalize_model_grads, which sums the gradient over the TP group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return [s, b, outputs] for [s, b, inputs], and no bias, as Megatron's layers do."""
        return torch.nn.functional.linear(inputs, self.weight), None


def _can_import(name: str) -> bool:
    """Return True if a module can be imported; a damaged package, or a folder with its name, counts as missing."""
    try:
        import_module(name)
    except (ImportError, OSError):
        return False
    return True


def import_scans(reference: Any) -> Any:
    """Return Megatron's modules for Mamba-2 and the gated delta rule, even if packages that they need are missing.

    They refuse to build a layer without the kernels, Triton and einops. Only a norm of these packages is used here;
    `GroupedRMSNorm` of `reference` replaces it if the kernels are missing.
    """
    stand_in = mock.MagicMock()
    stand_in.RMSNorm = reference.GroupedRMSNorm
    names = [name for name in _OF_KERNELS if not _can_import(name)]
    sys.modules.update(dict.fromkeys(names, stand_in))
    try:
        from megatron.core.ssm import gated_delta_net, mamba_mixer
    finally:
        for name in names:
            del sys.modules[name]
    return mamba_mixer, gated_delta_net


_OF_KERNELS = (
    *(f"mamba_ssm.ops.triton.{end}" for end in ("layernorm_gated", "ssd_combined", "selective_state_update")),
    *(f"fla.{end}" for end in ("modules.convolution", "modules.l2norm", "ops.gated_delta_rule")),
    *("triton", "triton.language", "einops"),
)


def why_no_packed_scan(*, delta_rule: bool) -> str | None:
    """Return the version of the kernels required to train packed rows if the installed ones cannot, or None."""
    if delta_rule:
        # On Hopper with Triton 3.4 to 3.7.0, older ones compute wrong gradients; later ones refuse (fla issue 640).
        names = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"), ("fla.modules.convolution", "causal_conv1d")
        known = all(accepts(getattr(import_module(module), name), "cu_seqlens") for module, name in names)
        version = utils.PkgVersion(getattr(import_module("fla"), "__version__", "0"))
        return None if known and version >= utils.PkgVersion("0.5.0") else "flash-linear-attention >= 0.5.0 is required"
    # Since 2.2.5, mamba-ssm imports the convolution from a module that older versions of causal_conv1d lack.
    least = "1.5.1" if utils.is_mamba_min_version("2.2.5") else "1.4.0"
    if find_spec("causal_conv1d") is None or not utils.is_causal_conv1d_min_version(least):
        return f"causal_conv1d >= {least} is required"
    # Versions since 2.0 accept sequence starts, but their gradients were wrong (mamba issue 352, pull request 537).
    return None if utils.is_mamba_min_version("2.2.4") else "mamba_ssm >= 2.2.4 is required"


def engine_compares_bounds() -> bool:
    """Return True if Transformer Engine's attention checks on the host, in every layer, whether rows are padded.

    Versions before 2.19 do so unless `pad_between_seqs` is given, and Megatron-Core 0.16 has no field for it.
    """
    return not _HAS_PADDING_FIELD and not utils.is_te_min_version("2.19.0")


def has_streams(device: torch.device) -> bool:
    """Return True if the device can capture graphs and overlap communication between ranks with computation."""
    return device.type == "cuda"


def accepts(function: Any, name: str) -> bool:
    """Return True if `function` (or the constructor of a class) has a parameter `name`."""
    return name in inspect.signature(function).parameters


def gpt_dataset_config(values: dict[str, Any]) -> GPTDatasetConfig:
    """Return Megatron's settings for a pretraining dataset; raise ConfigError if this version lacks one."""
    unknown = sorted(set(values) - {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init})
    if unknown:
        what = f"megatron-core {MEGATRON_VERSION} has no {', '.join(unknown)}"
        raise ConfigError(what, where=f"data.{unknown[0]}", fix="omit it, or install a version that supports it")
    return GPTDatasetConfig(**values)


def async_checkpoint_arguments(save: Any) -> dict[str, Any]:
    """Return the arguments that select Megatron's own background writer, which is not the default in 0.19."""
    strategy = {"async_strategy": "mcore"} if accepts(save, "async_strategy") else {}
    return {"validate_access_integrity": False, "async_sharded_save": True, **strategy}


@contextmanager
def checkpoints_read_by(reader: Callable[[str], FileSystemReader]) -> Iterator[None]:
    """Make Megatron's loader open checkpoints with `reader` inside the block.

    Megatron 0.16 opens them in its strategy for torch's format; 0.19 does so in its entry points too, for the values
    that 0.16 stores in `common.pt`.
    """
    assert hasattr(torch_format, "_get_filesystem_reader"), "this version would unpickle without restrictions"
    with ExitStack() as stack:
        for module in (torch_format, serialization):
            if hasattr(module, "_get_filesystem_reader"):
                replaced = mock.patch.object(module, "_get_filesystem_reader", lambda path, *_, **__: reader(str(path)))
                stack.enter_context(replaced)
        yield


@contextmanager
def without_kernels(*, on_cpu: bool) -> Iterator[None]:
    """Run Megatron without Transformer Engine, on a CPU even if it is installed, inside the block.

    Wherever Transformer Engine can be imported, even without a GPU, Megatron uses its optimizer and gradient norms.
    On a CPU they are replaced by PyTorch's AdamW and Megatron's own functions.

    Megatron 0.16 reads a name that exists only with Transformer Engine. The expert dispatcher expects token counts as
    numpy arrays, which Megatron creates only from tensors on a GPU, and never releases its CUDA stream.
    """

    def as_lists(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    with ExitStack() as stack:
        # Projections to and from experts of another hidden size, which Megatron builds only with Transformer Engine.
        stack.enter_context(mock.patch.multiple(moe_layer, create=True, HAVE_TE=True, TELinear=WholeLinear))
        if on_cpu or not _can_import(_ENGINE):
            # Without Transformer Engine, or if importing it fails, its names exist but are not classes.
            stack.enter_context(mock.patch.object(multi_latent_attention, "HAVE_TE", False))
            # Megatron 0.16 compares versions with None if it is missing.
            stack.enter_context(mock.patch.object(optimizer_config, "is_te_min_version", return_value=False))
        if on_cpu or not hasattr(moe_utils, "te_general_gemm"):
            stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        if on_cpu:
            stack.enter_context(_cpu_as_cuda())
            for module, values in _OF_A_CPU.items():
                there = {name: value for name, value in values.items() if hasattr(module, name)}
                stack.enter_context(mock.patch.multiple(module, **there))
            stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", as_lists))
            sort = "_get_sub_optimizer_param_groups"
            stack.enter_context(mock.patch.object(HybridDeviceOptimizer, sort, _sort_by_device))
            dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
            stack.enter_context(mock.patch.object(dispatcher, "cuda_dtoh_stream", None))
            # Only fused kernels read these tables; slicing them for context parallelism would need pinned memory.
            stack.enter_context(mock.patch.object(YarnRotaryEmbedding, "_set_cos_sin_cache", return_value=None))
        yield


def require_moments() -> None:
    """Raise ConfigError unless Megatron uses Transformer Engine's Adam, which can store its moments in bfloat16."""
    if accepts(optimizer.Adam, "exp_avg_dtype"):
        return
    what = f"optimizer.moments_dtype is bfloat16, but Adam of {optimizer.Adam.__module__.partition('.')[0]} does not "
    what += "support it: it requires Transformer Engine's Adam on a GPU"
    fix = "install the `gpu` extra or use a container with it, or set optimizer.moments_dtype=float32"
    raise ConfigError(what, where="optimizer.moments_dtype", fix=fix)


class _CudaMeansCpu(TorchFunctionMode):
    """Map `device="cuda"` and `Tensor.cuda()` to the CPU; `Tensor.type()` returns the same string as on a GPU.

    Megatron's optimizers group parameters by strings such as `torch.cuda.FloatTensor`.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Now:
    """Stream, event and profiler of a device that never works asynchronously."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def wait(self, *others: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = range_push = range_pop = wait

    def record_event(self, event: Any = None) -> _Now:
        return self


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    # A plain integer is the index of a GPU; a bool is an argument with another meaning.
    return (isinstance(device, str) and device.startswith("cuda")) or type(device) is int


@contextmanager
def _cpu_as_cuda() -> Iterator[None]:
    def set_state(state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    def get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    stream = _Now()
    cuda = mock.patch.multiple(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda device=None: None,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        stream=lambda stream: nullcontext(),
        Stream=_Now,
        Event=_Now,
        nvtx=stream,
        get_rng_state=get_state,
        set_rng_state=set_state,
        manual_seed=torch.default_generator.manual_seed,  # without other devices, each of which keeps a stack trace
        empty_cache=lambda: None,
    )
    # Megatron's seed tracker uses the generator of the GPU; a CPU has one for everything. Torch's compiler
    # reads the names of all methods of tensors, which a mock does not have.
    generator = mock.patch.multiple(megatron_random, _set_cuda_rng_state=set_state, _get_cuda_rng_state=get_state)
    with cuda, generator, mock.patch.multiple(torch.Tensor, record_stream=lambda self, stream: None), _CudaMeansCpu():
        yield


class _HostCopies(TorchFunctionMode):
    """Distinguish host copies from the weights they were copied from, on a CPU that holds both.

    Megatron's offloading optimizer looks for weights on a GPU, and copies them into pinned memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not hasattr(args[0], "is_on_host")
        made = args[0] if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and (func is torch.Tensor.cpu or hasattr(args[0], "is_on_host")):
            made.is_on_host = True  # type: ignore[attr-defined]
        return made


def _sort_by_device(self: Any, offload_fraction: float) -> Any:
    with _HostCopies():
        return _SORT_BY_DEVICE(self, offload_fraction)


_SORT_BY_DEVICE = HybridDeviceOptimizer._get_sub_optimizer_param_groups


def _gather_parts(input_: Any, group: Any, output_split_sizes: Any = None, *options: Any) -> Any:
    """Gather parts of different lengths, the tokens of ranks that share experts; gloo cannot, unlike NCCL."""
    if output_split_sizes is None or torch.distributed.get_backend(group) != "gloo":
        return _GATHER(input_, group, output_split_sizes, *options)
    gathered = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
    for rank, part in enumerate(gathered.split(list(output_split_sizes))):
        if rank == group.rank():
            part.copy_(input_)
        torch.distributed.broadcast(part, group=group, group_src=rank)
    return gathered


def _scatter_parts(input_: Any, group: Any, input_split_sizes: Any = None, *options: Any) -> Any:
    """Sum over ranks and return this rank's part; parts can differ in length."""
    if input_split_sizes is None or torch.distributed.get_backend(group) != "gloo":
        return _SCATTER(input_, group, input_split_sizes, *options)
    for rank, part in enumerate(input_.split(list(input_split_sizes))):
        summed = part.clone()
        torch.distributed.reduce(summed, group=group, group_dst=rank)
        if rank == group.rank():
            own = summed
    return own


_GATHER, _SCATTER = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


_NORMS = {
    "multi_tensor_applier": utils.local_multi_tensor_applier,
    "l2_norm_impl": utils.local_multi_tensor_l2_norm,
    "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
    "multi_tensor_scale_tensor_impl": None,
}
# Names that Megatron's modules import from Transformer Engine (or Apex) if it is installed.
_OF_A_CPU: dict[Any, dict[str, Any]] = {
    optimizer: {"Adam": torch.optim.AdamW, "SGD": torch.optim.SGD, "USING_PYTORCH_OPTIMIZER": True},
    distrib_optimizer: dict.fromkeys(("HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER", "USING_APEX_OPTIMIZER"), False)
    | {"Adam": torch.optim.Adam},
    clip_grads: _NORMS,
    mappings: {"_gather_along_first_dim": _gather_parts, "_reduce_scatter_along_first_dim": _scatter_parts},
    optimizer.optimizer: _NORMS,
}


def with_router(layer: Any, router: type[TopKRouter]) -> Any:
    """Return a layer's specification with this router in its mixture of experts, if it has one."""
    mlp = layer.submodules.mlp
    experts: Any = mlp.keywords.get("submodules") if isinstance(mlp, partial) else mlp.submodules
    if not hasattr(experts, "router"):
        return layer
    parts: Any = {"submodules": dataclasses.replace(experts, router=router)}
    mlp = partial(mlp, **parts) if isinstance(mlp, partial) else dataclasses.replace(mlp, **parts)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, mlp=mlp))


def reduce_over_copies(experts: torch.nn.Module) -> None:
    """Mark a layer's experts so that their gradients are summed over the ranks that hold copies, as Megatron 0.19 does.

    With one expert-parallel rank, Megatron 0.16 sums expert gradients over the data-parallel ranks, as for dense
    parameters. That leaves out the tensor-parallel ranks, which send the experts tokens of their own.
    """
    for parameter in experts.parameters():
        setattr(parameter, "allreduce", False)  # noqa: B010 - not an attribute of torch


def predicting_layer(layer: Any) -> Any:
    """Return the decoder layer inside Megatron's layer that predicts a further token."""
    return layer.transformer_layer if hasattr(layer, "transformer_layer") else layer.mtp_model_layer


# Matches the prefix of this decoder layer in parameter names.
PREDICTING_LAYER = r"(?:transformer_layer|mtp_model_layer)\."


def keep_checkpoint_results_in_a_file() -> None:
    """Return the results of checkpoint writers through a file, not through the manager process that Megatron starts.

    That process takes seconds to start and outlives a killed run. When Slurm sends SIGTERM to every process of a job,
    it dies, and the checkpoint that the signal requested is lost.
    """
    if hasattr(filesystem_async, "_results_queue") and filesystem_async._results_queue is None:
        filesystem_async._results_queue = _ResultFile()


# Functions that write a file of a checkpoint on rank 0 only; no version has all of them.
_WRITTEN_ALONE = (
    (filesystem_async.FileSystemWriterAsync, "finish"),
    (getattr(common, "TorchCommonSaveStrategy", None), "save_common"),
    (serialization, "save_common"),
    (serialization, "save_config"),
)


@contextmanager
def rank_0_goes_on() -> Iterator[list[Exception]]:
    """Collect, instead of raising, errors of files that only rank 0 writes, because other ranks wait for rank 0."""
    errors: list[Exception] = []

    def without_errors(write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*arguments: Any, **options: Any) -> None:
            try:
                write(*arguments, **options)
            except (OSError, RuntimeError) as error:
                errors.append(error)

        return wrapped

    with ExitStack() as stack:
        for place, name in _WRITTEN_ALONE:
            if hasattr(place, name):
                stack.enter_context(mock.patch.object(place, name, without_errors(getattr(place, name))))
        yield errors


class WrittenHashes:
    """Hashes of checkpoint files, computed while the bytes are written.

    Megatron's writers call `open` in their module. They run in a forked process, and the name is replaced only there;
    the hashes come back through a pipe. Storage that Megatron writes to without `open`, through the package
    multistorageclient, is not covered.
    """

    def __init__(self) -> None:
        # About 100 bytes per file, one or two files per rank: a pipe holds hundreds of them.
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        for descriptor in (self._reading, self._writing):
            weakref.finalize(self, os.close, descriptor)

    def of_files_written_by(self, request: Any) -> Any:
        """Return a checkpoint request whose writers compute hashes; unchanged on a rank that writes nothing."""
        if request.async_fn is None:
            return request
        return request._replace(async_fn=partial(_hash_and_write, request.async_fn, self._writing))

    def take(self) -> list[StoredFile]:
        """Return the files written since the last call."""
        data = b""
        with suppress(BlockingIOError):
            while block := os.read(self._reading, 1 << 16):
                data += block
        return [StoredFile(*json.loads(line)) for line in data.splitlines()]


def _hash_and_write(write: Any, pipe: int, *arguments: Any, **options: Any) -> Any:
    # Runs in a process forked for this call, so `open` in the training process is unchanged. Freeze its garbage:
    # destroying a process group here would wait for threads that a fork does not copy.
    gc.freeze()

    def open_hashed(path: str, mode: str) -> io.BufferedWriter:
        return io.BufferedWriter(_HashedFile(path, mode, pipe))

    # This process waits for reports of its own children; a child that is killed, or cannot start a thread, never sends
    # one. A child that ends before its process is known is found by the next timer signal. The handler exits instead of
    # raising: Python drops exceptions that a handler raises inside a fork hook or while an object is freed.
    def look(*_: object) -> None:
        if lost := _find_lost_writer():
            results = filesystem_async._results_queue
            assert results is not None
            results.put(RuntimeError(lost))
            for signum in (signal.SIGCHLD, signal.SIGALRM):  # the kills below are not lost writers
                signal.signal(signum, signal.SIG_IGN)
            for other in _started_processes():  # may be waiting for their results to be read
                if other.returncode is None:
                    os.kill(other.pid, signal.SIGKILL)
            os._exit(0)

    for signum in (signal.SIGCHLD, signal.SIGALRM):
        signal.signal(signum, look)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    try:
        with mock.patch.object(filesystem_async, "open", open_hashed, create=True):
            return write(*arguments, **options)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # nothing waits for a report now


def _started_processes() -> list[Any]:
    # Starting a process removes ended ones from the list of children; this set keeps all.
    all_known = list(process._dangling)  # type: ignore[attr-defined]
    return [popen for child in all_known if child._parent_pid == os.getpid() and (popen := child._popen) is not None]


def _find_lost_writer() -> str | None:
    """Return a description of a failed child process that ended without a report, or None."""
    for started in _started_processes():
        code = started.returncode or 0
        with suppress(ChildProcessError):
            # WNOWAIT leaves the process to be waited for by the code that started it.
            ended = os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if code:
            how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
            return f"a process that writes it {how}"
    return None


class _HashedFile(io.FileIO):
    """A file written sequentially; closing it sends its size and hash through a pipe."""

    def __init__(self, path: str, mode: str, pipe: int) -> None:
        super().__init__(path, mode)
        self._pipe, self._num_bytes, self._hash = pipe, 0, xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        written = super().write(data) or 0
        self._hash.update(memoryview(data).cast("B")[:written])
        self._num_bytes += written
        return written

    def close(self) -> None:
        if not self.closed:
            super().close()
            facts = [Path(str(self.name)).name, self._num_bytes, self._hash.hexdigest()]
            os.write(self._pipe, (json.dumps(facts) + "\n").encode())


class _ResultFile:
    """The two queue methods that Megatron calls, for one result at a time; shared with forked processes."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open until the process ends

    def put(self, result: Any) -> None:
        rest = memoryview(pickle.dumps(result))
        at = 0
        while at < len(rest):
            at += os.pwrite(self._file.fileno(), rest[at:], at)

    def get_nowait(self) -> Any:
        data = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        if not data:
            raise queue.Empty
        self._file.truncate(0)
        try:
            return pickle.loads(data)
        except (EOFError, pickle.UnpicklingError):  # its writer was killed
            raise queue.Empty from None
