"""Paths and arguments given for something else: one line that names what they are and the command that takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import run_in_forks

from harness.formats import open_writer
from harness.paths import text_to_records
from harness.records import Pack

FILES = {
    **{f"runs/{name}/config.yaml": "model: {}\n" for name in ("first", "second")},
    **{f"runs/{name}/metrics.jsonl": '{"step": 3}\n' for name in ("first", "second")},
    **{"made/mine/run/config.yaml": "", "made/mine/data/train/manifest.json": ""},  # of `harness sft`
    **{"model/config.json": "{}", "adapter/adapter_config.json": "{}", "gguf/q4.gguf": "GGUF"},
    **{"chats.csv": "question,answer\n1,2\n", "chats.jsonl": '{"messages": []}\n'},
    **{"notes.txt": "Hello.\n", "lines.txt": '{"text": "Hello."}\n'},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with two runs, a prepared dataset, models and chats."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for run in ("runs/first", "runs/second", "made/mine/run"):
        (tmp_path / run / "checkpoints").mkdir()
    with open_writer(tmp_path / "data" / "mine" / "train", format="parquet", pack_size=8) as writer:
        writer.append(Pack([1, 2, 3], [1, 1, 0], [0]))


NO_DATASET, NO_RUN = "a run's folder, not a dataset", "a folder of 2 runs, not a run itself"
A_DATASET = "a folder of 1 dataset, not a dataset itself"
EITHER, SFT = "specify one of them: runs/first, runs/second", "did you mean sft data.path=data/mine? "
PACK = "`harness prepare source.path=chats.jsonl data.path=data/chats` packs"
TO_LINES = "each line as a text to train on: jq -cR '{text: .}' notes.txt > notes.jsonl"
PACK_TABLE = "`harness prepare source.path=chats.csv data.path=data/chats` packs its conversations"


@pytest.mark.parametrize(
    ("command", "what", "fix"),
    [
        ("inspect runs/first", NO_DATASET, "`harness status runs/first` shows the run, `harness compare runs/first"),
        ("inspect runs", "a folder of 2 runs, not a dataset", "`harness status runs/first` shows one of them"),
        ("inspect data", A_DATASET, "specify one of them: data/mine"),
        ("inspect made", A_DATASET, "specify one of them: made/mine/data"),
        ("status made/mine", "a folder of 1 run, not a run itself", "specify one of them: made/mine/run"),
        ("inspect model", "a model's folder, not a dataset", "model.init_from=model trains it"),
        ("inspect chats.csv", "a .csv file, not a dataset", PACK_TABLE),
        ("inspect lines.txt", "a .txt file", "`harness prepare source.path=lines.txt data.path=data/lines` packs its"),
        ("inspect notes.txt", "a .txt file, not a dataset", f"{TO_LINES}; chats need one JSON record per line"),
        ("prepare source.path=notes.txt", "the file is plain text", f"{TO_LINES}; chats need one JSON record per line"),
        ("diff data/mine data/mine", A_DATASET, "specify one of them: data/mine/train"),
        ("convert data/mine out", "FORMAT is missing", "harness convert data/mine out FORMAT (FORMAT: one of npy"),
        ("convert data/mine", "DST is missing", "harness convert data/mine DST FORMAT (DST: folder to write"),
        ("export mine runs/first", "the arguments are reversed", "harness export runs/first mine"),
        ("sft chats.jsonl model", "the arguments are reversed: MODEL is a file", "harness sft model chats.jsonl"),
        ("sft chats.csv chats.jsonl", "a .csv file, not a model's folder", PACK_TABLE),
        ("models gguf/q4.gguf", "a GGUF model for llama.cpp, not a model's folder", "specify the folder that it was"),
        ("sft adapter chats.jsonl", "a LoRA adapter, not a model's folder", "merge it into its base model with PEFT's"),
        ("sft runs/first chats.jsonl", "a run's folder, not a model's folder", "`harness export runs/first FOLDER`"),
        ("prepare source.path=runs/first", "a run's folder, not chats", "`harness status runs/first` shows the run"),
        ("prepare source.path=chatz.csv", "the file or folder does not exist", "did you mean chats.csv?"),
        ("prepare source.path=chats.csv tokenizer.name=model", "the folder has no tokenizer", "copy tokenizer.json"),
        ("prepare source.path=chats.csv tokenizer.name=chats.csv", "is a file, not a folder", "set tokenizer.name to"),
        ("train data.path=data/mine", "there is no recipe 'data.path=data/mine'", "harness train sft data.path=data/"),
        ("export runs out", NO_RUN, EITHER),
        ("export data out", "a folder of 1 dataset, not a run", "`harness inspect data/mine` shows one of them"),
        ("plan data/mine", "there is no experiment 'data/mine'", SFT),
        ("train chats.jsonl", "there is no recipe 'chats.jsonl'", PACK),
        ("train sft chats.jsonl", "'chats.jsonl' is not a setting", PACK),
        ("train sft data/mine", "'data/mine' is not a setting", "settings are key=value, such as data.path=data/mine"),
        ("prepare chats.jsonl", "'chats.jsonl' is not a setting", "settings are key=value, such as source.path=chats"),
        ("train sft data.path=chats.jsonl", "the line has no input_ids", PACK),
        ("train sft data.path=data/mine run_dir=runs/first", "it has a run of 3 steps", "continue it with resume=true"),
        (f"train {'x' * 300}", "there is no recipe 'xxx", "specify one of sft, pretrain"),
        ("trian sft", "there is no command 'trian'", "did you mean train? "),
        ("chat model", "there is no command 'chat'", "did you mean transformers chat FOLDER? "),
        ("resume run", "there is no command 'resume'", "did you mean train sft run_dir=RUN resume=true? "),
        ("train sft trainer.steps = 4", "'trainer.steps' is not a setting", "settings are key=value, without spaces"),
    ],
)
def test_a_path_that_is_something_else_is_recognized(harness, command, what, fix):
    code, _, error = harness(*command.split())
    assert code == 2
    assert what in error
    assert f"fix:   {fix}" in error


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.submission)])
def test_a_command_whose_output_is_not_read_ends_quietly(unbuffered):
    closed = "reads, writes = os.pipe()\nos.close(reads)\nos.dup2(writes, 1)\nmain()"
    commands = ("inspect data/mine", "prepare --cfg", "plan --cfg", "verify data/mine", "--help", "plan --help")
    imports = "import harness.cli.data, harness.cli.launch, harness.cli.runs, harness.recipes.prepare, harness.train\n"
    imports += "import markdown_it, omegaconf, pyarrow.parquet, pydantic.type_adapter\nfrom harness.cli import main"
    ended = run_in_forks(imports, closed, [command.split() for command in commands], PYTHONUNBUFFERED=unbuffered)
    assert ended == [(141, "", "")] * len(commands)


def test_help_lists_commands_by_purpose_those_of_the_first_hour_first(harness):
    code, printed, _ = harness("--help")
    assert code == 0
    assert harness("-h") == (0, printed, "")
    titles = [line for line in printed.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[-5:] == [
        *("From chats to a model:", "Before a run:", "Check and compare:", "On a Slurm cluster:"),
        "Other data:",
    ]
    places = [printed.index(f"\n  {name} ") for name in ("prepare", "train", "export", "plan", "verify", "submit")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("notes.txt", "notes.jsonl"),
        ("NOTES.TXT", "NOTES.jsonl"),
        ("'my notes.Md'", "'my notes.jsonl'"),
        ("a.txt.d/b.md", "a.txt.d/b.jsonl"),
    ],
)
def test_the_lines_of_a_text_are_written_beside_it_and_never_over_it(path, lines):
    assert f"jq -cR '{{text: .}}' {path} > {lines};" in text_to_records(path)
