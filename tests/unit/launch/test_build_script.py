"""docker/build.sh: what it asks of the engine and of Enroot, which are no more than their names here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Commands that note what they are called with."""
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


def test_an_image_for_pyxis_is_built_and_imported_where_the_caller_stands(tools: Path, tmp_path: Path) -> None:
    code, output = build(tools, "--tag", "mine:1", "--base", "base:2", "--sqsh", "mine.sqsh", "--", "--no-cache")
    assert code == 0, output
    built, imported = (tmp_path / "calls").read_text().splitlines()
    expected = "--build-arg BASE_IMAGE=base:2 --tag mine:1 --file docker/Dockerfile --no-cache ."
    assert built == f"podman build --format docker {expected}"
    assert imported == f"enroot import --output {tmp_path}/mine.sqsh podman://mine:1"


@pytest.mark.parametrize(
    ("arguments", "engine", "told"),
    [
        (["--sqsh", "there.sqsh"], "podman", "is there already"),
        (["--sqsh", "nowhere/x.sqsh"], "podman", "there is no folder"),
        (["--sqsh", "x.sqsh"], "buildah", "set ENGINE=podman"),
        (["--sqsh"], "podman", "--sqsh needs a value"),
        ([], "kaniko", "expected docker, podman or buildah"),
    ],
)
def test_what_cannot_end_well_is_refused_before_the_build(
    tools: Path, tmp_path: Path, arguments: list[str], engine: str, told: str
) -> None:
    (tmp_path / "there.sqsh").write_text("")
    code, output = build(tools, *arguments, engine=engine)
    assert (code, told in output) == (2, True), output
    assert not (tmp_path / "calls").exists()
