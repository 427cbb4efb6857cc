"""An error reports what happened, where, and the fix, also from another process; a command then exits with code 2."""

from __future__ import annotations

import errno
import os
import pickle
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.errors import (
    ConfigError,
    FormatError,
    HarnessError,
    LoaderError,
    exit_on_error,
    os_error_of,
    os_errors_as,
    reason_of_memory,
)


def test_an_error_reads_as_three_lines_and_damaged_data_has_a_remedy_of_its_own():
    error = FormatError(
        "pack 512 has 4,096 tokens but 4,095 loss_mask entries",
        where="shard-00003.parquet, row 12",
        fix="write it again",
    )
    assert str(error) == (
        "pack 512 has 4,096 tokens but 4,095 loss_mask entries\n"
        "  where: shard-00003.parquet, row 12\n"
        "  fix:   write it again"
    )
    assert str(ConfigError("no place, no remedy")) == "no place, no remedy"
    assert (
        FormatError("pack 3 is damaged").fix
        == "copy the data again, or write it again; `harness verify` lists all damage"
    )
    assert FormatError("the mask is short", fix="write it again").fix == "write it again"


def test_an_error_of_the_system_becomes_one_of_ours_with_its_reason(tmp_path):
    with (
        pytest.raises(ConfigError) as raised,
        os_errors_as(ConfigError, "not read", where=tmp_path, fix="name another"),
    ):
        (tmp_path / "nowhere").read_bytes()
    assert str(raised.value) == f"not read: No such file or directory\n  where: {tmp_path}\n  fix:   name another"


def test_an_error_of_a_worker_process_arrives_whole():
    sent = LoaderError("what", where="where", fix="fix")
    arrived = pickle.loads(pickle.dumps(sent))
    assert type(arrived) is LoaderError
    assert (arrived.what, arrived.where, arrived.fix) == ("what", "where", "fix")


def test_a_command_ends_with_code_2_and_the_message_alone_without_a_request_for_more(capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended, exit_on_error():
        raise ConfigError("steps is 0", where="trainer.steps", fix="1 or more")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "ConfigError: steps is 0\n  where: trainer.steps\n  fix:   1 or more\n"
    monkeypatch.setenv("HARNESS_TRACEBACK", "1")
    with pytest.raises(HarnessError), exit_on_error():
        raise ConfigError("steps is 0")


@pytest.mark.parametrize(
    ("rank", "local_rank", "is_its_own", "reported"),
    [
        ("3", "3", False, ""),  # every rank finds it
        ("8", "0", False, "rank 8: LoaderError: what\n"),  # one rank per node, before the job is joined
        ("3", "3", True, "rank 3: LoaderError: what\n"),
    ],
)
def test_a_fault_is_reported_once_and_by_its_rank_if_it_is_of_one(
    monkeypatch, capsys, rank, local_rank, is_its_own, reported
):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    error = LoaderError("what")
    error.rank = int(rank) if is_its_own else None
    with pytest.raises(SystemExit), exit_on_error():
        raise error
    assert capsys.readouterr().err == reported
    # A launcher that ends all ranks with the first lets another one print it.
    assert bool(waits) == (not reported)


def test_a_full_disk_and_a_missing_package_are_named(capsys):
    with pytest.raises(SystemExit) as ended, exit_on_error():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/out/shard")
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "HarnessError: a disk could not be written to or read: No space left on device\n"
        "  where: /data/out/shard\n"
        "  fix:   free disk space or check the disk (dmesg), then run the same command again\n"
    )
    with pytest.raises(SystemExit) as end, exit_on_error():
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")

    assert end.value.code == 2
    assert "the package torch.nn is not installed" in (message := capsys.readouterr().err)
    assert "[train]" in message


@pytest.mark.parametrize(
    "mistake",
    [
        ZeroDivisionError(),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "config"),
        ModuleNotFoundError("No module named 'harness.nothing'", name="harness.nothing"),
    ],
)
def test_a_mistake_of_the_program_keeps_its_traceback(mistake):
    with pytest.raises(type(mistake)), exit_on_error():
        raise mistake


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_a_full_disk_does_not_take_ends_with_code_2_and_no_traceback():
    program = "from harness.errors import exit_on_error\nwith exit_on_error():\n    print('three packs')\n"
    with Path("/dev/full").open("w") as full:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        program = [sys.executable, "-c", program]
        ended = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, env=kept, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("HarnessError: standard output cannot be written: No space left on device\n")
    assert "Exception" not in ended.stderr


def test_a_full_disk_under_a_library_in_rust_is_an_error_of_the_system(tmp_path):
    with pytest.raises(ConfigError) as raised, os_errors_as(ConfigError, "not saved", where=tmp_path):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert raised.value.what == "not saved: No space left on device"
    with pytest.raises(RuntimeError), os_errors_as(ConfigError, "not saved", where=tmp_path):
        raise RuntimeError("of another kind")


def test_errors_that_are_each_other_s_reason_end_a_command() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert reason_of_memory(first) is None
    second.__cause__ = MemoryError()
    assert reason_of_memory(first) is not None
    ended = SystemExit(2)
    ended.__context__, second.__cause__ = first, first
    with pytest.raises(SystemExit, match="2"), exit_on_error():
        raise ended


@pytest.mark.parametrize(("arguments", "read"), [("", ""), ("reads_input=True", "yes")])
def test_only_a_command_that_reads_standard_input_is_given_it(arguments: str, read: str) -> None:
    child = "import sys; print(sys.stdin.read().strip())"
    program = "import subprocess, sys\nfrom harness.errors import exit_on_error\n"
    program += f"with exit_on_error({arguments}):\n    subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    done = subprocess.run([sys.executable, "-c", program], input="yes\n", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == read


@pytest.mark.parametrize("number", ["9" * 30, "9" * 5000])
def test_a_number_that_no_system_has_is_no_error_of_the_system(number: str) -> None:
    assert os_error_of(ValueError(f"(os error {number})")) is None


ECHO = "import sys\nfrom harness.errors import exit_on_error\nfrom harness.printing import print_text\n"
ECHO += (
    "with exit_on_error():\n    print_text('3 \\u2192 4')\n    print_text(repr(sys.stdin.read()), file=sys.stderr)\n"
)


@pytest.mark.parametrize(
    ("streams", "output"),
    [("<&-", "3 \u2192 4\n"), (">&-", ""), ("<&- >&-", ""), ("", "3 ? 4\n")],
    ids=["no input", "no output", "neither", "output of few letters"],
)
def test_a_command_runs_whatever_its_standard_streams_are(streams: str, output: str) -> None:
    encoding = "utf-8" if streams else "ascii"
    done = subprocess.run(
        f"exec {shlex.join([sys.executable, '-c', ECHO])} {streams}",
        shell=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding="utf-8",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "''\n")
