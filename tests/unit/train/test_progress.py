"""A run's log has every figure on every line, and only a terminal gets a bar."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from step_metrics import metrics

from harness.train.metrics import StepMetrics
from harness.train.progress import RunProgress

ROOT = Path(__file__).resolve().parents[3]
FIGURES = re.compile(r"lr 1\.00e-03, grad norm 1\.5, 500 tokens/s, about \d+ s left$")
SHOW = """
from harness.train.progress import RunProgress
from tests.samples.step_metrics import metrics
with RunProgress(24, quiet={quiet}) as progress:
    for step in range(1, 25):
        progress.step(metrics(step, validation_loss=2.5 if step == 12 else None))
    progress.log("[/INST] stays as it is")
"""


def printed(capsys: pytest.CaptureFixture[str], *steps: StepMetrics, done: int = 0) -> list[str]:
    with RunProgress(24, done=done) as progress:
        for step in steps:
            progress.step(step)
    return capsys.readouterr().out.splitlines()


def test_every_line_has_rate_norm_speed_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(
        capsys, metrics(1), metrics(2), metrics(3), metrics(4, validation_loss=2.25), metrics(5, validation_loss=None)
    )
    assert [line.partition(", lr")[0] for line in lines] == [
        "step 1 of 24: loss 2.0000",
        "step 2 of 24: loss 2.0000",
        "step 4: loss 2.0000, validation loss 2.2500",
    ]
    assert all(FIGURES.search(line) for line in lines)


def test_a_run_of_unknown_length_ends_with_the_line_of_its_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(None) as progress:
        for step in range(1, 23):
            progress.step(metrics(step, validation_loss=None))
        progress.log_last_step()
        progress.log_last_step()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 20", "step 22"]


def test_the_time_left_counts_the_steps_of_this_part_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 10.0])
    monkeypatch.setattr("harness.train.progress.time.perf_counter", lambda: next(now))
    progress = RunProgress(24, done=19)
    progress.step(metrics(20))
    assert capsys.readouterr().out.endswith("about 40 s left\n")


def show(*, quiet: bool = False, terminal: bool = True, **environment: str) -> str:
    """Return what a run prints into a terminal of 80 columns, or into a file."""
    command = [sys.executable, "-c", SHOW.format(quiet=quiet)]
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env = {**inherited, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "80", **environment}
    if not terminal:
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ours, theirs = pty.openpty()
    output = b""
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=theirs) as process:
        os.close(theirs)
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            output += piece
    os.close(ours)
    assert process.returncode == 0
    return output.decode()


def test_a_terminal_has_a_bar_below_the_same_lines() -> None:
    output = show()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    assert "━" in plain
    assert "24/24" in plain
    assert re.search(
        r"step 12: loss 2\.0000, validation loss 2\.5000, lr 1\.00e-03, grad norm 1\.5, 500 tokens/s", plain
    )
    bars = [line for line in re.split(r"[\r\n]+", plain) if "━" in line]
    assert max(map(len, bars)) <= 80
    assert all("left" in line and "tokens/s" in line for line in bars if "24/24" in line)


def test_a_log_file_and_a_dumb_terminal_have_plain_lines_alone() -> None:
    lines = show(terminal=False, FORCE_COLOR="1", TTY_COMPATIBLE="1", CLICOLOR_FORCE="1").splitlines()
    assert len(lines) == 14
    assert lines[-1] == "[/INST] stays as it is"
    assert all(FIGURES.search(line) for line in lines[:-1])
    assert not any("\x1b" in line or "━" in line for line in lines)
    assert "━" not in show(TERM="dumb")
    assert show(quiet=True) == ""  # ranks other than the first


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_on_a_full_disk_is_reported_once_and_the_run_continues() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", SHOW.format(quiet=False) + "print('trained')"],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
    assert ended.stderr == "standard output cannot be written (No space left on device); training continues\n"
    assert ended.returncode == 0
