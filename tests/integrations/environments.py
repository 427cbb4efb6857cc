"""Environments of trainers that do not share the packages of this project, kept outside the checkout.

    python tests/integrations/environments.py            # makes all that are missing or out of date
    python tests/integrations/environments.py torchtitan

They lie in `$VERSIONS_DIR`, by default `~/.cache/megatron-sft-harness`, as those of `make test-versions` do. The code
of the harness is not installed there: tests run it from the checkout.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import venv
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The build of this machine: PyPI's newest brings CUDA, which takes gigabytes.
TORCH = f"torch=={version('torch')}"
# Trainers with a release in most weeks, and the one of each that this repository is written for: nowhere else.
PEERS = {"megatron-bridge": "0.6.2", "ms-swift": "4.6.0", "trl": "1.16.0", "nemo-automodel": "0.7.0"}
# What the harness itself needs to read data.
OURS = ("numpy>=1.26", "pyarrow>=17", "xxhash>=3.4", "typer>=0.12", "rich>=13", "pyyaml>=6", "hydra-core>=1.3,<1.4")


@dataclass(frozen=True)
class Environment:
    """An environment of its own.

    Attributes:
        name: of the integration, and of the folder.
        packages: installed with what they need.
        alone: installed without what they need.
        newer: with Python 3.12, next to the packages of the environment of `.ci/versions`, which it can replace.
        peer: requirement of another release of a trainer, whose own requirements replace the pins of `packages`.
    """

    name: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()
    newer: bool = False
    peer: str = ""

    @property
    def folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-sft-harness"
        return Path(os.environ.get("VERSIONS_DIR") or cache) / f"integration-{self.name}"

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def command(self) -> str:
        if self.name.startswith("scoreboard-"):
            return f"python -m tests.scoreboard.environments {self.name.removeprefix('scoreboard-')}"
        return f"python {Path(__file__).relative_to(ROOT)} {self.name}"

    @property
    def is_made(self) -> bool:
        stamp = self.folder / "installed"
        below = [Path(path.read_text().strip()) for path in self.folder.glob("lib/python*/site-packages/below.pth")]
        is_whole = len(below) == self.newer and all(path.is_dir() for path in below)
        return stamp.is_file() and stamp.read_text() == self._digest() and is_whole

    def with_release(self, peer: str, release: str) -> Environment:
        """Return an environment with another release of a peer."""
        wanted = f"{peer}=={release}"
        others = [[one for one in group if not one.startswith(f"{peer}==")] for group in (self.packages, self.alone)]
        names = [one if one == TORCH else re.split(r"[=<>!]", one)[0] for one in others[0]]
        if len(others[0]) < len(self.packages):  # the peer comes with what it needs
            names.append(wanted)
        return replace(self, name=f"newest-{peer}", packages=tuple(names), alone=tuple(others[1]), peer=wanted)

    def make(self) -> None:
        """Install everything into a new folder; an environment that is up to date stays."""
        if self.is_made:
            return
        if self.newer:
            found = subprocess.run([ROOT / ".ci/versions"], stdout=subprocess.PIPE, text=True, check=False)
            if found.returncode == 3:
                return  # no Python 3.12 here, says the program; tests are skipped
            found.check_returncode()
            base = Path(found.stdout.strip())
            subprocess.run([base, "-m", "venv", "--clear", self.folder], check=True)
            (packages,) = self.folder.glob("lib/python*/site-packages")
            below = base.parents[1] / packages.relative_to(self.folder)
            (packages / "below.pth").write_text(f"{below}\n")
        else:
            venv.create(self.folder, with_pip=True, clear=True)
        limits: list[str] = []
        if self.peer:
            self._pip("--no-deps", self.peer)
            limits = ["--constraint", self._write_limits()]
        self._pip(*self.packages, *limits)
        if self.alone:
            self._pip("--no-deps", *self.alone)
        # Written last, so that an interrupted installation starts again.
        (self.folder / "installed").write_text(self._digest())

    def _write_limits(self) -> str:
        """Write what the peer requires, which pip takes without extras, and return the path."""
        name = self.peer.partition("==")[0]
        program = f"import importlib.metadata as m; print(*(m.requires({name!r}) or []), sep='\\n')"
        lines = subprocess.check_output([self.python, "-c", program], text=True).splitlines()
        limits = self.folder / "limits.txt"
        limits.write_text("\n".join(re.sub(r"\[.*?\]", "", one) for one in lines if "extra ==" not in one))
        return str(limits)

    def _pip(self, *arguments: str) -> None:
        subprocess.run([self.python, "-m", "pip", "install", "--quiet", *arguments], check=True)

    def _digest(self) -> str:
        python = self.newer or sys.version_info[:2]
        text = repr((self.packages, self.alone, python) + ((self.peer,) if self.peer else ()))
        return hashlib.sha256(text.encode()).hexdigest()


ENVIRONMENTS = {
    one.name: one
    for one in (
        # Bridge requires packages that only a machine with CUDA installs, and what its data path needs is less.
        Environment(
            "megatron_bridge",
            ("transformers>=5.8,<=5.12.1", "einops", "diffusers>=0.36"),
            alone=(f"megatron-bridge=={PEERS['megatron-bridge']}",),
            newer=True,
        ),
        Environment("torchtitan", (TORCH, "torchtitan==0.3.0", *OURS)),
    )
}


if __name__ == "__main__":
    for name in sys.argv[1:] or ENVIRONMENTS:
        if name not in ENVIRONMENTS:
            sys.exit(f"there is no environment {name!r}; choose one of {', '.join(ENVIRONMENTS)}")
        print(f"{name}: {ENVIRONMENTS[name].folder}", flush=True)
        ENVIRONMENTS[name].make()
