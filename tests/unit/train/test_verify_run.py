"""Verification of a run's folder lists everything that is wrong with it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_metrics import metrics
from typer.testing import CliRunner

from harness.cli.app import app
from harness.loader import LoaderState
from harness.plan import SftConfig
from harness.settings import to_plain, to_yaml
from harness.storage.checksums import digest_files, write_checksums
from harness.train import Progress
from harness.train.checkpoints import begin_attempt, write_run_file
from harness.train.digests import RowDigests, StepDigests, to_json
from harness.train.verify import find_run_check, verify_checkpoint, verify_run

YAML = to_yaml(SftConfig())


def line(step: int, **changes: Any) -> str:
    return json.dumps(asdict(metrics(step, **{"tokens": 3, **changes}))) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four steps, with a checkpoint of steps 2 and 4 and an exported model."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(SftConfig()))
    (folder / "metrics.jsonl").write_text("".join(line(step) for step in (1, 2, 3, 4)))
    for step in (2, 4):
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_bytes(bytes(100))
        facts = {"settings": to_plain(SftConfig())} if step == 4 else {}
        write_run_file(checkpoint, Progress(step, LoaderState(0)), facts, [], ["weights"])
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(bytes(50))
    write_checksums(folder / "model", digest_files(folder / "model", ["model.safetensors"]))
    return folder


def found(run: Path) -> list[str]:
    return [problem.what for problem in verify_run(run)]


@pytest.mark.parametrize(
    ("damage", "problems"),
    [
        ("true", []),
        ("rm */checksums.json", ["the checkpoint's checksums.json is missing"] * 2),
        ("rm step-00000004/run.json", ["the file run.json is missing"]),
        ("mv step-00000002 step-00000003", ["the folder step-00000003 contains step 2"]),
    ],
)
def test_problems_of_checkpoints_are_named(run: Path, damage: str, problems: list[str]) -> None:
    subprocess.run(damage, shell=True, cwd=run / "checkpoints", check=True)
    assert [what.partition(",")[0] for what in found(run)] == problems


def test_a_damaged_identity_is_named(run: Path) -> None:
    begin_attempt(run)
    assert found(run) == []
    (run / "identity.json").write_text("{")
    (what,) = found(run)
    assert "the run's identity cannot be read" in what


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(1), line(2), line(4)], "the metrics of step 2 are followed by those of step 4"),
        ([line(1), line(2), line(2), line(3), line(4)], "the metrics of step 2 are followed by those of step 2"),
        ([line(1), line(2, loss=None), line(3), line(4)], "step 2 has a number that is not finite"),
        ([line(1), line(2, experts={"load": None}), line(3), line(4)], "step 2 has a number that is not finite"),
        ([line(1), line(2, loss=[]), line(3), line(4)], "not a record of a step's metrics: loss is '[]', not of type"),
        ([line(1), line(2), line(3), line(4), '{"step": 5'], "not a record of a step's metrics: "),
        ([line(1), line(2), line(3)], "the metrics end at step 3, but there is a checkpoint of step 4"),
    ],
)
def test_metrics_are_steps_without_gaps_and_numbers_that_are_finite(run: Path, lines: list[str], message: str) -> None:
    (run / "metrics.jsonl").write_text("".join(lines))
    (what,) = found(run)
    assert what.startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "the run's settings are missing"),
        ("model: [", "the run's settings cannot be read"),
        ("model: {}\n", "the run's settings lack data, loader, optimizer, parallel, trainer"),
        (YAML.replace("num_layers", "num_layerr"), "the run's settings are damaged, or of another version: there is"),
        (YAML.replace("eps: 1.0e-08", "eps: tiny"), "the run's settings are damaged, or of another"),
        (YAML.replace("blend: []", "blend: [{path: 3}]"), "the run's settings are damaged, or of another"),
        (YAML.replace("parallel:", "parallel: 5\n#", 1), "the run's settings cannot be read"),
        *((YAML + f"more: {text}\n", "the run's settings cannot be read") for text in ("!!bool x", "!!int ''")),
        (YAML + "more: !!timestamp x\n", "the run's settings cannot be read"),
        (YAML.replace("num_layers: 4", "num_layers: 5"), "the run's settings differ from those of step-00000004"),
    ],
)
def test_settings_are_there_and_readable(run: Path, text: str | None, message: str) -> None:
    (run / "config.yaml").unlink()
    if text is not None:
        (run / "config.yaml").write_text(text)
    (what,) = found(run)
    assert what.startswith(message)


def test_a_checkpoint_may_be_of_settings_before_the_newest_or_of_a_version_with_fewer_or_more(run: Path) -> None:
    (run / "config.before-1.yaml").write_text(YAML)
    other = YAML.replace("lr: 0.002", "lr: 0.001").replace("  num_workers: 2\n", "")
    (run / "config.yaml").write_text(other.replace("trainer:\n", "trainer:\n  local_checkpoints: /scratch\n"))
    assert found(run) == []


def digests(step: int, *, tokens: int = 3, **changes: Any) -> str:
    row = RowDigests(0, 0, np.array([step]), np.array([tokens]), np.full((1, 4), step, np.uint64), {})
    return json.dumps({**to_json(StepDigests(step, 0, [step], [row], [])), **changes}) + "\n"


def answer(step: int, **changes: Any) -> str:
    values = {"step": step, "prompt": "two lines\u2028", "answer": "yes", "tokens": [5, 7]}
    return json.dumps({**values, **changes}, ensure_ascii=False) + "\n"


def test_digests_and_samples_of_a_whole_run_have_no_problems(run: Path) -> None:
    # A run may begin to record digests when it is resumed.
    (run / "digests.jsonl").write_text("".join(map(digests, (3, 4))))
    (run / "samples.jsonl").write_text(answer(2) + answer(2) + answer(4))
    assert found(run) == []


@pytest.mark.parametrize(
    ("file", "lines", "message"),
    [
        ("digests", [digests(2), digests(4)], "the digests of step 2 are followed by those of step 4"),
        ("digests", [digests(1), digests(2)], "the digests end at step 2, but the metrics at step 4"),
        ("digests", [digests(4), digests(5)], "there are no metrics of step 5"),
        ("digests", [digests(4, digest="0" * 32)], "not a record of a step's digests: the digest of step 4"),
        ("digests", [digests(4, tokens=2)], "step 4 has epoch 0 and 2 tokens in its digests, but epoch 0 and 3 tokens"),
        ("digests", [digests(4, disagreements=["rank 1 differs"])], "step 4: rank 1 differs"),
        ("samples", [answer(5)], "there are no metrics of step 5"),
        ("samples", [answer(2, tokens=["a"])], "not a record of a step's sample answers: tokens[] is 'a'"),
    ],
)
def test_digests_and_answers_agree_with_the_metrics(run: Path, file: str, lines: list[str], message: str) -> None:
    (run / f"{file}.jsonl").write_text("".join(lines))
    assert found(run)[0].startswith(message)


def test_everything_that_is_wrong_is_listed(run: Path) -> None:
    (run / "checkpoints/step-00000002/weights").write_bytes(bytes(99) + b"\x01")
    (run / "checkpoints/step-00000004/weights").write_bytes(bytes(99))
    (run / "model/model.safetensors").unlink()
    (run / "model/more").write_text("")
    (run / "metrics.jsonl").unlink()
    assert [what.partition(" has the hash")[0] for what in found(run)] == [
        "the run's metrics are missing",
        "the file weights",
        "the file weights has 99 bytes, expected 100 bytes",
        "the file model.safetensors is missing, expected 50 bytes",
        "the file more is not in checksums.json",
    ]


def test_the_path_decides_what_is_checked(run: Path) -> None:
    assert find_run_check(str(run)) is verify_run
    assert find_run_check(str(run / "checkpoints/step-00000002")) is verify_checkpoint
    assert find_run_check(str(run.parent)) is None


def test_the_command_prints_the_problems_and_ends_with_exit_code_1(run: Path) -> None:
    whole = CliRunner().invoke(app, ["verify", str(run)])
    assert (whole.exit_code, whole.stdout) == (0, f"{run}: nothing wrong\n")
    (run / "checkpoints/step-00000002/weights").write_bytes(bytes(99) + b"\x01")
    damaged = CliRunner().invoke(app, ["verify", str(run)])
    assert damaged.exit_code == 1
    assert "the file weights has the hash" in damaged.stdout
    assert damaged.stdout.endswith(f"1 problem in {run}\n")
