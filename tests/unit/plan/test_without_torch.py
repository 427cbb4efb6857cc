"""Planning and every configuration dataclass work on a machine without torch, Megatron-Core or Hydra."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PUBLISHED = Path(__file__).parents[2] / "golden" / "hf_configs"
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

COMMANDS = """
import sys
from harness.cli import main
for words in ("plan llama3_8b_1node packs=1000", "models", "models MODEL"):
    sys.argv = ["harness", *words.split()]
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


def test_commands_plan_an_experiment_and_read_models_without_torch(tmp_path: Path) -> None:
    shutil.copy(PUBLISHED / "llama3_8b.json", tmp_path / "config.json")
    printed = run(COMMANDS.replace("MODEL", str(tmp_path)))
    assert "fits" in printed
    assert "can be trained: model.init_from=" in printed
