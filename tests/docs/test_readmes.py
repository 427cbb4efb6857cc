"""Every shell and Python block of every README and page of docs/ is run, in order, in an empty folder of its own.

A block of `text` directly after a block is what that block prints; `...` in it matches anything. A comment before a
block changes what is done with it:

    <!-- not run: needs a cluster -->    its commands are parsed and their settings composed, and nothing is started
    <!-- nightly: takes a minute -->     run by `pytest -m nightly` only, with the blocks before it

Python blocks of one page share their names, as in one interactive session. `<!-- after: PAGE -->` in the first line of
a page runs the blocks of that page first, in the same folder and session.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml
from harness.recipes.parity import ParityConfig

from harness.cli.app import app
from harness.cli.launch import PlanSettings
from harness.config import compose_config, compose_run
from harness.errors import HarnessError
from harness.launch.cluster import SubmitConfig
from harness.plan import PretrainConfig, SftConfig
from harness.plan.hf_config import to_hf_config
from harness.prep import PrepareConfig
from harness.settings import CONFIGS, explain_settings
from tests.samples.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".", "configs", "configs/experiment", "docker", "harness", "harness/formats", "recipes", "slurm", "tests")
READMES = [
    *(str(Path(folder, "README.md")) for folder in FOLDERS if (ROOT / folder / "README.md").is_file()),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
]
# Pages whose blocks train or pack, which takes seconds.
LONG = ("README.md", "docs/datasets.md", "docs/pretrain.md", "docs/train.md")
SCHEMAS = {"prepare": PrepareConfig, "sft": SftConfig, "pretrain": PretrainConfig, "parity": ParityConfig}
EXPERIMENTS = [path.stem for path in (CONFIGS / "experiment").glob("*.yaml")]
# Settings of the commands themselves; all others are those of a recipe.
OWN = {setting.key.partition(".")[0] for schema in (PlanSettings, SubmitConfig) for setting in explain_settings(schema)}
LANGUAGES = ("shell", "python", "text", "json", "yaml", "mermaid")
MARKER = re.compile(r"<!-- (not run|nightly): (.+) -->")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Block:
    """A fenced block of a README; `mark` is "not run", "nightly" or "", `output` what the next block shows of it."""

    line: int
    language: str
    text: str
    mark: str
    output: str | None = None


def read_blocks(page: str) -> list[Block]:
    """The fenced blocks of a Markdown page, each with the output that follows it."""
    blocks: list[Block] = []
    lines = page.splitlines()
    number = 0
    last_end = -2
    while number < len(lines):
        if not lines[number].startswith("```"):
            number += 1
            continue
        start = number
        number = next(end for end in range(start + 1, len(lines)) if lines[end] == "```")
        language = lines[start].removeprefix("```")
        text = "\n".join(lines[start + 1 : number]) + "\n"
        mark = MARKER.fullmatch(lines[start - 1]) if start else None
        is_output = language == "text" and not any(lines[last_end + 1 : start]) and blocks
        if is_output:
            before = blocks.pop()
            blocks.append(Block(before.line, before.language, before.text, before.mark, text))
        else:
            blocks.append(Block(start + 1, language, text, mark[1] if mark else ""))
        last_end = number
        number += 1
    return blocks


def logical_commands(script: str) -> Iterator[list[str]]:
    """The words of every simple command of a shell block, without comments, assignments, pipes and redirections."""
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set(";&|()<>"):
                if command:
                    yield command
                command = []
            elif command or not re.fullmatch(r"\w+=.*", word):
                command.append(word)


def check_command(words: list[str]) -> None:
    """Fail where a command that is not run could not be: unknown settings, options, targets or files."""
    program = Path(words[0]).name
    if "-m" in words and words[words.index("-m") + 1].startswith("harness.recipes."):
        at = words.index("-m") + 1
        check_settings(words[at].removeprefix("harness.recipes."), words[at + 1 :])
    elif program == "harness" and words[1] == "prepare":
        check_settings("prepare", words[2:])
    elif program == "harness" and words[1] == "train":
        rest = iter(words[3:])
        check_settings(words[2], [word for word in rest if word != "--ranks" or not next(rest)])
    elif program == "harness" and words[1] == "parity" and "=" in words[2]:
        check_settings("parity", words[2:])
    elif program == "harness":
        parse_command(words[1:])
        if words[1] in ("plan", "submit") and words[2] in (*SCHEMAS, *EXPERIMENTS):
            settings = [word for word in words[3:] if "=" in word]
            compose_run(words[2], [text for text in settings if re.split("[.=]", text)[0] not in OWN])
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif "/" in words[0] and not words[0].startswith((".venv", "/", "~")):
        assert (ROOT / words[0]).is_file(), f"{words[0]} is no file"
    elif program == "sbatch":
        assert any((ROOT / word).is_file() for word in words[1:] if word.endswith(".sbatch"))


def parse_command(arguments: list[str]) -> None:
    command = typer.main.get_command(app)
    context = command.make_context("harness", [], resilient_parsing=True)
    while hasattr(command, "resolve_command"):
        name, command, arguments = command.resolve_command(context, arguments)
        assert command is not None, f"harness has no command {name}"
    try:
        command.make_context(command.name, list(arguments), parent=context)
    except HarnessError:
        raise
    except Exception as error:  # of the click that this version of typer carries
        raise AssertionError(f"harness {' '.join(arguments)}: {error}") from error


def check_settings(recipe: str, words: list[str]) -> None:
    settings = [word for word in words if not word.startswith("-")]
    if not any(word in ("-m", "--multirun") for word in words):
        with tempfile.TemporaryDirectory() as folder:
            # In place of weights that only the reader has.
            config = to_hf_config(compose_config("sft", SCHEMAS["sft"], ["model=qwen3_8b"]).model, vocab_size=151936)
            (Path(folder) / "config.json").write_text(json.dumps(config))
            settings = [re.sub("^model.init_from=.*", f"model.init_from={folder}", text) for text in settings]
            compose_config(recipe, SCHEMAS[recipe], settings)


def run_shell(block: Block, folder: Path) -> str:
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(
            map(str, [Path(warm_python()).parent, Path(sys.executable).parent, os.environ["PATH"]])
        ),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"line {block.line}: exit code {done.returncode}\n{block.text}\n{done.stdout[-6000:]}"
    return done.stdout


def run_python(block: Block, names: dict[str, object], readme: str) -> str:
    printed = io.StringIO()
    # Line numbers of a traceback are those of the README.
    code = compile("\n" * block.line + block.text, readme, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def check_output(block: Block, printed: str, readme: str) -> None:
    if block.output is None:
        return
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    is_same = doctest.OutputChecker().check_output(block.output, printed, flags)
    assert is_same, f"{readme}, line {block.line} prints\n{printed}\nand the page shows\n{block.output}"


def run_readme(readme: str, folder: Path, *, nightly: bool, names: dict[str, object] | None = None) -> None:
    blocks = read_blocks((ROOT / readme).read_text())
    names = {"__name__": "__main__"} if names is None else names
    before = re.match("<!-- after: (.+) -->\n", (ROOT / readme).read_text())
    if before and any(
        block.language in ("shell", "python") and block.mark in ("", nightly and "nightly") for block in blocks
    ):
        run_readme(str(Path(readme).parent / before[1]), folder, nightly=nightly, names=names)
    for block in blocks:
        assert block.language in LANGUAGES, f"{readme}, line {block.line}: a block of {block.language!r} is not checked"
        if block.language == "json":
            for line in block.text.splitlines() if "\n{" in block.text.strip() else [block.text]:
                json.loads(line)
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif block.language == "shell" and (block.mark == "not run" or (block.mark == "nightly" and not nightly)):
            subprocess.run(["bash", "-n", "-c", block.text], check=True)
            for words in logical_commands(block.text):
                check_command(words)
        elif block.language == "shell":
            check_output(block, run_shell(block, folder), readme)
        elif block.language == "python" and block.mark:
            compile(block.text, readme, "exec")
        elif block.language == "python":
            check_output(block, run_python(block, names, readme), readme)


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize(
    "readme", [pytest.param(name, marks=pytest.mark.submission if name in LONG else ()) for name in READMES]
)
def test_every_block_of_a_readme_runs_as_shown(readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_readme(readme, tmp_path, nightly=False)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("readme", [name for name in READMES if "<!-- nightly: " in (ROOT / name).read_text()])
def test_the_long_blocks_of_a_readme_run_too(readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_readme(readme, tmp_path, nightly=True)


@cache
def generated() -> dict[str, str]:
    """Return the pages of the reference by their paths."""
    return runpy.run_path(str(ROOT / "docs/reference.py"))["write_pages"]()


def anchors_of(page: str) -> set[str]:
    """Return the anchors of the headings of a page, outside its blocks."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_links_between_pages_lead_to_headings_that_exist() -> None:
    for readme in READMES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", (ROOT / readme).read_text()):
            path = os.path.normpath(Path(readme).parent / target) if target else readme
            assert (ROOT / path).exists(), f"{readme} links to {path}, which does not exist in the repository"
            if anchor:
                page = (ROOT / path).read_text()
                assert anchor in anchors_of(page), f"{readme} links to {path}#{anchor}, which has no such heading"


@pytest.mark.submission
def test_the_site_builds_without_a_warning_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    # `--quiet` would hide warnings from `--strict`.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    built = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    assert len(built) > 20
    loaded = [
        re.findall(r"<(?:script|img|link rel=.(?:stylesheet|preconnect).)[^>]+https?://[^>]*>", page) for page in built
    ]
    assert [tags for tags in loaded if tags] == []
    assert "cost_balanced" in (tmp_path / "site/search/search_index.json").read_text()
    reference = (tmp_path / "site/reference/index.html").read_text()
    listed = re.findall(r'<td><a href="(\w+)\.html">', reference)
    assert [f"reference/{name}.md" for name in listed] == [n for n in generated() if re.match(r"reference/\w+\.md", n)]


def test_no_page_by_hand_is_longer_than_a_reader_reads_at_once_and_the_first_is_a_screen_and_a_half() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 7_000
    pages = (ROOT / "docs").rglob("*.md")
    assert {path.name: size for path in pages if (size := len(path.read_bytes())) > 12_000} == {}


def test_the_reference_is_generated_from_the_code() -> None:
    for page, row in {
        "prepare": "| `data.pack_size` | int, at least 2 | `4096` |",
        "checks/padding-changes-nothing": 'if self._fault != "padding is trained":\n    return rows',
        "groups": "| `parallel=tp2_pp2` |",
        "commands": "## `harness indexed convert`",
        "errors": "| `FormatError` |",
        "families": "| `qwen3_moe` | `Qwen3MoeForCausalLM` | yes |",
    }.items():
        assert row in generated()[f"reference/{page}.md"]


def test_the_tree_of_the_house_names_every_package_and_no_other() -> None:
    tree = next(
        block.text for block in read_blocks((ROOT / "harness/README.md").read_text()) if "errors.py" in block.text
    )
    packages = {path.parent.name for path in (ROOT / "harness").glob("*/__init__.py")}
    modules = {path.name for path in (ROOT / "harness").glob("*.py") if not path.name.startswith("__")}
    assert set(re.findall(r"^  (\w+)/", tree, flags=re.MULTILINE)) == packages
    assert set(re.findall(r"\b(\w+\.py)\b", tree)) == modules


@pytest.mark.parametrize(
    "line",
    [
        *("harness train sft trainer.stepz=2", "torchrun --nproc-per-node 2 -m harness.recipes.sft data.pth=x"),
        *("harness submit sft nodes=2 modle.seed=1", "harness inspcet data/mine"),
        *("harness inspect data/mine --packs 3", "make tset", "docker/biuld.sh"),
    ],
)
def test_a_command_of_a_block_that_is_not_run_still_has_to_exist(line: str) -> None:
    (words,) = logical_commands(line)
    with pytest.raises((AssertionError, HarnessError)):
        check_command(words)


def test_the_page_of_tests_names_every_folder_and_marker() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("_")}
    page = (ROOT / "tests/README.md").read_text()
    assert {name for name in folders if f"`{name}/`" not in page} == set()
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {line.partition(":")[0] for line in options["markers"]}
    assert {name for name in markers if f"`{name}`" not in page} == set()
