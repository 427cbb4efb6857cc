"""Check that documents of a packed row do not see each other, with the model and layout of a run of `recipes.sft`.

    python -m harness.recipes.isolation
    torchrun --nproc-per-node 2 -m harness.recipes.isolation parallel=tp2 trainer.device=cuda

Settings are those of `recipes.sft`; no data is read, and weights are random. Exit code 1 where a document sees another.
`python -m harness.recipes.parity check=isolation` runs this on many layouts.
"""

from __future__ import annotations

import os

from harness.config import hydra_entry
from harness.megatron import prepare_process
from harness.plan import SftConfig
from harness.printing import print_text


def main(config: SftConfig) -> int:
    """Check one layout and print the findings of all ranks; return 1 if there are any."""
    prepare_process()
    # Transformer Engine then chooses kernels that add in the same order each time.
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    from harness.parity.isolation import check_isolation

    findings = check_isolation(config)
    if os.environ.get("RANK", "0") == "0":
        print_text("\n".join(findings) or "every document is isolated")
    return 1 if findings else 0


if __name__ == "__main__":
    hydra_entry("sft", SftConfig, main)()
