"""Environments of trainers that do not share the packages of this project, kept outside the checkout.

    python tests/integrations/environments.py            # makes all that are missing or out of date
    python tests/integrations/environments.py torchtitan

They lie in `$VERSIONS_DIR`, by default `~/.cache/megatron-sft-harness`, as those of `make test-versions` do. The code
of the harness is not installed there: tests run it from the checkout.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The build of this machine: PyPI's newest brings CUDA, which takes gigabytes.
TORCH = f"torch=={version('torch')}"
# What the harness itself needs to read data.
OURS = ("numpy>=1.26", "pyarrow>=17", "xxhash>=3.4", "typer>=0.12", "rich>=13", "pyyaml>=6", "hydra-core>=1.3,<1.4")


@dataclass(frozen=True)
class Environment:
    """An environment of its own.

    Attributes:
        name: of the integration, and of the folder.
        packages: installed with what they need.
        alone: installed without what they need.
    """

    name: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-sft-harness"
        return Path(os.environ.get("VERSIONS_DIR") or cache) / f"integration-{self.name}"

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def command(self) -> str:
        return f"python {Path(__file__).relative_to(ROOT)} {self.name}"

    @property
    def is_made(self) -> bool:
        stamp = self.folder / "installed"
        return stamp.is_file() and stamp.read_text() == self._digest()

    def make(self) -> None:
        """Install everything into a new folder; an environment that is up to date stays."""
        if self.is_made:
            return
        venv.create(self.folder, with_pip=True, clear=True)
        self._pip(*self.packages)
        if self.alone:
            self._pip("--no-deps", *self.alone)
        # Written last, so that an interrupted installation starts again.
        (self.folder / "installed").write_text(self._digest())

    def _pip(self, *arguments: str) -> None:
        subprocess.run([self.python, "-m", "pip", "install", "--quiet", *arguments], check=True)

    def _digest(self) -> str:
        text = repr((self.packages, self.alone, sys.version_info[:2]))
        return hashlib.sha256(text.encode()).hexdigest()


ENVIRONMENTS = {
    one.name: one
    for one in (
        # Bridge requires packages that only a machine with CUDA installs, and what its data path needs is less.
        Environment(
            "megatron_bridge",
            (
                *(TORCH, "megatron-core==0.16.1", "transformers<5", "datasets", "accelerate", "omegaconf", "psutil"),
                *("tensorboard", "six", "regex", "tqdm", "safetensors", "jinja2", "pillow", "einops", *OURS),
            ),
            alone=("megatron-bridge==0.3.1",),
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
