"""`torchrun -m tests.distributed.several_runs OVERRIDES.json`: several runs of `recipes.sft` one after another.

The processes, which take seconds to import PyTorch and Megatron, are shared by all of them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from harness.config import compose_config
from recipes.sft import SftConfig, main

if __name__ == "__main__":
    # The launcher's store remembers the job before; each run meets at a port of its own.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port, overrides in json.loads(Path(sys.argv[1]).read_text()):
        os.environ["MASTER_PORT"] = str(port)
        main(compose_config("sft", SftConfig, overrides))
