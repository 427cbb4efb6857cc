"""`harness bench gpu` runs in full on a CPU: real processes, two ranks of gloo, tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import psutil
import pytest

from harness.bench.gpu.parts import PARTS

from .conftest import ROOT, environment, run_command

pytestmark = pytest.mark.submission


@pytest.mark.timeout(900)  # fourteen starts of processes, on a machine that may be busy
@pytest.mark.nightly
def test_first_contact_runs_in_full_on_a_cpu_and_continues_after_a_kill(tmp_path) -> None:
    bench = [sys.executable, "-m", "harness", "bench", "gpu", "size=tiny", "device=cpu", f"out={tmp_path}"]
    stopped = subprocess.Popen(bench, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "links.work").exists():
        assert stopped.poll() is None
        time.sleep(0.2)
    processes = psutil.Process(stopped.pid).children(recursive=True)
    stopped.kill()
    stopped.wait()
    # A part that goes on would share its GPUs with those of the next call.
    assert psutil.wait_procs(processes, timeout=120)[1] == []
    first = (tmp_path / "environment.json").read_bytes()
    code, output = run_command(bench, timeout_s=800)
    assert code == 0, output
    assert (tmp_path / "environment.json").read_bytes() == first
    made = json.loads((tmp_path / "report.json").read_text())
    states = {name: part["status"] for name, part in made["parts"].items()}
    missing = {"attention-flash", "attention-fused", "attention-unfused", "fusions", "layouts-4", "layouts-8"}
    assert states == {name: "missing" if name in missing else "done" for name in states}
    assert set(states) == set(PARTS)
    figures = {figure["name"]: figure for figure in made["report"]["figures"]}
    # Tiny sizes have no targets of speed: these are right on any machine.
    assert [name for name, figure in figures.items() if figure["met"] is False] == []
    assert sum(figure["met"] is True for figure in figures.values()) > 20
    assert figures["attention-torch: isolation: findings"]["value"] == 0
    compared = {name for name in figures if name.endswith("losses differ from one rank's")}
    assert {
        f"layouts-2: 2 ranks, {name}: losses differ from one rank's"
        for name in ("tp2_sp", "pp2", "uneven stages", "cp2", "one sequence a row, CP2", "rows that ranks share")
    } <= compared
    assert len(figures["step-8b: our loop over a bare one, the same batch"]["samples"]) == 3
    assert 0 < figures["step-1b: MFU"]["value"] < 1
    assert sum(figure["value"] for name, figure in figures.items() if name.startswith("step-1b: time in")) == (
        pytest.approx(1)
    )
    page = (tmp_path / "report.md").read_text()
    assert "layouts-8" in page
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.suffix not in (".json", ".md", ".log")) == []
