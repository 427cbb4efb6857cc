"""Targets that fail, hang or cannot be loaded, and commands as targets."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.app import app
from harness.conformance import ConformanceVerdict, Layout, NotSupported, TargetProcess, load_target
from harness.conformance.command import CommandTarget
from harness.conformance.kit import conversations
from harness.errors import ConfigError
from tests.samples.warm_python import warm_python

SAMPLES = Path(__file__).parents[2] / "samples"
COMMAND = (
    f"{SAMPLES / 'command_trainer.py'} --model {{model}} --data {{data}} --steps {{steps}} "
    "--pack {pack_size} --accumulate {microbatches} --save '{save}' --load '{load}' --eval '{eval_data}'"
)
DYING = """
import os, time

class Trainer:
    def build(self, model_folder, data, layout):
        if layout.pack_size:
            os._exit(9)
        if layout.microbatches > 1:
            time.sleep(1000)
        raise ValueError("no such device")
"""


def run(folder: Path, names: list[str], target: str = "", **options) -> list[ConformanceVerdict]:
    options = {"limit_s": 800.0, "python": warm_python(), **options}
    return TargetProcess(target, folder, **options).run(names, lambda verdict: None)


def test_a_process_that_ends_or_raises_fails_one_check_and_not_the_others(tmp_path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    names = ["packed-equals-unpacked", "padding-changes-nothing", "attention-boundaries"]
    first, second, third = run(tmp_path / "run", names, str(tmp_path / "dying.py"))
    assert (first.check, first.outcome) == ("packed-equals-unpacked", "ERROR")
    assert first.text.startswith("the process exited with code 9")
    assert third.outcome == "ERROR"
    assert any(one.text.startswith("ValueError: no such device (") for one in (second, third))


LEAVES_A_PROCESS = """
import multiprocessing
import os
import time
from pathlib import Path

class Trainer:
    def build(self, model_folder, data, layout):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
        Path(os.environ["LEFT"]).joinpath(os.environ.get("RANK", "0")).write_text(str(child.pid))
        return lambda batch: (1.0, 1.0)
"""


def is_running(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("check", ["token-mean-over-ranks", "padding-changes-nothing"])
def test_processes_that_a_trainer_leaves_are_ended(tmp_path, monkeypatch, check) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES_A_PROCESS)
    (left := tmp_path / "left").mkdir()
    monkeypatch.setenv("LEFT", str(left))
    (verdict,) = run(tmp_path / "run", [check], str(tmp_path / "leaves.py"))
    assert verdict.outcome == "FAIL"
    files = [*left.iterdir()]
    assert files  # a rank that fails ends the other, perhaps before it begins
    for file in files:
        while is_running(file.read_text()):
            time.sleep(0.1)  # killed, and not yet gone; the test's limit of time ends it otherwise


def test_a_check_that_hangs_is_ended(tmp_path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    (verdict,) = run(tmp_path / "run", ["conversation-mean"], str(tmp_path / "dying.py"), limit_s=3.0)
    assert verdict.outcome == "ERROR"
    assert verdict.text.startswith("no answer within 3 s")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("missing.py", "No such file"),
        ("harness.conformance:Nothing", "no attribute 'Nothing'"),
        ("no_such_module:Trainer", "No module named"),
        ("harness.conformance:Layout", "no method `build`"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_refused_by_name(spec, words) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_target(spec)
    assert caught.value.where == spec


def test_an_unknown_check_and_a_target_that_is_none_are_refused_with_the_choices(tmp_path) -> None:
    with pytest.raises(ConfigError, match="there is no check 'paddding'") as caught:
        run(tmp_path, ["paddding"], "x.py")
    assert "padding-changes-nothing" in caught.value.fix
    with pytest.raises(ConfigError, match="AttributeError: Nothing"):
        run(tmp_path, ["padding-changes-nothing"], f"{SAMPLES / 'plain_trainer.py'}:Nothing")


def test_a_command_is_a_target(tmp_path) -> None:
    wanted = {
        "packed-equals-unpacked": "PASS",
        "evaluation-mean": "PASS",
        "damaged-checkpoint-is-refused": "PASS",
        "token-mean-over-ranks": "NOT SUPPORTED",
        "shuffle-ignores-workers": "NOT SUPPORTED",
        "end-token-is-trained": "NOT SUPPORTED",
    }
    verdicts = {one.check: one for one in run(tmp_path, list(wanted), command=f"{warm_python()} {COMMAND}")}
    assert {name: one.outcome for name, one in verdicts.items()} == wanted, verdicts
    assert verdicts["token-mean-over-ranks"].text == "the command does not contain {dp_size}"


ECHOING = """
import json, sys
batch_size, load = sys.argv[1:3]
if not load:
    print(json.dumps({"step": 1, **({"loss": int(batch_size)} if batch_size else {})}))
"""


def test_a_command_gets_the_rows_of_a_microbatch_and_may_train_nothing_after_an_epoch(tmp_path) -> None:
    (tmp_path / "echoing.py").write_text(ECHOING)
    data = conversations((8, 60, 12, 40))
    start, end = (
        f"{sys.executable} {tmp_path / 'echoing.py'} ",
        " '{load}' {model} {data} {microbatches} {pack_size} {steps}",
    )
    target = CommandTarget(f"{start}{{batch_size}}{end}")
    sizes = [
        target.build(tmp_path, tmp_path / "data", Layout(**layout))(data)[0]
        for layout in ({}, {"microbatches": 2}, {"pack_size": 96}, {"pack_size": 96, "microbatches": 2})
    ]
    assert sizes == [4, 2, 2, 1]
    target.load(tmp_path)
    assert target.rows(None) == []

    with pytest.raises(NotSupported, match=r"does not contain \{batch_size\}"):
        CommandTarget(f"{start}1{end}").build(tmp_path, tmp_path / "data", Layout())(data)
    with pytest.raises(RuntimeError, match="has no `loss`"):
        CommandTarget(f"{start}''{end}").build(tmp_path, tmp_path / "data", Layout(pack_size=128))(data)


@pytest.mark.parametrize(
    ("command", "words"),
    [("train {model}", "does not contain {data}"), ("train {model} {data} {epochs}", "unknown placeholder {epochs}")],
)
def test_a_command_with_a_wrong_place_is_refused(command, words, tmp_path) -> None:
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, ["padding-changes-nothing"], command=command)


def test_the_command_line_explains_runs_and_saves(tmp_path) -> None:
    listed = CliRunner().invoke(app, ["conformance", "--list"])
    assert "attention-boundaries" in listed.output
    plain, saved = str(SAMPLES / "plain_trainer.py"), tmp_path / "verdicts.json"
    options = ["--checks", "padding-changes-nothing", "--save", str(saved), "--python", warm_python()]
    done = CliRunner().invoke(app, ["conformance", plain, *options])
    assert done.exit_code == 0, done.output
    assert '"outcome": "PASS"' in saved.read_text()
    done = CliRunner().invoke(app, ["conformance", f"{plain}:padding_changes_nothing", *options])
    assert done.exit_code == 1
    assert "expected loss" in done.output
    inside = ["--dir", str(tmp_path / "kept"), "--save", str(tmp_path / "kept" / "verdicts.json")]
    done = CliRunner().invoke(app, ["conformance", plain, *options[:2], *options[4:], *inside])
    assert done.exit_code == 0, done.output
    assert '"outcome": "PASS"' in (tmp_path / "kept" / "verdicts.json").read_text()
    done = CliRunner().invoke(app, ["conformance"])
    assert isinstance(done.exception, ConfigError)


REFUSES = """
import os
import time
from plain_trainer import Trainer

class Refuses(Trainer):
    def rows(self, steps):
        if os.environ.get("RANK") == "1":
            raise FileNotFoundError("no file of rank 1")
        if "RANK" in os.environ:
            time.sleep(2)  # in vain for the other rank
            raise ConnectionResetError
        return super().rows(steps)
"""


def test_a_rank_that_a_checkpoint_is_refused_to_fails_the_check_and_not_another_that_waited_for_it(tmp_path) -> None:
    (tmp_path / "refuses.py").write_text(f"import sys\nsys.path.insert(0, {str(SAMPLES)!r})\n{REFUSES}")
    verdicts = run(tmp_path / "run", ["resume-on-more-ranks"], f"{tmp_path / 'refuses.py'}:Refuses")
    assert [one.outcome for one in verdicts] == ["PASS", "FAIL"]
    assert verdicts[1].text == "what other ranks saved is refused: FileNotFoundError: no file of rank 1"


ONE_RANK_FAILS = """
import os
import time
from harness.conformance import NotSupported
from harness.conformance.model import Reference

class Trainer:
    def build(self, model_folder, data, layout):
        if layout.loss_average == "conversation":
            raise NotSupported("it has no such mean")
        if os.environ["RANK"] == "0":
            return Reference(model_folder).step
        time.sleep(2)  # the other rank passes, and goes on to the next check
        return lambda batch: (99.0, None)
"""


def test_a_check_that_one_rank_began_when_another_failed_the_one_before_is_run_again(tmp_path) -> None:
    (tmp_path / "uneven.py").write_text(ONE_RANK_FAILS)
    names = ["token-mean-over-ranks", "conversation-mean-over-ranks"]
    verdicts = run(tmp_path / "run", names, str(tmp_path / "uneven.py"))
    assert [(one.outcome, one.text) for one in verdicts[1:]] == [("NOT SUPPORTED", "it has no such mean")]
    assert verdicts[0].outcome == "FAIL"
