"""An error reports what happened, where, and the fix, also from another process; a command then exits with code 2."""

from __future__ import annotations

import pickle

import pytest

from harness.errors import ConfigError, FormatError, HarnessError, LoaderError, exit_on_error, os_errors_as


def test_an_error_reads_as_three_lines():
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


def test_damaged_data_has_a_remedy_of_its_own():
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


def test_a_command_ends_with_code_2_and_the_message_alone(capsys):
    with pytest.raises(SystemExit) as ended, exit_on_error():
        raise ConfigError("steps is 0", where="trainer.steps", fix="1 or more")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "ConfigError: steps is 0\n  where: trainer.steps\n  fix:   1 or more\n"


def test_a_traceback_is_shown_on_request(monkeypatch):
    monkeypatch.setenv("HARNESS_TRACEBACK", "1")
    with pytest.raises(HarnessError), exit_on_error():
        raise ConfigError("steps is 0")


def test_our_own_mistakes_are_not_hidden():
    with pytest.raises(ZeroDivisionError), exit_on_error():
        _ = 1 // 0


def test_only_one_of_many_ranks_with_the_same_fault_reports_it(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SystemExit), exit_on_error():
        raise ConfigError("found by every rank alike")
    assert capsys.readouterr().err == ""


def test_one_rank_per_node_reports_before_the_job_is_joined(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit), exit_on_error():
        raise ConfigError("the dataset is missing on this node")
    assert capsys.readouterr().err == "rank 8: ConfigError: the dataset is missing on this node\n"


def test_a_fault_of_one_rank_of_a_running_job_names_the_rank(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    error = LoaderError("this rank's worker died")
    error.rank = 3
    with pytest.raises(SystemExit), exit_on_error():
        raise error
    assert capsys.readouterr().err == "rank 3: LoaderError: this rank's worker died\n"


def test_a_missing_package_names_the_extra_that_installs_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, exit_on_error():
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")

    assert end.value.code == 2
    assert "the package torch.nn is not installed" in (message := capsys.readouterr().err)
    assert "[train]" in message


def test_a_module_that_should_exist_is_not_taken_for_a_missing_package() -> None:
    with pytest.raises(ModuleNotFoundError), exit_on_error():
        raise ModuleNotFoundError("No module named 'harness.nothing'", name="harness.nothing")
