"""Planning and every configuration dataclass work on a machine without torch, Megatron-Core or Hydra."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "megatron", "transformer_engine", *sys.argv[1:]}:
            raise ImportError(f"{name} is not installed on this machine")

sys.meta_path.insert(0, Refuse())
"""

PLAN = """
from harness.plan import PretrainConfig, SftConfig
from harness.plan.run_plan import AssumedPacks, plan_run

settings = SftConfig()
settings.model.vocab_size = 1000
PretrainConfig(model=settings.model).check(1)
settings.check(1)
assert plan_run(settings, packs=AssumedPacks(100, 4096, 512)).work.steps > 0
"""

COMMAND = """
import sys
sys.argv = ["harness", "plan", "llama3_8b_1node", "packs=1000"]
from harness.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
"""


def run(program: str, *missing: str) -> str:
    command = [sys.executable, "-c", PROGRAM + program, *missing]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plan_and_its_settings_need_no_torch_no_megatron_and_no_hydra() -> None:
    run(PLAN, "hydra", "omegaconf")


def test_the_command_plans_an_experiment_without_torch() -> None:
    assert "fits" in run(COMMAND)
