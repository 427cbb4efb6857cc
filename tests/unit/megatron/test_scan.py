"""The scan of a layer is that of the installed kernels, if these know where sequences begin."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import utils

from harness.errors import ConfigError
from harness.megatron.batch import run_row, to_device
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model import scan, scan_reference
from harness.megatron.model.gpt import build_chunks
from harness.megatron.model.scan import choose_delta_rule, choose_scan
from harness.plan import ModelConfig, ParallelConfig, model_checks
from harness.records import SequenceView
from harness.thd import build_thd_batch, pad_row
from tests.samples.warm_python import warm_python

REFERENCE = scan_reference.mamba_split_conv1d_scan_combined
GPU = torch.device("cuda")
ROOT = Path(__file__).parents[3]


def install(folder: Path, **versions: str) -> None:
    """Make packages of these versions, as a GPU's machine has them."""
    for name, version in versions.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
    kernels = folder / "mamba_ssm" / "ops" / "triton"
    kernels.mkdir(parents=True)
    for package in (kernels, kernels.parent):
        (package / "__init__.py").write_text("")
    (kernels / "ssd_combined.py").write_text("def mamba_split_conv1d_scan_combined(): ...\n")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("_mamba_ssm_version", "_causal_conv1d_version"):
        monkeypatch.setattr(utils, name, None)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mamba_ssm", "causal_conv1d", "fla")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_a_gpu_without_kernels_and_a_cpu_with_them_scan_in_pytorch(packages) -> None:
    assert choose_scan(GPU, 768) is REFERENCE
    install(packages, mamba_ssm="2.2.4", causal_conv1d="1.5.0")
    assert choose_scan(torch.device("cpu"), 772) is REFERENCE
    assert choose_scan(GPU, 768).__module__ == "mamba_ssm.ops.triton.ssd_combined"
    with pytest.raises(ConfigError, match="a rank would scan 772 numbers per token"):
        choose_scan(GPU, 772)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        # It knows where sequences begin, and its gradients of decays are wrong.
        ({"mamba_ssm": "2.2.2", "causal_conv1d": "1.5.0"}, "mamba_ssm >= 2.2.4 is required"),
        ({"mamba_ssm": "2.2.4", "causal_conv1d": "1.1.0"}, "causal_conv1d >= 1.4.0 is required"),
        ({"mamba_ssm": "2.2.4"}, "causal_conv1d >= 1.4.0 is required"),
        ({"mamba_ssm": "2.2.5", "causal_conv1d": "1.5.0"}, "causal_conv1d >= 1.5.1 is required"),
    ],
)
def test_kernels_that_would_train_packed_rows_wrong_are_refused(packages, versions, message) -> None:
    install(packages, **versions)
    with pytest.raises(ConfigError, match="ignore where sequences begin, or compute wrong gradients") as refused:
        choose_scan(GPU, 768)
    assert message in refused.value.what
    assert refused.value.fix.startswith(f"install {message.removesuffix(' is required')}, or")


def test_a_row_whose_offsets_have_more_than_32_bits_is_refused_by_the_layer_that_would_scan_it(monkeypatch) -> None:
    model = ModelConfig(
        family="nemotron_h", layer_pattern="M", num_layers=1, hidden_size=64, num_attention_heads=4,
        scan_num_heads=8, scan_head_dim=8, scan_state_dim=16, scan_num_groups=2, tie_embeddings=False,
    )  # fmt: skip
    cpu = torch.device("cpu")
    row = to_device(pad_row(build_thd_batch([SequenceView(np.arange(20), np.ones(20, np.uint8))]), 32), cpu)
    numbers = 32 * (2 * 8 * 8 + 2 * 2 * 16 + 8)
    with runtime.start("cpu"):
        join(ParallelConfig(), 1)
        (plain,) = build_chunks(model, ParallelConfig(), vocab_size=300, device=cpu)
        monkeypatch.setattr(scan, "choose_scan", lambda *given: partial(REFERENCE))
        (kernel,) = build_chunks(model, ParallelConfig(), vocab_size=300, device=cpu)
        monkeypatch.setattr(model_checks, "_OFFSETS", numbers + 1)
        run_row(kernel, row)
        monkeypatch.setattr(model_checks, "_OFFSETS", numbers)
        run_row(plain, row)
        with pytest.raises(ConfigError, match="scan 32 tokens x 200 numbers = 6,400, and mamba-ssm"):
            run_row(kernel, row)


@pytest.mark.parametrize(
    ("bounds", "version", "is_known"),
    [("cu_seqlens=None", "0.5.0", True), ("cu_seqlens=None", "0.4.1", False), ("offsets=None", "0.6.0", False)],
)
def test_the_delta_rule_of_a_gpu_is_that_of_fla_if_it_trains_packed_rows(packages, bounds, version, is_known) -> None:
    references = scan_reference.chunk_gated_delta_rule, scan_reference.causal_conv1d
    assert choose_delta_rule(GPU) == references
    for folder, name in (("ops/gated_delta_rule", "chunk_gated_delta_rule"), ("modules/convolution", "causal_conv1d")):
        (packages / "fla" / folder).mkdir(parents=True)
        (packages / "fla" / folder / "__init__.py").write_text(f"def {name}(*tensors, {bounds}): ...\n")
    (packages / "fla" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    assert choose_delta_rule(torch.device("cpu")) == references
    if is_known:
        modules = [kernel.__module__ for kernel in choose_delta_rule(GPU)]
        assert modules == ["fla.ops.gated_delta_rule", "fla.modules.convolution"]
        return
    with pytest.raises(ConfigError, match=r"wrong gradients: flash-linear-attention >= 0\.5\.0 is required"):
        choose_delta_rule(GPU)


# Arguments of the functions of fla, by its repository's `fla/ops/gated_delta_rule/chunk.py` and
# `fla/modules/convolution.py`.
RULE = {
    *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"),
    "cu_seqlens",
}
CONVOLUTION = {
    *("x", "weight", "bias", "residual", "initial_state", "output_final_state", "activation", "backend", "cu_seqlens")
}


def test_layers_call_the_delta_rule_of_fla_with_whole_heads_and_the_bounds_of_the_row(monkeypatch) -> None:
    calls: list[tuple[str, dict[str, object]]] = []

    def recorded(kernel):
        def call(**given):
            calls.append((kernel.__name__, given))
            return kernel(**given)

        return call

    kernels = scan_reference.chunk_gated_delta_rule, scan_reference.causal_conv1d
    monkeypatch.setattr(scan, "choose_delta_rule", lambda device: [recorded(kernel) for kernel in kernels])
    sizes = {"scan_num_heads": 8, "scan_head_dim": 12, "scan_state_dim": 16, "scan_num_groups": 4, "head_dim": 16}
    model = ModelConfig(family="qwen3_5_text", layer_pattern="D", num_layers=1, dtype="bfloat16", **sizes)
    with runtime.start("cpu"):
        join(ParallelConfig(), 1)
        (chunk,) = build_chunks(model, ParallelConfig(), vocab_size=300, device=torch.device("cpu"))
        views = [SequenceView(np.arange(n + 1, dtype=np.int32), np.ones(n + 1, np.uint8)) for n in (9, 4, 6)]
        row = pad_row(build_thd_batch(views), 32)
        run_row(chunk, to_device(row, torch.device("cpu"))).sum().backward()
    (first, convolution), (second, rule) = calls
    assert (first, second) == ("causal_conv1d", "chunk_gated_delta_rule")
    assert set(convolution) <= CONVOLUTION
    assert set(rule) <= RULE
    channels = 8 * 12 + 2 * 4 * 16
    shapes = {"x": (1, 32, channels), "weight": (channels, 4)}
    assert {name: tuple(convolution[name].shape) for name in shapes} == shapes
    # A key head for each value head: the kernel has as many of both.
    shapes = {"q": (1, 32, 8, 16), "k": (1, 32, 8, 16), "v": (1, 32, 8, 12), "g": (1, 32, 8), "beta": (1, 32, 8)}
    assert {name: tuple(rule[name].shape) for name in shapes} == shapes
    dtypes = {"q": torch.bfloat16, "v": torch.bfloat16, "g": torch.float32, "beta": torch.bfloat16}
    assert {name: rule[name].dtype for name in dtypes} == dtypes
    assert all(rule[name].is_contiguous() for name in shapes)
    assert convolution["x"].is_contiguous()
    assert (rule["g"] < 0).all()
    assert rule["use_qk_l2norm_in_kernel"] is True
    # Padding at the end of the row is a sequence of its own; empty ones follow it.
    assert rule["cu_seqlens"] is convolution["cu_seqlens"]
    assert rule["cu_seqlens"].tolist() == [0, 9, 13, 19, 32, 32]
    assert rule["cu_seqlens"].dtype == torch.int64


@pytest.mark.parametrize("text", [None, "raise ImportError('damaged')"])
def test_a_folder_of_the_name_of_the_kernels_that_cannot_be_imported_is_taken_for_none(tmp_path, text) -> None:
    (tmp_path / "fla" / "models").mkdir(parents=True)
    if text is not None:
        (tmp_path / "fla" / "__init__.py").write_text(text)
    code = (
        "from harness.megatron import compat; from harness.megatron.model import scan; "
        "assert scan._delta.HAVE_FLA; print(compat.missing_kernels(delta_rule=True))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [warm_python(), "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "flash-linear-attention"), done.stderr
