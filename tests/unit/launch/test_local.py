"""Ranks as processes of this machine: their exit codes, signals to them, and their end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from harness.launch import local
from harness.launch.local import start_ranks

# Tests may run in the background of a shell, which ignores SIGINT.
LAUNCHER = """import signal, sys
from harness.launch.local import start_ranks
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(start_ranks(sys.argv[1:], 2))"""


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit $((RANK * 2))", 2),
        ("[ $RANK = 1 ] && exit 75; exec sleep 1000", 75),
        ("kill -9 $$", 128 + 9),
        ('[ "$WORLD_SIZE $LOCAL_WORLD_SIZE $LOCAL_RANK $MASTER_ADDR" = "2 2 $RANK 127.0.0.1" ]', 0),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(monkeypatch, script, code):
    monkeypatch.setattr(local, "_GRACE_S", 0.0)
    assert start_ranks(["sh", "-c", script], 2) == code


def test_rank_0_gets_the_listening_socket_of_the_store():
    program = "import os, socket; fd = os.environ.get('HARNESS_STORE_FD'); rank = os.environ['RANK']\n"
    program += "assert (fd is None) == (rank != '0')\n"
    program += "assert fd is None or socket.socket(fileno=int(fd)).getsockname()[1] == int(os.environ['MASTER_PORT'])"
    assert start_ranks([sys.executable, "-S", "-c", program], 2) == 0


def test_ranks_that_outlive_a_failed_one_are_ended(monkeypatch):
    monkeypatch.setattr(local, "_GRACE_S", 0.0)
    monkeypatch.setattr(local, "_KILL_S", 0.2)
    assert start_ranks(["sh", "-c", "[ $RANK = 1 ] && exit 3; trap '' TERM; sleep 1000"], 2) == 3


def test_ranks_end_at_once_where_nobody_reads_their_output(tmp_path):
    late = tmp_path / "late"
    assert start_ranks(["sh", "-c", f"[ $RANK = 0 ] && exit 141; sleep 4; touch {late}"], 2) == 141
    assert not late.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGKILL, None)])
def test_a_signal_to_the_launcher_reaches_every_rank(number, code):
    script = (
        "trap 'echo ended; exit 75' TERM; trap 'echo ended; exit 130' INT; echo ready; while :; do sleep 0.05; done"
    )
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "bash", "-c", script], stdout=subprocess.PIPE, text=True
    ) as job:
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        job.send_signal(number)
        # The end of the output is the end of the last rank.
        assert job.stdout.read().splitlines() == ["ended"] * 2
    assert code is None or job.returncode == code
