"""The machine of a report, the rates that it reaches, and the sizes of parts and models that fit it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from harness.bench.figures import BenchReport, Figure, describe_machine, list_versions, take_turns
from harness.bench.sizes import Sizes
from harness.bench.step import wait_for
from harness.bench.workspace import Workspace
from harness.config import compose_config
from harness.megatron.job import runtime
from harness.plan import ModelConfig, ParallelConfig, SftConfig, plan_memory
from harness.plan.memory import Memory

# Variables that change what is measured.
_VARIABLES = ("NCCL_", "NVTE_", "CUDA_", "TORCH_", "CUBLAS_", "UB_", "OMP_NUM_THREADS", "PYTORCH_")
_REPEATS = 10
# Room for what the plan does not count: kernels' workspaces, the allocator's fragments, copies of logits.
_PLANNED_SHARE = 0.65
_PRESETS = {"1b": "llama3_2_1b", "8b": "llama3_8b"}
# A row is one pack; a step has `global_batch` rows of each data-parallel rank.
SIZES = {
    "full": Sizes(
        packs=96, pack_size=8192, max_tokens_per_rank=8192, global_batch=4, workers=(4,), steps=12, rounds=10
    ),
    "tiny": Sizes(
        size="tiny", packs=8, pack_size=256, max_tokens_per_rank=256, global_batch=2, workers=(0,), steps=3, rounds=2
    ),
}
_TINY = ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=192, num_attention_heads=4, num_query_groups=2)
# Peaks of dense bfloat16 products, in TFLOP/s, by the first of these words in a GPU's name.
_PEAKS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    **dict.fromkeys(("H100", "H200", "H800"), 989.0),  # GH200 too
    "H20": 148.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
}


def describe_gpus(device: str) -> dict[str, Any]:
    """Return what figures of this machine depend on: GPUs, driver, processor and packages.

    Transformer Engine has its version, or under `engine_missing` the reason why it cannot be imported.
    """
    chosen = runtime.choose_device(device)
    machine, versions = describe_machine(), list_versions()
    known: dict[str, Any] = {
        "device": chosen.type,
        "gpus": [],
        "driver": "",
        **{name: machine[name] for name in ("processor", "cores", "python")},
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "megatron-core": versions.get("megatron-core", ""),
        "engine": "",
        "engine_missing": "there is no GPU" if chosen.type == "cpu" else "",
    }
    if chosen.type == "cpu":
        return known
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        known["gpus"].append(f"{properties.name}, {properties.total_memory / 1e9:.1f} GB")
    printed = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    known["driver"] = "unknown: there is no nvidia-smi" if printed is None else printed.partition("\n")[0] or "unknown"
    try:
        import transformer_engine.pytorch  # noqa: F401

        known["engine"] = importlib.metadata.version("transformer-engine")
    except Exception as error:  # of any kind: it may be built for another PyTorch
        known["engine_missing"] = (str(error) or repr(error)).splitlines()[0]
    return known


def measure_environment(sizes: Sizes, workspace: Workspace, word: str) -> BenchReport:
    """Measure products and copies on one GPU, and note what is installed."""
    report = BenchReport("gpu")
    device = runtime.choose_device(sizes.device)
    on_gpu = device.type == "cuda"
    size, copied_bytes = matrix_of(sizes), _copied_bytes(sizes)
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32} if on_gpu else {"float32": torch.float32}
    for name, dtype in dtypes.items():
        rates = measure_products(device, dtype, size, rounds=sizes.rounds)
        report.add_samples(f"products of {size} x {size} in {name}", rates, "TFLOP/s")
    numbers = torch.ones(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(numbers)
    sides: dict[str, Callable[[], Any]] = {"copy on the device, read and written": lambda: target.copy_(numbers)}
    if on_gpu:
        pinned, plain = (torch.ones(copied_bytes, dtype=torch.uint8) for _ in range(2))
        pinned = pinned.pin_memory()
        sides["copy to the device, pinned"] = lambda: target.copy_(pinned, non_blocking=True)
        sides["copy to the device, pageable"] = lambda: target.copy_(plain)
        sides["copy to the host, pinned"] = lambda: pinned.copy_(target, non_blocking=True)
    timed = {name: partial(time_on, device, copy) for name, copy in sides.items()}
    for name, samples in take_turns(timed, rounds=sizes.rounds).items():
        moved = numbers.nbytes * (2 if "on the device" in name else 1)
        report.add_samples(name, [moved / second / 1e9 for second in samples], "GB/s")
    report.notes += [f"{name}: {value}" for name, value in _facts(device).items()]
    return report


def matrix_of(sizes: Sizes) -> int:
    """Return the rows and columns of multiplied matrices."""
    return 256 if sizes.is_tiny else 8192


def _copied_bytes(sizes: Sizes) -> int:
    return 1 << (20 if sizes.is_tiny else 30)


def measure_products(device: torch.device, dtype: torch.dtype, size: int, *, rounds: int) -> list[float]:
    """Return the TFLOP/s of products of two random square matrices, a sample a round."""
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    made = torch.empty_like(one)
    product = partial(torch.matmul, one, other, out=made)
    time_on(device, product)
    return [2 * size**3 / time_on(device, product) / 1e12 for _ in range(max(rounds, 1))]


def peak_of(device: torch.device, size: int) -> tuple[float, str]:
    """Return the TFLOP/s that MFU divides by, and where it is from: the maker's, or a measurement here."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if known := next((peak for word, peak in _PEAKS.items() if word in name), None):
        return known, f"MFU is relative to {known:,.0f} TFLOP/s, the vendor's figure for bfloat16"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak = max(measure_products(device, dtype, size, rounds=3))
    return peak, f"MFU is relative to {peak:.3g} TFLOP/s, measured with {size} x {size} products: no published peak"


def time_on(device: torch.device, work: Callable[[], Any], number: int = 0) -> float:
    """Return the seconds of one run of `work`, from several in a row, with the device idle before and after."""
    repeats = _REPEATS if device.type == "cuda" else 1
    wait_for(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait_for(device)
    return max(time.perf_counter() - start, 1e-9) / repeats


def measure_links(sizes: Sizes, workspace: Workspace, word: str) -> BenchReport:
    """Measure an all-reduce over all ranks; the rate is that of the links, whatever the number of ranks."""
    report = BenchReport("gpu")
    with runtime.start(sizes.device) as job:
        numbers = torch.ones(_copied_bytes(sizes) // 2, dtype=torch.bfloat16, device=job.device)
        share = 2 * (job.world_size - 1) / job.world_size
        samples = []
        for number in range(sizes.rounds + 1):
            torch.distributed.barrier()
            seconds = time_on(job.device, lambda: torch.distributed.all_reduce(numbers))
            samples += [share * numbers.nbytes / seconds / 1e9] if number else []
        report.add_samples(f"all-reduce of {job.world_size} ranks, bus rate", samples, "GB/s")
    return report


def _facts(device: torch.device) -> dict[str, str]:
    facts: dict[str, str] = {}
    if device.type == "cuda":
        of_cudnn: Any = torch.backends.cudnn.version
        of_nccl: Any = torch.cuda.nccl.version
        facts["cuDNN"] = str(of_cudnn())
        with suppress(RuntimeError, AttributeError):
            facts["NCCL"] = ".".join(map(str, of_nccl()))
        facts["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        if torch.cuda.device_count() > 1 and (links := _nvidia_smi("topo", "-m")) is not None:
            facts["links"] = links
    for name, module in (("Apex's weight gradient", "fused_weight_gradient_mlp_cuda"), ("flash-attn", "flash_attn")):
        facts[name] = "installed" if importlib.util.find_spec(module) else "not installed"
    return facts | {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}


def _nvidia_smi(*options: str) -> str | None:
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    return subprocess.run([program, *options], capture_output=True, text=True, check=False, timeout=60).stdout.strip()


def add_memory(report: BenchReport, device: torch.device, planned: Memory) -> None:
    """Add the most memory that tensors took on a GPU, and its ratio to the plan."""
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        report.add(Figure("most memory of tensors", most / 1e9, "GB"))
        report.add(Figure("most memory of tensors over `harness plan`", most / planned.total, "x"))


def shape_of(name: str, sizes: Sizes, device: torch.device, *, share: float = 1.0) -> ModelConfig:
    """Return a share of the layers of a model `1b` or `8b`, in the device's dtype; tiny sizes keep only its kind."""
    model = _TINY if sizes.is_tiny else compose_config("sft", SftConfig, [f"model={_PRESETS[name]}"]).model
    layers, dtype = int(share * model.num_layers), "bfloat16" if device.type == "cuda" else "float32"
    return replace(model, num_layers=layers, dtype=dtype, init_from=None)


def fit(
    model: ModelConfig, parallel: ParallelConfig, *, vocab_size: int, ranks: int, row: int, device: torch.device
) -> ModelConfig:
    """Return the model with as many of its layers as a rank's GPU holds in training; on a CPU, the model."""
    if device.type != "cuda":
        return model
    room = _PLANNED_SHARE * torch.cuda.mem_get_info(device)[1]

    def needed(layers: int) -> int:
        of = replace(model, num_layers=layers)
        return plan_memory(of, parallel, vocab_size=vocab_size, dp_size=ranks, max_tokens_per_rank=row).total

    layers = max((n for n in range(1, model.num_layers + 1) if needed(n) <= room), default=1)
    return replace(model, num_layers=layers)
