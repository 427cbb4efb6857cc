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
        script = f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/calls\n'
        script += (
            'case "$1 $2" in "image inspect") echo 12345678901 ;; "import --output") echo squashed >"$3" ;; esac\n'
        )
        (folder / name).write_text(script)
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
    built, _, imported = (tmp_path / "calls").read_text().splitlines()
    expected = "--build-arg BASE_IMAGE=base:2 --tag mine:1 --file docker/Dockerfile --no-cache ."
    assert built == f"podman build --format docker {expected}"
    assert imported == f"enroot import --output {tmp_path}/mine.sqsh podman://mine:1"
    assert "built mine:1 on base:2, 13GB" in output
    assert "warning: base:2 is not pinned" in output
    checked = subprocess.run(
        ["sha256sum", "--check", "mine.sqsh.sha256"], cwd=tmp_path, capture_output=True, check=False
    )
    assert checked.returncode == 0


def test_a_base_of_a_digest_is_built_on_by_its_digest(tools: Path, tmp_path: Path) -> None:
    digest = f"sha256:{'0a' * 32}"
    (tmp_path / "docker").mkdir()
    for name in ("build.sh", "versions.env"):
        (tmp_path / "docker" / name).write_text((ROOT / "docker" / name).read_text())
    settings = tmp_path / "docker" / "versions.env"
    settings.write_text(settings.read_text().replace("BASE_DIGEST=\n", f"BASE_DIGEST={digest}\n"))
    script = ["bash", str(tmp_path / "docker" / "build.sh")]
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "ENGINE": "podman"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"BASE_IMAGE=nvcr.io/nvidia/pytorch@{digest} " in (tmp_path / "calls").read_text()
    subprocess.run([*script, "--base", "local:5000/mine:1"], env=environment, capture_output=True, check=True)
    assert "BASE_IMAGE=local:5000/mine:1 " in (tmp_path / "calls").read_text()


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
def test_arguments_that_would_fail_later_are_refused_before_the_build(tools, tmp_path, arguments, engine, message):
    (tmp_path / "there.sqsh").write_text("")
    code, output = build(tools, *arguments, engine=engine)
    assert (code, message in output) == (2, True), output
    assert not (tmp_path / "calls").exists()
