"""The scan of a layer is that of the installed kernels, if these know where sequences begin."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import utils

from harness.errors import ConfigError
from harness.megatron.model import delta_reference, mamba_reference
from harness.megatron.model.scan import choose_delta_rule, choose_scan

REFERENCE = mamba_reference.mamba_split_conv1d_scan_combined
GPU = torch.device("cuda")


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
        ({"mamba_ssm": "1.2.0", "causal_conv1d": "1.5.0"}, "mamba_ssm >= 2.0.0 is required"),
        ({"mamba_ssm": "2.2.4", "causal_conv1d": "1.1.0"}, "causal_conv1d >= 1.4.0 is required"),
        ({"mamba_ssm": "2.2.4"}, "causal_conv1d >= 1.4.0 is required"),
    ],
)
def test_kernels_that_would_ignore_where_sequences_begin_are_refused(packages, versions, message) -> None:
    install(packages, **versions)
    with pytest.raises(ConfigError, match="would carry the state of a sequence over to the next") as refused:
        choose_scan(GPU, 768)
    assert message in refused.value.what
    assert refused.value.fix.startswith(f"install {message.removesuffix(' is required')}, or")


@pytest.mark.parametrize("bounds", ["cu_seqlens=None", "offsets=None"])
def test_the_delta_rule_of_a_gpu_is_that_of_fla_if_it_knows_where_sequences_begin(packages, bounds) -> None:
    references = delta_reference.chunk_gated_delta_rule, delta_reference.causal_conv1d
    assert choose_delta_rule(GPU) == references
    for folder, name in (("ops/gated_delta_rule", "chunk_gated_delta_rule"), ("modules/convolution", "causal_conv1d")):
        (packages / "fla" / folder).mkdir(parents=True)
        (packages / "fla" / folder / "__init__.py").write_text(f"def {name}(*tensors, {bounds}): ...\n")
    assert choose_delta_rule(torch.device("cpu")) == references
    if "cu_seqlens" in bounds:
        assert [kernel.__module__ for kernel in choose_delta_rule(GPU)] == [
            "fla.ops.gated_delta_rule",
            "fla.modules.convolution",
        ]
        return
    with pytest.raises(ConfigError, match="would carry the state of a sequence over to the next"):
        choose_delta_rule(GPU)
