"""Any text in any setting of a job is refused by name, or its script has the directives and commands of any other.

Each script is run by Bash in an empty folder of commands, where a function records the name of each command.
"""

from __future__ import annotations

import random
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import ConfigError
from harness.launch.cluster import ClusterConfig
from harness.launch.script import Job, render
from harness.printing import one_line

SAFE = "safe"
HOSTILE = (
    *("$(touch canary)", "`touch canary`", ";touch canary;", "&touch canary&", "|touch canary", "\ntouch canary\n"),
    *("\n#SBATCH --wrap=x\n", "#SBATCH --wrap=x", " ", "'", '"', "\\", "$HOME", "${IFS}", "(", ")", "{", "}", "[", "]"),
    *("<<EOF", ">canary", "<", "*", "?", "~", "!", "#", "%N", "%j", "@local@", "@image@", "\t", "\r", "\0", "\x1b[2J"),
    *("\u202e", "\ud800", "\u00e9", "a", "=", ",", ":", "--x", "/x", "if true", "while :; do", "done", "EOF", "\\\n"),
)
JOINED = st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=4).map("".join)
TEXTS = st.one_of(JOINED, st.text(min_size=1, max_size=8))
JOB = Job(
    "name", 2, "harness.recipes.sft", ("a=b",), "/runs/a", "/work", "/bin/python", ("/d",), ("/d",), "/w", ("/l",)
)
CLUSTER = ClusterConfig(
    image="/i.sqsh", mounts=["/a:/a"], local_dir="/scratch/me", spares=1, mpi="pmix", env={"GIVEN": "b"}
)
BARE = ClusterConfig(gpus_per_node=1, cpu_bind="cores", setup=["true"], sbatch=["--a=b"])
NOT_TEXT = {"launcher", "successor", "time"}  # choices, and a time of digits


HANDLER = """command_not_found_handle() {
  echo "$1" >>"$calls"
  while read -r; do :; done
  [[ $* != "scontrol requeue"* ]] || kill -9 $$
  [[ $1 != scontrol ]] || printf 'n1\\nn2\\nn3\\n'
}
"""


def text_fields(config: Any) -> list[str]:
    """Return the names of all fields that hold texts, those of tomorrow too."""
    kinds = ("str", "str | None", "list[str]", "tuple[str, ...]", "dict[str, str]")
    return [one.name for one in fields(config) if one.type in kinds and one.name not in NOT_TEXT]


def put(config: Any, name: str, text: str) -> Any:
    value = getattr(config, name)
    kinds = {list: [text], tuple: (text,), dict: {"GIVEN": text}}
    return replace(config, **{name: kinds.get(type(value), text)})


@cache
def commands_of(script: str) -> list[str]:
    """Run a script without any command but those of Bash; return the names of those that it would start, in order."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "logs").mkdir()
        before = f"calls={folder}/calls; PATH={folder}/none; cd {folder}\n{HANDLER}"
        job = Path(folder) / "job"
        job.write_text(before + script.replace("/runs/a", folder), errors="surrogateescape")
        variables = {"ID": "7", "NAME": "name", "NUM_NODES": "3", "NODELIST": "n"}
        done = subprocess.run(
            ["/bin/bash", job],
            env={f"SLURM_JOB_{name}": value for name, value in variables.items()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert not (Path(folder) / "canary").exists(), script
        calls = Path(folder) / "calls"
        assert calls.exists(), done.stderr
        return sorted(set(calls.read_text().splitlines()))


def directives_of(script: str) -> list[str]:
    # Slurm reads none after the first command.
    return re.findall("^#SBATCH (--[a-z-]+)", script.partition("\nset -uo pipefail\n")[0], re.MULTILINE)


def parse(scripts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, script in enumerate(scripts):
            (Path(folder) / f"{number}").write_text(script)
        loop = 'shopt -s nullglob; for job in *; do /bin/bash -n "$job" || cat -n "$job"; done'
        done = subprocess.run(["/bin/bash", "-c", loop], cwd=folder, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def check(name: str, text: str, make: Callable[[str], str], scripts: list[str], *, is_run: bool = False) -> None:
    """Compare the script of a text with that of a safe word, where the text is not refused, and add it to `scripts`."""
    script, refused = "", None
    try:
        script = make(text)
    except ConfigError as error:
        refused = error
    if refused is not None:
        assert name in refused.where, refused
        return
    scripts.append(script)
    plain = make(f"/{SAFE}" if text.startswith("/") else f"--{SAFE}" if text.startswith("--") else SAFE)
    # A directive of any name, in cluster.sbatch.
    shown = len if name == "sbatch" else list
    assert shown(directives_of(script)) == shown(directives_of(plain))
    if name != "setup":  # which is commands
        assert len(script.splitlines()) == len(plain.splitlines())
        assert not is_run or commands_of(script) == commands_of(plain)


CASES = [
    (kind, config, name)
    for kind, config in {"job": JOB, "container": CLUSTER, "bare": BARE}.items()
    for name in text_fields(config)
]
# The nightly run has all.
SAMPLED = random.Random(0).sample(range(len(CASES)), len(CASES) // 3)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(
            *(config, name), id=f"{kind}-{name}", marks=pytest.mark.submission if at in SAMPLED else pytest.mark.nightly
        )
        for at, (kind, config, name) in enumerate(CASES)
    ],
)
def test_a_text_of_any_setting_changes_neither_directives_nor_commands(config: Any, name: str) -> None:
    scripts: list[str] = []

    def make(text: str) -> str:
        changed = put(config, name, text)
        # Mounts are of a container.
        changed = replace(changed, image="/i") if name == "mounts" else changed
        return render(changed, CLUSTER) if config is JOB else render(JOB, changed)

    @given(TEXTS)
    @settings(max_examples=20, deadline=None, database=None, derandomize=True)
    def check_any(text: str) -> None:
        check(name, text, make, scripts)

    for text in HOSTILE:
        check(name, text, make, scripts)
    for text in ("".join(text for text in HOSTILE if one_line(text) == text), *HOSTILE[:3]):
        for start in ("", "/", "--"):
            check(name, start + text, make, scripts, is_run=True)
    check_any()
    parse(scripts)


@pytest.mark.parametrize(
    "lines",
    [
        ["export A='b"],
        ['export A="b'],
        ["if true; then"],
        ["cat <<EOF", "x"],
        ["export A=\\"],
        ["f() {"],
        ["}"],
        ["A=$(true"],
        ["case x in"],
        ["true &&"],
        ["export A=`true"],
        # Nothing around the lines may close what they open, nor be closed by them.
        ["}", "{ true"],
        [": ; } ; {", ": ; } ; { :"],
        ["fi", "if true; then :"],
        [")", "(true"],
        ["done", "while false; do :"],
        ["esac", "case x in x) :"],
        ["true", "# a", "export A=\\"],
        # As the job parses it: a line of its own sets the option for those after it.
        ["echo !(x)"],
        ["shopt -s extglob; echo !(x)"],
        ["echo !(x)", "shopt -s extglob"],
        ["shopt -s extglob", "echo !(x"],
    ],
)
def test_lines_that_would_take_those_after_them_are_refused(lines: list[str]) -> None:
    with pytest.raises(ConfigError, match="the lines are not complete commands"):
        render(JOB, replace(CLUSTER, setup=lines))


def test_lines_run_as_a_shell_runs_them_and_the_rest_of_the_script_with_its_options() -> None:
    script = render(JOB, replace(CLUSTER, env={}, setup=["a=${NOT_SET#x}", "export A=$NOT_SET${a}b"]))
    before = script.partition("\nrun_dir=")[0]
    for last, code in (("[[ $A == b ]]", 0), ('echo "$NOT_SET"', 127), ("false | true", 1)):
        assert subprocess.run(["bash", "-c", f"{before}\n{last}"], capture_output=True, check=False).returncode == code


def test_complete_lines_are_kept_as_they_are_and_names_of_variables_are_checked() -> None:
    lines = ["if true; then", "  export A=\"a  'b'\"", "fi  # done", "shopt -s extglob", "echo !(x)", "cat <<E\nE"]
    assert "\n".join(lines) in render(JOB, replace(CLUSTER, setup=lines))
    with pytest.raises(ConfigError, match="is not a variable name"):
        replace(CLUSTER, env={"A;touch canary": "b"})
