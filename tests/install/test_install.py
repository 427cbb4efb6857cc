"""A wheel, installed outside the checkout into fresh environments, runs what the README shows from any folder.

Needs the package index, as `make setup` does. The environment of a machine that prepares data has the extra `tokenize`
alone; the one that trains borrows the packages of the environment that runs this test, and not its editable install.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.samples.chat_models import save_nemotron3, save_qwen3, save_qwen3_5, save_qwen3_next
from tests.samples.live_streams import write_chats
from tests.samples.stock_templates import TOOLS, call, result, turn

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

pytestmark = [pytest.mark.install, pytest.mark.timeout(900), pytest.mark.xdist_group("install")]


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the empty folder that its commands run in."""

    folder: Path
    work: Path

    def run(self, *command: object, code: int = 0, cwd: Path | None = None) -> str:
        """Run a program of the environment; gives its output and errors."""
        program, *arguments = map(str, command)
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        variables |= {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        done = subprocess.run(
            [shutil.which(program, path=variables["PATH"]) or program, *arguments],
            cwd=cwd or self.work,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == code, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel of the files that git knows or would add, as `pip install .` builds it."""
    source = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    # A module of an earlier build, which has been moved since.
    stale = source / "build" / "lib" / "harness" / "moved_since.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    out = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(out), str(source))
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def prep(wheel, tmp_path_factory) -> Environment:
    """A machine that prepares data: the extra `tokenize` alone."""
    return install(f"{wheel}[tokenize]", tmp_path_factory, "--constraint", str(ROOT / "constraints.txt"))


@pytest.fixture(scope="session")
def train(wheel, tmp_path_factory) -> Environment:
    """A machine that trains, with the packages of this environment and the wheel."""
    made = install(str(wheel), tmp_path_factory, "--no-deps")
    site = Path(made.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A plain path: .pth files in it, such as that of an editable install, are not read.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return made


@pytest.fixture(scope="session")
def dataset(prep) -> Path:
    """A dataset that the installed command prepared, in sequences that are stored once."""
    write_chats(prep.work / "chats.jsonl", 300)
    settings = ("data.packed_storage=virtual", "data.pack_size=256", "tokenizer.vocab_size=300")
    printed = prep.run("harness", "prepare", "source.path=chats.jsonl", "data.path=out", *settings)
    assert "300" in printed
    return prep.work / "out"


def pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def install(requirement: str, tmp_path_factory, *options: str) -> Environment:
    made = Environment(tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("work"))
    venv.create(made.folder, with_pip=True)
    pip(str(made.folder / "bin" / "python"), "install", *options, requirement)
    return made


def quickstart() -> str:
    """The block of README.md that begins with conversations and ends with a resumed run."""
    blocks = re.findall(r"^```shell\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "harness prepare" in block]
    return block


def test_the_wheel_has_the_configs_and_the_recipes_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"harness/configs/sft.yaml", "harness/configs/experiment/sft_tiny.yaml", "harness/recipes/sft.py"} <= set(
        names
    )
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"harness"}
    assert "harness/moved_since.py" not in names


def test_the_extra_tokenize_installs_neither_torch_nor_megatron(prep):
    listed = prep.run("python", "-m", "pip", "list", "--format=freeze")
    names = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert "hydra-core" in names
    assert not names & {"torch", "megatron-core", "transformer-engine", "ray"}
    assert prep.run("harness", "--version") == f"harness {VERSION}\n"


def test_the_quickstart_prepares_inspects_and_verifies_without_torch(prep, tmp_path):
    # Training, and the export of what was trained, need torch.
    lines = [line for line in quickstart().splitlines() if not line.startswith(("harness train", "harness export"))]
    printed = prep.run("bash", "-euo", "pipefail", "-c", "\n".join(lines), cwd=tmp_path)
    assert "nothing wrong" in printed


def test_every_command_on_datasets_runs_without_torch(prep, dataset):
    assert "pack" in prep.run("harness", "inspect", dataset / "train", "--pack", "0")
    assert "nothing wrong" in prep.run("harness", "verify", "out/train")
    assert "as memmap" in prep.run("harness", "convert", "out/train", "copy", "memmap", "data.packs_per_shard=16")
    assert "as npy" in prep.run("harness", "convert", "out/train", "legacy.npy", "npy")
    assert "contain the same packs" in prep.run("harness", "diff", "copy", "legacy.npy")
    assert "as virtual" in prep.run("harness", "repack", "out/train", "longer", "data.pack_size=512", "data.seed=1")
    assert "as parquet" in prep.run("harness", "import", "legacy.npy", "imported", "megatron_bridge")


def test_live_chunks_are_written_without_torch(prep, dataset):
    packs = ("tokenizer.name=out/tokenizer", "data.pack_size=256", "data.over_long=cut", "chunks.rows=20")
    assert "rows in" in prep.run("harness", "live", "produce", "chats.jsonl", "live", *packs)
    assert "ended" in prep.run("harness", "live", "status", "live")


def test_a_run_is_planned_and_its_job_is_rendered_without_torch(prep, dataset):
    planned = prep.run("harness", "plan", "sft", "data.path=out", "parallel.ranks=4")
    assert "time of an epoch" in planned
    assert "fits" in prep.run("harness", "plan", "llama3_8b_1node", "packs=100000")
    script = prep.run("harness", "submit", "sft_tiny", "nodes=2", "data.path=out", "cluster.time=00:10:00", "--dry-run")
    assert "#SBATCH --nodes=2" in script
    assert "experiment=sft_tiny data.path=out" in script
    assert not (prep.work / "runs").exists()


def test_a_users_own_experiment_is_planned_and_submitted_from_any_folder(prep, dataset):
    own = prep.work / "my configs"
    (own / "experiment").mkdir(parents=True)
    (own / "experiment" / "mine.yaml").write_text("# @package _global_\nname: mine\ndata:\n  path: out\n")
    assert "mine on 8 ranks" in prep.run("harness", "plan", "mine", "--config-dir", "my configs")
    script = prep.run("harness", "submit", "mine", "--config-dir", "my configs", "--dry-run")
    assert f"--config-dir '{own}' experiment=mine" in script


def test_training_without_its_packages_names_what_is_missing(prep):
    printed = prep.run("harness", "train", "sft", code=2)
    assert "training requires torch" in printed
    assert "Traceback" not in printed


def test_the_quickstart_trains_and_resumes_with_the_installed_package(train, tmp_path):
    where = train.run(
        "python", "-c", "import harness, harness.recipes.sft as sft; print(harness.__file__, sft.__file__)"
    )
    assert all(path.startswith(str(train.folder)) for path in where.split())
    printed = train.run("bash", "-euo", "pipefail", "-c", quickstart(), cwd=tmp_path)
    assert "step 6: loss" in printed
    assert (tmp_path / "runs" / "sft-001" / "report.md").exists()


def test_torchrun_starts_the_recipe_from_any_folder_with_a_users_own_experiment(train, dataset, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    settings = f"# @package _global_\nname: mine\ndata:\n  path: {dataset}\ntrainer:\n  steps: 2\n"
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(settings)
    torchrun = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    recipe = ("-m", "harness.recipes.sft", "--config-dir", "own", "experiment=mine", "trainer.device=cpu")
    train.run(*torchrun, *recipe, cwd=tmp_path)
    assert "step" in (tmp_path / "runs" / "mine-001" / "metrics.jsonl").read_text()


# Asks an exported model for the next turn of a conversation after some of its turns, as a server does.
ASK = """import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained(sys.argv[1]) for kind in (AutoTokenizer, AutoModelForCausalLM))
chat = json.loads(sys.argv[2])
for number in map(int, sys.argv[3:]):
    turns, tools = chat["messages"][:number], chat["tools"]
    prompt = tokenizer.apply_chat_template(turns, tools=tools, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    answer = model.generate(**ids, max_new_tokens=200)[0, ids["input_ids"].shape[1]:]
    print("answer", json.dumps(tokenizer.decode(answer)))
"""


SLOWLY = ("trainer.steps=160", "optimizer.lr=4e-3")
ROW_BY_ROW = (
    *("trainer.steps=100", "optimizer.lr=8e-3"),
    *("loader.global_batch_size=1", "schedule.max_tokens_per_rank=1024"),
)


@pytest.mark.parametrize(
    ("save", "settings", "opened", "called"),
    [
        pytest.param(
            *(save_qwen3, SLOWLY, "<think>", '{"name": "get_weather", "arguments": {"city": "Paris"}}'),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *(save_qwen3_next, ROW_BY_ROW, "<think>", '{"name": "get_weather", "arguments": {"city": "Paris"}}'),
            marks=pytest.mark.nightly,
        ),
        # Its prompt opens the thought.
        (save_nemotron3, ROW_BY_ROW, "", "<function=get_weather><parameter=city>Paris</parameter></function>"),
        pytest.param(
            *(save_qwen3_5, SLOWLY, "", "<function=get_weather><parameter=city>Paris</parameter></function>"),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["qwen3", "qwen3_next", "nemotron3", "qwen3_5"],
)
def test_the_first_hour_goes_from_chats_with_tools_to_a_model_that_thinks_calls_answers_and_stops(
    train, tmp_path, save, settings, opened, called
):
    chats = [
        {
            "messages": [
                turn("user", f"How warm is it in {city}?"),
                turn(
                    "assistant",
                    "",
                    tool_calls=[call("get_weather", {"city": city})],
                    reasoning_content=f"A tool knows {city}.",
                ),
                result(f"{degrees} degrees"),
                turn("assistant", f"It is {degrees} degrees.", reasoning_content=f"It says {degrees}."),
            ],
            "tools": TOOLS,
        }
        for city, degrees in (("Paris", 12), ("Rome", 20), ("Oslo", 3))
    ]
    lines = [json.dumps(chat) for chat in chats]
    save(tmp_path / "model", texts=lines)
    (tmp_path / "chats.jsonl").write_text("\n".join(lines * 20))

    shown = train.run(
        "harness", "prepare", "source.path=chats.jsonl", "tokenizer.name=model", "--preview", "1", cwd=tmp_path
    )
    assert "get_weather" in shown
    more = ("data.validation_fraction=0", "data.pack_size=1024", "trainer.device=cpu", *settings)
    train.run("harness", "sft", "model", "chats.jsonl", "out", *more, cwd=tmp_path)
    assert "nothing wrong" in train.run("harness", "verify", "out/run", cwd=tmp_path)

    (model,) = (tmp_path / "out").glob("model-step-*")
    printed = train.run("python", "-c", ASK, model, lines[0], 1, 3, cwd=tmp_path)
    answers = [json.loads(line.removeprefix("answer ")) for line in printed.splitlines() if line.startswith("answer ")]
    assert [answer.replace("\n", "") for answer in answers] == [
        f"{opened}A tool knows Paris.</think><tool_call>{called}</tool_call><|im_end|>",
        f"{opened}It says 12.</think>It is 12 degrees.<|im_end|>",
    ]
