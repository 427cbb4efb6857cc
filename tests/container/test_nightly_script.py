"""The nightly script with an image: its Python runs in a container, by a stand-in that records how Slurm is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..distributed.conftest import run_command

TEST = "tests/unit/schedule/test_as_packed.py"


@pytest.mark.parametrize("role", ["start", "part"])
def test_every_python_of_a_night_runs_in_the_image_with_nothing_to_read(tmp_path: Path, role: str) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/submitted; echo 7\n')
    (tools / "srun").write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls; echo "{TEST}::test_x"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    night = tmp_path / "night"
    for folder in (night, night / "part-0"):
        folder.mkdir()
    (night / "tests.txt").write_text(f"{TEST}::test_x\n")
    (night / "part-0.code").write_text("0\n")
    variables = {"NIGHTLY_ROLE": role, "NIGHTLY_FOLDER": str(night), "NIGHTLY_DIR": str(tmp_path / "nights")}
    variables |= {
        "NIGHTLY_PARTS": "1",
        "NIGHTLY_IMAGE": "/i.sqsh",
        "NIGHTLY_MOUNTS": "/a:/b",
        "SLURM_ARRAY_TASK_ID": "0",
    }
    variables |= {"PATH": f"{tools}:/usr/bin:/bin", "PYTHON": "none", "SLURM_CPUS_PER_TASK": "2"}
    words = ["env", *(f"{name}={value}" for name, value in variables.items()), "bash", "slurm/nightly.sbatch"]
    code, output = run_command(words)
    assert code == 0, output
    (call,) = (tmp_path / "calls").read_text().splitlines()
    shown = f"{tmp_path}/nights/" if role == "start" else f"{night}:{night},/a:/b python3"
    assert "--cpus-per-task=2 --input=none --container-image=/i.sqsh --container-workdir=/opt/harness" in call
    assert shown in call
    assert " python3 -m pytest -n 0 -m nightly " in call
