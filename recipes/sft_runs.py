"""Several runs of `recipes.sft`, one after another in the same processes, which take seconds to start.

    torchrun --nproc-per-node 4 -m recipes.sft_runs RUNS.json

The file is a list of [port, overrides, folder, start]: the ranks of a run meet at its port; the run's folder is first
copied from `start`, unless that is null.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from harness.config import compose_config
from harness.errors import exit_on_error
from harness.plan import SftConfig
from recipes.sft import main

if __name__ == "__main__":
    # The launcher's store remembers the run before; each meets at a port of its own.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port, overrides, folder, start in json.loads(Path(sys.argv[1]).read_text()):
        os.environ["MASTER_PORT"] = str(port)
        if start is not None and os.environ.get("RANK", "0") == "0":  # the others wait for it to join
            shutil.copytree(start, folder)
        with exit_on_error():
            code = main(compose_config("sft", SftConfig, [*overrides, f"run_dir={folder}"]))
        if code:
            sys.exit(code)
