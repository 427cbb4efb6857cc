"""Check that the image works: imports, versions as JSON, and one training step of the tiny model on the CPU.

smoke.py            run every check; the last step of the build
smoke.py --quick    check imports and shared memory only; the health check of the container
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGES = (
    *("torch", "megatron-core", "transformer-engine", "pyarrow", "hydra-core", "numpy", "megatron-sft-harness"),
    *("mamba-ssm", "causal-conv1d", "flash-linear-attention"),
)
MODULES = (
    "torch",
    "pyarrow",
    "hydra",
    "harness.formats",
    "harness.megatron.step",
    "harness.recipes.sft",
    "harness.recipes.parity",
)
# Workers pass batches through shared memory; Docker's default of 64 MB causes a bus error.
MIN_SHM_BYTES = 1 << 30


def read_versions() -> dict[str, str | None]:
    """Return the versions of the packages that a run depends on; None for a package that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def train_one_step() -> float:
    """Return the loss of one step of `recipes.sft` on a small dataset."""
    from harness.recipes.parity import make_dataset
    from harness.recipes.sft import main

    from harness.config import compose_config
    from harness.plan import SftConfig

    with tempfile.TemporaryDirectory() as folder:
        data, run = make_dataset(Path(folder) / "data"), Path(folder) / "run"
        settings = ["trainer.steps=1", "trainer.device=cpu", "trainer.eval_batches=1", "loader.num_workers=0"]
        main(compose_config("sft", SftConfig, [f"data.path={data}", f"run_dir={run}", *settings]))
        step = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    return float(step["loss"])


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    quick = "--quick" in sys.argv[1:]
    shm_bytes = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    # The /dev/shm of a build is small and does not matter; only a running container has the one that does.
    if quick and shm_bytes < MIN_SHM_BYTES:
        sys.exit(
            f"/dev/shm has {shm_bytes >> 20} MiB, workers need {MIN_SHM_BYTES >> 20}: start with a larger --shm-size"
        )
    report: dict[str, object] = {"versions": read_versions(), "shm_mib": shm_bytes >> 20}
    if not quick:
        report["loss_of_one_step"] = train_one_step()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
