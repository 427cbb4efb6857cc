"""Cost in a fresh process: `python -m harness.bench.probe NAME ARGUMENT...` measures and prints JSON.

Everything is imported before the measuring begins, so that the figures are those of the data alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
from harness.errors import HarnessError
from harness.printing import print_text

_TIMEOUT_S = 1800.0


def measure_apart(probe: str, *arguments: str, module: str = "harness.bench.probe") -> dict[str, Any]:
    """Run a probe of a module in a process of its own, and return what it measured.

    Raises:
        HarnessError: the probe failed; the error has its output.
    """
    root = str(Path(harness.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", module, probe, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise HarnessError(
            f"measuring {probe} in a process of its own failed: {done.stderr.strip()[-2000:]}",
            where=" ".join(arguments),
            fix=f"run `python -m {module}` with these arguments to see it alone",
        )
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _probe_first_batch(path: str, workers: str, global_batch: str, max_tokens_per_rank: str) -> dict[str, float]:
    """Open a dataset and build the first batch, in a process that has PyTorch already, as a training process has."""
    import torch.utils.data  # noqa: F401

    from harness.formats import FORMATS, load_format, open_dataset
    from harness.loader import Loader, LoaderConfig
    from harness.schedule import ScheduleConfig

    for name in FORMATS:
        load_format(name)
    config = LoaderConfig(num_workers=int(workers), global_batch_size=int(global_batch))
    start = time.perf_counter()
    reader = open_dataset(path)
    with Loader(reader, config, schedule=ScheduleConfig(max_tokens_per_rank=int(max_tokens_per_rank))) as loader:
        next(iter(loader))
        return {"seconds": time.perf_counter() - start, "packs": len(reader)}


if __name__ == "__main__":
    print_text(json.dumps(globals()[f"_probe_{sys.argv[1]}"](*sys.argv[2:])))
