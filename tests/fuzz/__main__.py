"""`python -m tests.fuzz [TARGET]... [runs=N] [seconds=N]`: feed parsers what atheris makes of their own files.

Each target runs in a process of its own, with a limit of memory and of time for one input. An input that is not
answered by our own error is written to `build/fuzz/`, and belongs into the list of `test_fuzz.py` once it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "samples"))

from tests.fuzz.targets import TARGETS

RUNS = 6000
_INPUT_BYTES = 8192
_INPUT_S = 30
_MEMORY_MB = 3072


def fuzz(name: str, runs: int, kept: Path, seconds: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a target in a process of its own; a code other than 0 means that an input in `kept` is not answered.

    Args:
        seconds: ends the search earlier; 0 for no limit.
    """
    kept.mkdir(parents=True, exist_ok=True)
    options = [f"_only={name}", f"runs={runs}", f"seconds={seconds}", f"kept={kept}"]
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", *options]
    # Arrow's threads and pools would take memory from the limit.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def _fuzz_here(name: str, runs: int, kept: str, seconds: int) -> None:
    import atheris

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        # Instrumented are the modules that the parsers consist of, which are imported a second time.
        for module in [module for module in sys.modules if module.startswith(("harness", "tests.fuzz"))]:
            del sys.modules[module]
        with atheris.instrument_imports(include=["harness"]):
            from tests.fuzz.targets import TARGETS

            target = TARGETS[name](folder / "files")
        corpus = folder / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(target.seeds):
            (corpus / str(number)).write_bytes(seed)
            target.try_one(seed)
        limits = [f"-rss_limit_mb={_MEMORY_MB}", f"-timeout={_INPUT_S}", f"-max_len={_INPUT_BYTES}"]
        options = [f"-runs={runs}", f"-max_total_time={seconds}", "-seed=1", f"-artifact_prefix={kept}/{name}-"]
        atheris.Setup([sys.argv[0], *limits, *options, "-print_final_stats=1", str(corpus)], target.try_one_quietly)
        atheris.Fuzz()


def main(arguments: Sequence[str]) -> None:
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    runs, seconds = int(options.get("runs", RUNS)), int(options.get("seconds", 0))
    if "_only" in options:
        _fuzz_here(options["_only"], runs, options["kept"], seconds)
        return
    names = [argument for argument in arguments if "=" not in argument]
    if unknown := [name for name in names if name not in TARGETS]:
        print(f"{(__doc__ or '').splitlines()[0]}\ntargets: {', '.join(TARGETS)}")
        sys.exit(0 if unknown[0] in ("-h", "--help") else f"there is no target {unknown[0]}")
    failed = []
    for name in names or TARGETS:
        ended = fuzz(name, runs, Path("build/fuzz"), seconds)
        lines = ended.stderr.splitlines()
        done = next((int(line.split()[1]) for line in lines if line.startswith("stat::number_of_executed")), runs)
        print(f"{name}: {'nothing found' if ended.returncode == 0 else 'FAILED'} in {done:,} runs", flush=True)
        if ended.returncode:
            failed.append(name)
            print("\n".join(lines[-30:]))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
