"""Several runs of one recipe (`sft`, `isolation` or `reference`) in the same processes, which start slowly.

    torchrun --nproc-per-node 4 -m harness.recipes.sft_runs RUNS.json

The file is `{"program": NAME, "runs": [[port, overrides, folder, start], ...]}`: the ranks of a run meet at its port;
the run's folder is first copied from `start`, unless that is null.
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

from . import isolation, reference, sft

if __name__ == "__main__":
    # The launcher's store remembers the run before; each run meets at its own port.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    listed = json.loads(Path(sys.argv[1]).read_text())
    main = {module.__name__: module.main for module in (sft, isolation, reference)}[listed["program"]]
    for port, overrides, folder, start in listed["runs"]:
        os.environ["MASTER_PORT"] = str(port)
        if start is not None and os.environ.get("RANK", "0") == "0":  # the others wait for it to join
            shutil.copytree(start, folder)
        with exit_on_error():
            code = main(compose_config("sft", SftConfig, [*overrides, f"run_dir={folder}"]))
        # Findings about isolation are in the folder of their run, and do not end the runs after it.
        if code and main is sft.main:
            sys.exit(code)
