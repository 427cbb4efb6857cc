"""docker/build.sh, with stand-ins that record how the engine and Enroot are called."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of commands that record their arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("podman", "buildah", "enroot"):
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/calls\n')
        (folder / name).chmod(0o755)
    return folder


def build(tools: Path, *arguments: str, engine: str = "podman") -> tuple[int, str]:
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "ENGINE": engine}
    done = subprocess.run(
        [str(ROOT / "docker" / "build.sh"), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tools.parent,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_an_image_for_pyxis_is_built_and_written_to_the_folder_of_the_caller(tools: Path, tmp_path: Path) -> None:
    code, output = build(tools, "--tag", "mine:1", "--base", "base:2", "--sqsh", "mine.sqsh", "--", "--no-cache")
    assert code == 0, output
    built, imported = (tmp_path / "calls").read_text().splitlines()
    expected = "--build-arg BASE_IMAGE=base:2 --tag mine:1 --file docker/Dockerfile --no-cache ."
    assert built == f"podman build --format docker {expected}"
    assert imported == f"enroot import --output {tmp_path}/mine.sqsh podman://mine:1"


@pytest.mark.parametrize(
    ("arguments", "engine", "message"),
    [
        (["--sqsh", "there.sqsh"], "podman", "exists already"),
        (["--sqsh", "nowhere/x.sqsh"], "podman", "does not exist"),
        (["--sqsh", "x.sqsh"], "buildah", "set ENGINE=podman"),
        (["--sqsh"], "podman", "--sqsh needs a value"),
        ([], "kaniko", "expected docker, podman or buildah"),
    ],
)
def test_arguments_that_would_fail_later_are_refused_before_the_build(
    tools: Path, tmp_path: Path, arguments: list[str], engine: str, message: str
) -> None:
    (tmp_path / "there.sqsh").write_text("")
    code, output = build(tools, *arguments, engine=engine)
    assert (code, message in output) == (2, True), output
    assert not (tmp_path / "calls").exists()
