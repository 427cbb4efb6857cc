"""Runs train unpacked conversations as plain transformers and PyTorch's AdamW do, and a fault of all runs is named."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from harness.recipes.parity import ParityConfig
from parity_reports import read_report
from small_packs import write_small_packs

from harness.config import compose_config
from harness.parity import Tolerances
from harness.parity.reference import make_model, train_reference
from harness.parity.result import REPORT_FILE
from harness.plan import FAMILIES, SftConfig
from harness.recipes import sft

from .conftest import overrides_of, read_metrics, run_command, run_here

STEPS = (
    *("trainer.steps=4", "optimizer.lr=2e-3", "optimizer.decay_steps=4", "optimizer.warmup_steps=1"),
    "optimizer.weight_decay=0.1",
)
# The others in the nightly tests, and on each edit the first alone.
FAMILIES_HERE = ("qwen2", "deepseek_v3", "gpt_oss", "nemotron_h", "qwen3_next")
BY_CONVERSATION = "trainer.loss_average=conversation"
ALIKE = Tolerances()
REFERENCES = ("by_conversation", "by_weight")


def mean_of_each_row(
    mask: torch.Tensor, divisor: torch.Tensor, losses: torch.Tensor, **_sources: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `sum_loss` returns, with a loss that is normalized by its own row, as many trainers have it."""
    total, tokens = (losses.float() * mask).sum(), mask.sum()
    report = torch.stack((total.detach().double(), tokens.double(), tokens.double()))
    return total / tokens.clamp(min=1), torch.ones((), dtype=torch.int), report


def model_of(family: str, place: Path) -> list[str]:
    """Return the settings of a run that begins with the small model of a family, made once."""
    models = compose_config("parity", ParityConfig, []).models
    return make_model(family, models[family], place / "models" / family)


@pytest.fixture(scope="module")
def plain(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for references, with a dataset of weights."""
    place = tmp_path_factory.mktemp("plain")
    write_small_packs(place / "data", is_weighted=True)
    return place


def reference_in(plain: Path, name: str, dataset: Path) -> Path:
    """Return the folder of the reference of a family, or of a way to count, which is trained once."""
    if not (plain / name).exists():
        more = [BY_CONVERSATION] if name == "by_conversation" else []
        model = model_of("qwen2" if name in REFERENCES else name, plain)
        settings = overrides_of(dataset, plain / name, *model, *STEPS, *more)
        assert train_reference(compose_config("sft", SftConfig, settings)) == 0
    return plain / name


def differences(
    plain: Path, family: str, dataset: Path, run: Path, *more: str, reference: str = ""
) -> dict[str, float]:
    """Return the largest relative difference of a run's losses and gradient norms from those of the reference.

    Args:
        reference: name of its folder; empty for that of the family.
    """
    model = model_of(family, plain)
    run_here(sft, SftConfig, overrides_of(dataset, run, *model, *STEPS, *more))
    made = reference_in(plain, reference or family, dataset)
    expected, found = read_metrics(made), read_metrics(run)
    assert [line["learning_rate"] for line in found] == pytest.approx([line["learning_rate"] for line in expected])
    assert [line["trained_tokens"] for line in found] == [line["trained_tokens"] for line in expected]
    return of_runs(made, run)


def of_runs(expected: Path, found: Path) -> dict[str, float]:
    lines, worst = [read_metrics(run) for run in (expected, found)], {}
    for name in ("loss", "grad_norm", "validation_loss"):
        right, wrong = (np.asarray([line[name] for line in run if line[name] is not None]) for run in lines)
        worst[name] = float(abs(right - wrong).max() / right.min())
    return worst


@pytest.mark.parametrize(
    "family", [FAMILIES_HERE[0], *(pytest.param(name, marks=pytest.mark.submission) for name in FAMILIES_HERE[1:])]
)
def test_a_family_trains_as_plain_transformers_do_on_unpacked_conversations(plain, family, dataset, tmp_path) -> None:
    found = differences(plain, family, dataset, tmp_path / "run")
    assert found["loss"] <= ALIKE.loss
    assert found["grad_norm"] <= ALIKE.grad_norm


# Of each reference and schedule one; all pairs at night.
@pytest.mark.parametrize(
    ("schedule", "reference"),
    [
        pytest.param(*pair, marks=() if number in (0, 3, 4) else pytest.mark.nightly)
        for number, pair in enumerate(product(("as_packed", "dp_balanced", "cost_balanced"), REFERENCES))
    ],
)
def test_conversations_and_weights_count_as_in_plain_pytorch_under_every_schedule(
    plain, schedule, reference, dataset, tmp_path
) -> None:
    data, more = (dataset, [BY_CONVERSATION]) if reference == "by_conversation" else (plain / "data", [])
    found = differences(plain, "qwen2", data, tmp_path / "run", f"schedule={schedule}", *more, reference=reference)
    assert max(found.values()) <= 1e-6
    # A mean over tokens, all of one weight, is another loss.
    by_token = reference_in(plain, "qwen2", dataset)
    assert min(of_runs(plain / reference, by_token).values()) > 1e-4


@pytest.mark.parametrize(
    ("fault", "more"),
    [
        (mock.patch("harness.megatron.step.sum_loss", mean_of_each_row), ()),
        (nullcontext(), ("optimizer.weight_decay=0.11",)),
        (nullcontext(), ("optimizer.clip_grad=0",)),
    ],
    ids=["normalized by row", "weight decay", "clipping"],
)
def test_a_fault_that_every_layout_shares_is_a_difference(plain, dataset, tmp_path, fault, more) -> None:
    with fault:
        found = differences(plain, "qwen2", dataset, tmp_path / "run", *more)
    assert found["loss"] > ALIKE.loss


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_family_is_the_same_in_the_report(tmp_path) -> None:
    command = [sys.executable, "-m", "harness.recipes.parity", "check=reference", f"folder={tmp_path}"]
    code, output = run_command(command, timeout_s=3000)
    assert code == 0, output
    cells = read_report(tmp_path / REPORT_FILE).cells
    compared = [cell.name for cell in cells if cell.reference is not None]
    assert compared == [f"reference {family}: data" for family in FAMILIES]


def test_a_small_model_is_made_again_in_other_sizes_alone(tmp_path) -> None:
    made = tmp_path / "model.safetensors"
    first = make_model("qwen2", {}, tmp_path)
    written = made.stat().st_mtime_ns
    assert make_model("qwen2", {}, tmp_path) == first
    assert made.stat().st_mtime_ns == written
    assert "model.hidden_size=16" in make_model("qwen2", {"hidden_size": 16}, tmp_path)
