"""A loader's settings and plans are available where PyTorch is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "statement", ["import harness.loader", "import harness.loader.live", "from harness import Loader, LoaderConfig"]
)
def test_importing_the_loader_imports_no_torch(statement: str) -> None:
    check = f"import sys; {statement}; print([name for name in ('torch', 'megatron', 'hydra') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
