"""The command line: its output for people and for programs, its settings, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import yaml
from forks import run_in_forks
from small_packs import write_packs

from harness.cli.app import installed_version
from harness.formats import Provenance, open_dataset
from harness.plan import SftConfig
from harness.records import Pack
from harness.settings import explain_settings

PACKS = [Pack([1, 2, 3, 4], [1, 1, 1, 0], [0]), Pack([5, 6, 7, 8, 9], [1, 0, 0, 1, 0], [0, 2])]


@pytest.fixture
def dataset(tmp_path):
    return write_packs(tmp_path / "data", PACKS, pack_size=8, provenance=Provenance(tokenizer="none"))


def test_a_conversion_has_the_same_packs_and_diff_names_the_first_difference_and_ends_with_1(
    harness, dataset, tmp_path
):
    code, printed, _ = harness("convert", dataset, tmp_path / "out", "memmap", "data.packs_per_shard=1")
    assert (code, "2 packs, 3 sequences, 9 tokens as memmap" in printed) == (0, True)
    code, printed, _ = harness("diff", dataset, tmp_path / "out")
    assert (code, "contain the same packs" in printed) == (0, True)
    other = [PACKS[0], Pack([5, 6, 7, 80, 9], [1, 0, 0, 1, 0], [0, 2])]
    write_packs(tmp_path / "other", other, format="jsonl", pack_size=8)
    code, printed, _ = harness("diff", dataset, tmp_path / "other")
    assert (code, printed.strip()) == (1, "first difference: pack 1, input_ids[3]: 8 and 80")
    code, printed, _ = harness("diff", dataset, tmp_path / "other", "--json")
    expected = {"pack": 1, "field": "input_ids", "position": 3, "a": 8, "b": 80}
    assert (code, json.loads(printed)["difference"]) == (1, expected)


def test_verify_ends_with_0_for_a_whole_dataset_and_with_1_for_a_damaged_one(harness, dataset):
    code, printed, _ = harness("verify", dataset)
    assert (code, "2 packs, nothing wrong" in printed) == (0, True)
    shard = dataset / "shard_000000.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 4] ^= 1
    shard.write_bytes(content)
    code, printed, _ = harness("verify", dataset)
    assert code == 1
    assert "shard_000000.parquet" in printed
    code, printed, _ = harness("verify", dataset, "--json")
    assert (code, len(json.loads(printed)["problems"]) > 0) == (1, True)


def test_import_reads_a_pickled_npy_and_counts_its_changes(harness, tmp_path):
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1], "seq_start_id": [0]}]
    np.save(tmp_path / "packed.npy", np.array(rows, dtype=object), allow_pickle=True)
    code, printed, error = harness(
        *("import", tmp_path / "packed.npy", tmp_path / "out", "megatron_bridge", "data.pack_size=4")
    )
    assert (code, error) == (0, "")
    assert "cleared last positions: 1" in printed
    reader = open_dataset(tmp_path / "out")
    assert (list(reader), reader.pack_size) == ([Pack([5, 6, 7], [1, 1, 0], [0])], 4)


def test_a_conversion_for_ms_swift_prints_the_arguments_of_its_training(harness, dataset, tmp_path):
    code, printed, error = harness("convert", dataset, tmp_path / "cache", "ms_swift")
    assert (code, error) == (0, "")
    assert f"--cached_dataset {tmp_path / 'cache'} --external_plugins" in " ".join(printed.split())
    code, printed, _ = harness("convert", dataset, tmp_path / "second", "ms_swift", "--json")
    assert (code, json.loads(printed)["num_packs"]) == (0, 2)
    code, _, error = harness("convert", dataset, tmp_path / "third", "ms_swift", "data.packs_per_shard=1")
    assert (code, "data.packs_per_shard" in error) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "nowhere"],
        ["verify", "nowhere"],
        ["convert", "nowhere", "out", "memmap"],
        ["diff", "nowhere", "nowhere"],
        ["import", "nowhere", "out", "nemotron"],
        ["repack", "nowhere", "out", "data.pack_size=8"],
    ],
)
def test_a_path_that_does_not_exist_is_one_clear_error_with_code_2(harness, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = harness(*arguments)
    assert code == 2
    assert "nowhere" in error
    assert "fix:" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "a", "b", "arrow"], "npy, memmap, binidx, jsonl, virtual, parquet"),
        (["convert", "a", "b", "npy", "data.packs_per_shrd=1"], "did you mean data.packs_per_shard?"),
        (["repack", "a", "b"], "data.pack_size is not set"),
        (["requeue", "a"], "exit_code is not set"),
        (["live", "produce", "a", "b", "chunks.kind=packs", "tokenizer.name=x"], "packs are tokenized already"),
        (["plan", "sft_tiny", "trainer.step=2"], "did you mean trainer.steps?"),
        (["submit", "sft_tiny", "--dry-run", "--cluste=x"], "unknown flag --cluste"),
        (["train", "other"], "one of sft, pretrain"),
        (["train", "sft", "modle.num_layers=1"], "did you mean model.num_layers=1?"),
        (["parity", "check=nothing"], "check 'nothing' is unknown"),
        (["inspect"], "fix:   harness inspect PATH (PATH: dataset folder"),
        (["sft", "my/model"], "fix:   harness sft my/model CHATS (CHATS: "),
        (["inspect", "a", "--workers", "2"], "no such option: --workers\n  where: harness inspect\n  fix:   harness"),
        (["diff", "a", "b", "c"], "(c)\n  where: harness diff\n  fix:   harness diff --help"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # recipes are imported by other tests
def test_a_mistake_in_an_argument_is_one_clear_error_with_code_2(harness, dataset, arguments, message):
    code, _, error = harness(*(str(dataset) if argument == "a" else argument for argument in arguments))
    assert code == 2
    assert message in error
    assert "Traceback" not in error


COMMANDS = [
    *("inspect x", "verify x", "convert a b npy", "diff a b", "import a b nemotron", "repack a b", "live produce a b"),
    *("indexed convert a b", "requeue a", "export a b", "bench step", "plan sft_tiny", "submit sft_tiny"),
    *("prepare", "train sft", "train pretrain", "parity", "inspect x --cfg", "plan sft_tiny --cfg", "prepare --cfg"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_setting_with_a_prefix_of_hydra_is_refused_by_name(harness, command):
    code, printed, error = harness(*command.split(), "+no.such=1")
    assert (code, printed) == (2, "")
    assert "unknown setting 'no.such'" in error or "extra argument(s) (+no.such=1)" in error


def test_a_prefix_of_hydra_before_a_setting_of_a_command_is_refused(harness):
    code, _, error = harness("repack", "a", "b", "++data.pack_size=8")
    assert code == 2
    assert "++ changes groups, and data.pack_size is a setting" in error
    assert "fix:   data.pack_size=VALUE; " in error


@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (["repack", "--cfg"], ("data.pack_size", "required")),
        (["convert", "data.packs_per_shard=4", "--cfg"], ("data.packs_per_shard", "4")),
        (["plan", "--cfg"], ("gpu_gib", "80")),
        (["submit", "--cfg"], ("nodes", "1")),
        (["repack", "--help"], ("data.seed", "0")),
    ],
)
def test_a_bare_cfg_and_the_help_print_every_setting_of_a_command(harness, arguments, row):
    code, printed, _ = harness(*arguments)
    assert code == 0
    assert row in [tuple(line.split()[:2]) for line in printed.splitlines()]


def test_cfg_with_an_experiment_prints_the_settings_of_the_command_and_of_the_recipe(harness):
    code, printed, _ = harness("submit", "sft_tiny", "nodes=3", "trainer.steps=5", "--cfg")
    settings = yaml.safe_load(printed)
    assert (code, settings["nodes"], settings["trainer"]["steps"], settings["name"]) == (0, 3, 5, "sft_tiny")


def test_the_help_of_a_recipe_begins_with_the_settings_that_most_runs_change(harness):
    code, printed, _ = harness("train", "sft", "--help")
    shown = re.findall(r"^  ([a-z_.]+)=", printed.partition("Groups of settings")[0], re.MULTILINE)
    assert code == 0
    assert shown[:2] == ["data.path", "model.init_from"]
    assert set(shown) <= {setting.key for setting in explain_settings(SftConfig)}
    assert "harness train sft --help" in harness("train", "--help")[1]
    # A paragraph is filled, without the line breaks of the docstring.
    assert "OUT (by default runs/MODEL-CHATS) contains the dataset" in harness("sft", "--help")[1]


def test_a_search_without_data_assumes_some_and_says_so(harness, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed, _ = harness("plan", "auto", "model=llama3_8b", "parallel.ranks=8", "top=1")
    assert (code, "8 GPUs" in printed) == (0, True)
    assert "assumed: packs of 8,192 tokens" in printed
    assert "assumed: a vocabulary of 131,072 tokens" in printed
    code, _, message = harness("plan", "auto", "model=llama3_8b", "parallel.ranks=8", "data.path=nowhere")
    assert (code, "there is no dataset" in message) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sft", "sequence_tokens=64", "packs=null"], "of the dataset are planned, and sequence_tokens would have no"),
        (["auto", "mfu=0.4"], "`harness plan auto` lists layouts, and mfu would have no effect"),
        (["sft", "top=3"], "one layout is planned, and top would have no effect"),
        (["llama3_8b_1node", "model.fp8=tensorwise", "trainer.device=cpu"], "FP8 requires a GPU"),
    ],
)
def test_a_plan_refuses_what_it_would_not_use_and_what_would_not_run(harness, arguments, words):
    code, _, message = harness("plan", arguments[0], "packs=100", *arguments[1:], "model.vocab_size=512")
    assert (code, words in message) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "environment", "processes"),
    [
        (["parallel.ranks=3", "trainer.steps=1"], {}, 3),
        (["parallel.ranks=3"], {"RANK": "0"}, None),
        (["parallel.ranks=null"], {}, None),
        (["experiment=two"], {}, 2),
        (["experiment=two", "parallel.ranks=null"], {}, None),
        (["experiment=two"], {"SLURM_PROCID": "0"}, None),
        (["parallel.ranks='4'"], {}, 4),
    ],
)
def test_the_number_of_ranks_starts_as_many_processes_unless_a_launcher_has(
    harness, monkeypatch, tmp_path, arguments, environment, processes
):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "two.yaml").write_text("# @package _global_\nparallel: {ranks: 2}\n")
    arguments = [*arguments, "--config-dir", str(tmp_path)]
    started, here = [], []
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "harness.launch.local.start_ranks", lambda command, ranks: started.append((command, ranks)) or 0
    )
    monkeypatch.setattr("harness.cli.runs.recipe_entry", lambda name: here.append)
    harness("train", "sft", *arguments)
    if processes is None:
        assert (started, here) == ([], [arguments])
    else:
        assert started == [
            (
                [
                    sys.executable,
                    "-m",
                    "harness.recipes.sft",
                    *(text for text in arguments if text not in ("--ranks", "2")),
                ],
                processes,
            )
        ]


def test_wrong_settings_are_refused_before_ranks_start(harness, monkeypatch):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("harness.launch.local.start_ranks", lambda command, ranks: pytest.fail("started ranks"))
    code, _, errors = harness("train", "sft", "parallel.ranks=2", "trainer.step=1")
    assert code == 2
    assert "unknown setting 'trainer.step'" in errors


def test_the_module_runs_the_command_and_prints_its_version():
    done = subprocess.run([sys.executable, "-m", "harness", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"harness {installed_version()}\n")


def test_settings_are_printed_and_the_shell_completes_commands_and_settings_without_torch():
    expected = {
        "harness in": ["inspect", "indexed"],
        "harness repack STORE DST data.s": ["data.seed="],
        "harness train sft trainer.st": ["trainer.steps="],
        "harness plan qwen3_8b": ["qwen3_8b_1node", "qwen3_8b_4nodes"],
    }
    imports = "import sys; sys.modules['torch'] = sys.modules['megatron'] = None\n"
    imports += "import harness.cli.data, harness.cli.launch, harness.cli.runs, harness.config\n"
    imports += "import omegaconf, pyarrow.parquet, pydantic.type_adapter\nfrom harness.cli import main"
    program = "words = sys.argv[1] if len(sys.argv) == 2 else ''\nif words:\n    os.environ.update("
    program += "_HARNESS_COMPLETE='complete_bash', COMP_WORDS=words, COMP_CWORD=str(words.count(' ')))\nmain()"
    settings, *completions = run_in_forks(
        imports, program, [["train", "pretrain", "trainer.steps=3", "--cfg"], *([words] for words in expected)]
    )
    assert settings[0] == 0, settings
    assert yaml.safe_load(settings[1])["trainer"]["steps"] == 3
    for (words, wanted), (_, printed, error) in zip(expected.items(), completions, strict=True):
        completed = printed.split()
        assert [word for word in completed if word.startswith(words.split()[-1])] == completed
        assert set(wanted) <= set(completed), error


@pytest.mark.parametrize("command", ["plan", "submit"])
def test_a_command_with_a_recipe_prints_its_help_and_refuses_flags_that_it_does_not_have(harness, command, tmp_path):
    helped = harness(command, "sft_tiny", "--help")
    assert (helped[0], f"Usage: harness {command} " in helped[1]) == (0, True)
    assert harness(command, "sft_tiny", "-h") == helped
    for flags in (["--config-name", "other"], ["--multirun"], ["--info"], ["--cfg", "job"]):
        code, printed, errors = harness(command, "sft_tiny", *flags, f"runs={tmp_path}")
        assert (code, printed) == (2, "")
        assert f"harness {command} has no flag {flags[0]}" in errors


def test_a_pack_that_does_not_exist_is_refused(harness, dataset):
    code, _, errors = harness("inspect", dataset, "--pack", 2, "--json")
    assert (code, "there is no pack 2" in errors, "packs are numbered 0 to 1" in errors) == (2, True, True)


LONG = "a" * 300  # longer than a name in a folder may be


@pytest.mark.parametrize(
    "arguments",
    [["models", LONG], ["verify", LONG], ["inspect", LONG], ["status", LONG], ["export", LONG, "out"]],
    ids=lambda arguments: arguments[0],
)
def test_a_name_that_is_too_long_for_a_path_is_one_clear_error(harness, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, _, errors = harness(*arguments)
    assert (code, "fix:" in errors) == (2, True)


def test_flags_that_would_do_nothing_are_refused(harness, tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {steps: 4}\n")
    (tmp_path / "metrics.jsonl").write_text("")
    code, _, errors = harness("verify", tmp_path, "--repair-manifest")
    assert (code, "only datasets have a manifest" in errors) == (2, True)
