"""Device, rank and parallel groups of a process in its job."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast
from unittest import mock

import torch.distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from harness.checks import require_choice
from harness.errors import ConfigError, HarnessError, LostRankError
from harness.launch.local import STORE_FD
from harness.loader import RankLayout
from harness.megatron.job.watchdog import waiting
from harness.plan import ParallelConfig, RunConfig
from harness.schedule.batch import largest_share

DEVICES = ("auto", "cpu", "cuda")
T = TypeVar("T")
Settings = TypeVar("Settings", bound=RunConfig)


@dataclass(frozen=True)
class Runtime:
    """Device and rank of this process in its job."""

    device: torch.device
    rank: int
    world_size: int
    local_rank: int


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`; raise ConfigError if CUDA is requested and missing."""
    require_choice(name, DEVICES, setting="trainer.device")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        what = "trainer.device is cuda, but PyTorch finds no GPU"
        fix = "trainer.device=auto, or start on a node with GPUs and a CUDA build of torch"
        raise ConfigError(what, where=f"host {socket.gethostname()}, torch {torch.__version__}", fix=fix)
    local_rank = place_in_job("LOCAL_RANK")
    if local_rank >= torch.cuda.device_count():
        what = f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}"
        fix = "start one process per GPU of the node"
        error = ConfigError(what, where=f"host {socket.gethostname()}", fix=fix)
        error.rank = place_in_job("RANK")  # other ranks have a GPU and report nothing
        raise error
    return torch.device("cuda", local_rank)


def settle(config: Settings) -> Settings:
    """Return the settings of a run with each `auto` resolved for this process's device."""
    is_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    return config.on("cuda" if is_gpu else "cpu")


def place_in_job(name: str) -> int:
    """Return the launcher's variable `name`, such as RANK or LOCAL_WORLD_SIZE; if unset, that of a job of one rank."""
    least = int(name.endswith("WORLD_SIZE"))
    text = os.environ.get(name, str(least))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name} is {text!r}", where="environment", fix="start with torchrun, or unset it")
    return int(text)


@contextmanager
def start(
    device: str = "auto", *, timeout_s: float = 600.0, meet_timeout_s: float | None = None, deterministic: bool = False
) -> Iterator[Runtime]:
    """Join the job that the environment describes (torchrun, or a single process), and leave it at the end.

    The backend is NCCL on GPUs and gloo on CPUs. A process that was not started by a launcher is a job of one rank.

    Args:
        meet_timeout_s: how long to wait for missing ranks at the start; None for `timeout_s`.
        deterministic: use only kernels that return the same bits each time, until the job ends.

    Raises:
        ConfigError: no such device, or an incomplete launcher environment.
        LostRankError: a rank is missing, or rank 0 cannot be reached.
    """
    chosen = choose_device(device)
    rank, world_size, local_rank = (place_in_job(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world_size > 1 and missing:
        what = f"WORLD_SIZE is {world_size}, but {' and '.join(missing)} is not set"
        fix = "start with torchrun, or set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        raise ConfigError(what, where="environment", fix=fix)
    if rank >= world_size:
        what = f"RANK is {rank}, but WORLD_SIZE is {world_size}"
        raise ConfigError(what, where="environment", fix="start with torchrun, or unset both")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        # NCCL's flight recorder keeps this many collectives; the watchdog writes them to the run's folder on a hang.
        # Newer versions of PyTorch read the first name.
        if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
            os.environ.update(TORCH_FR_BUFFER_SIZE="2000", TORCH_NCCL_TRACE_BUFFER_SIZE="2000")
    from harness.megatron import compat  # Megatron-Core is imported when a job starts

    same_bits = _same_bits() if deterministic else nullcontext()
    with compat.without_kernels(on_cpu=chosen.type == "cpu"), same_bits:
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=timeout_s)}
        # With a device, NCCL connects right away, not in the first step.
        place["device_id"] = chosen if chosen.type == "cuda" else None
        backend = "gloo" if chosen.type == "cpu" else "nccl"
        store = _meet(rank, world_size, meet_timeout_s or timeout_s) if world_size > 1 else HashStore()
        torch.distributed.init_process_group(backend, store=PrefixStore("job", store), **place)
        with _left_at_the_end():
            try:
                yield Runtime(chosen, rank, world_size, local_rank)
            except HarnessError as error:
                error.rank = rank
                raise


@contextmanager
def alone(rank: int, world_size: int) -> Iterator[Runtime]:
    """Run this process, on a CPU, as one rank of a job whose other ranks do not exist.

    PyTorch's fake process group returns from every collective at once, with this rank's own values or none. Code runs
    as it would in the job, but the results are meaningless.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    from harness.megatron import compat

    make_group = torch.distributed.new_group

    def receive_nothing(output: torch.Tensor, *arguments: Any, **options: Any) -> None:
        # The fake group requires equal sizes of input and output, which may differ here.
        output.zero_()

    def make_fake(*arguments: Any, **options: Any) -> Any:
        options.pop("pg_options", None)
        return make_group(*arguments, **{**options, "backend": "fake"})

    with compat.without_kernels(on_cpu=True):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        faked = mock.patch.multiple(torch.distributed, new_group=make_fake, all_to_all_single=receive_nothing)
        with _left_at_the_end(), faked:
            yield Runtime(torch.device("cpu"), rank, world_size, 0)


@contextmanager
def _left_at_the_end() -> Iterator[None]:
    try:
        yield
    finally:
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def join(
    config: ParallelConfig, world_size: int, *, timeout_s: float = 1800.0, shares_rows: bool = False
) -> RankLayout:
    """Create Megatron's process groups, with a timeout for their collectives, and return this rank's place in them.

    With `shares_rows`, also create the groups of data-parallel ranks that share rows, for `dynamic_context`.
    """
    from megatron.core import parallel_state

    dp_size = config.dp_size(world_size)
    with _same_ranks_share_groups():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel_size,
            pipeline_model_parallel_size=config.pipeline_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
            hybrid_context_parallel=shares_rows and largest_share(dp_size) > 1,
        )
    return place_in_groups(
        pad_to_multiple=config.pad_to_multiple, group_size=config.group_size, shares_rows=shares_rows
    )


def place_in_groups(**rest: Any) -> RankLayout:
    """Return this rank's place in Megatron's process groups; `rest` contains the other values of the layout."""
    from megatron.core import parallel_state

    return RankLayout(
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        is_first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        **rest,
    )


@contextmanager
def _same_ranks_share_groups() -> Iterator[None]:
    """Create only one gloo group per set of ranks inside the block, however many Megatron requests.

    Each group has a thread that wakes a hundred times per second, and a rank on a CPU is in 30 groups.
    """
    made: dict[tuple[int, ...], Any] = {}
    make_group = torch.distributed.new_group

    def reuse(ranks: Any = None, **options: Any) -> Any:
        if ranks is None or torch.distributed.get_backend() != "gloo":
            return make_group(ranks, **options)
        if tuple(ranks) not in made:
            made[tuple(ranks)] = make_group(ranks, **options)
        return made[tuple(ranks)]

    with mock.patch.object(torch.distributed, "new_group", reuse):
        yield


def _meet(rank: int, world_size: int, timeout_s: float) -> Store:
    """Return the store of the job once every rank has connected; otherwise raise LostRankError for the missing rank."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    timeout = timedelta(seconds=timeout_s)
    fix = "check its log and node: it hangs, failed or never started. Other ranks wait for trainer.startup_timeout_s"
    try:
        store = _open_store(rank, world_size, timeout)
        names = [f"came/{number}" for number in range(world_size)]
        store.set(names[rank], socket.gethostname())
        if rank == 0:
            _wait_for(store, names, timeout)
            hosts = {name: store.get(name).decode() for name in names if store.check([name])}
            store.set("hosts", json.dumps(hosts))
            if len(hosts) < world_size:
                time.sleep(2)  # the store may be in this process, and the others still read it
        elif _wait_for(store, names[:1], timeout) and _wait_for(store, ["hosts"], timeout + timedelta(seconds=10)):
            hosts = json.loads(store.get("hosts"))
        else:
            hosts = {name: store.get(name).decode() for name in names if store.check([name])}
    except (RuntimeError, ValueError) as error:
        lost = LostRankError(f"rank 0 cannot be reached: {str(error).splitlines()[0]}", where=place, fix=fix)
        lost.about = 0
        raise lost from None
    missing = [number for number, name in enumerate(names) if name not in hosts]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        message = f"rank {missing[0]}{more} of {world_size} did not connect within {timeout_s:g} s"
        present = ", ".join(f"{host} ({count})" for host, count in sorted(Counter(hosts.values()).items()))
        lost = LostRankError(message, where=f"{place}, reached by ranks from {present}", fix=fix)
        lost.about = missing[0]
        lost.is_shared = True
        raise lost
    return store


def _open_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun hosts a store
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        return cast(Store, store)
    # PyTorch's own rendezvous waits for all ranks, and does not name a missing one.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
    if (listening := os.environ.pop(STORE_FD, None)) is not None:
        options["master_listen_fd"] = int(listening)
    return TCPStore(address, port, world_size, rank == 0, **options)


def _wait_for(store: Store, names: list[str], timeout: timedelta) -> bool:
    try:
        store.wait(names, timeout)
    except torch.distributed.DistStoreError:
        return False
    return True


def place_among_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) outside a job."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def on_rank_0(function: Callable[[], T]) -> T:
    """Run `function` on rank 0, and return its result, or raise its error, on every rank.

    An OSError becomes a ConfigError, because `function` finds or creates folders.
    """
    outcome: list[Any] = [None, None]
    rank, size = place_among_ranks()
    if rank == 0:
        try:
            outcome[0] = function()
        except HarnessError as error:
            outcome[1] = error
        except OSError as error:
            what, where = f"the folder cannot be used: {error.strerror or error}", error.filename or "the run's folder"
            outcome[1] = ConfigError(what, where=str(where), fix="free disk space, or use a writable folder")
    if size > 1:
        with waiting():
            torch.distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        outcome[1].is_shared = True
        raise outcome[1]
    return cast(T, outcome[0])


def gather_on_rank_0(value: T) -> list[T]:
    """Return every rank's `value` in order on rank 0, and an empty list on the others; every rank takes part."""
    rank, size = place_among_ranks()
    if size == 1:
        return [value]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    torch.distributed.gather_object(value, gathered, dst=0)
    return gathered or []


def gather(value: T) -> list[T]:
    """Return every rank's `value` in order, on every rank."""
    gathered = [value] * place_among_ranks()[1]
    if len(gathered) > 1:
        with waiting():
            torch.distributed.all_gather_object(gathered, value)
    return gathered


# Variables that make kernels deterministic, and their accepted values; the first is the default.
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


@contextmanager
def _same_bits() -> Iterator[None]:
    """Restrict PyTorch, cuBLAS, NCCL and Transformer Engine to deterministic kernels inside the block."""
    wanted = {
        name: now if (now := os.environ.get(name)) in choices else choices[0]  # keep a site's own choice
        for name, choices in _DETERMINISTIC.items()
    }
    was = torch.are_deterministic_algorithms_enabled()
    with mock.patch.dict(os.environ, wanted):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was)
