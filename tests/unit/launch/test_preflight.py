"""What nodes say of themselves, and what is concluded from it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import replace

import pytest

from harness.errors import HarnessError
from harness.launch.preflight.judge import Limits, judge_nodes
from harness.launch.preflight.meet import check_meeting
from harness.launch.preflight.probe import Place, read_gpus, run_checks, share_folder

VERSIONS = {"python": "3.12.3", "torch": "2.9.0", "megatron-core": "0.19.2", "code": "ab", "folder": "/w"}


def line(node: str, check: str, **told) -> str:
    return json.dumps({"node": node, "check": check, **told})


def lines(*nodes: str, **changed: dict) -> list[str]:
    """Good nodes with two GPUs; `changed` says what `check` is on the last one."""
    facts = {
        "versions": VERSIONS,
        "gpus": {"gpus": [{"name": "H100", "used_mib": 3}] * 2, "driver": "570.1"},
        "shm": {"mib": 64000},
        "disk": {"gib": 500.0},
        "first node": {"offset_s": 0.001},
        "dataset /d": {"fingerprint": "f0", "packs": 40},
        "weights /w": {"files": 4, "bytes": 99},
        "live chunks /l": {"folder": "there"},
    }
    return [
        line(node, check, facts=changed.get(check, one) if node == nodes[-1] else one)
        for node in nodes
        for check, one in facts.items()
    ]


LIMITS = Limits(gpus=2, min_shm_mib=1024, min_disk_gib=10, max_clock_offset_s=2)


def test_good_nodes_are_told_in_a_line():
    findings, right = judge_nodes(lines("n1", "n2", "n3"), ["n1", "n2", "n3"], LIMITS)
    assert findings == []
    expected = "3 nodes, 2 GPUs each, python 3.12.3, torch 2.9.0, megatron-core 0.19.2, clocks within 1.0 ms"
    assert right == expected


@pytest.mark.parametrize(
    ("check", "facts", "said"),
    [
        ("versions", {**VERSIONS, "torch": "2.8.0"}, "versions: torch is 2.8.0, on n1 it is 2.9.0"),
        ("versions", {**VERSIONS, "folder": "/tmp"}, "versions: folder is /tmp, on n1 it is /w"),
        ("gpus", {"gpus": [{"name": "H100", "used_mib": 3}], "driver": "570.1"}, "gpus: nvidia-smi shows 1"),
        (
            "gpus",
            {"gpus": [{"name": "H100", "used_mib": 3}, {"name": "H100", "used_mib": 40960}], "driver": "570.1"},
            "gpus: 40,960 MiB of GPU 1 are taken before the job has begun",
        ),
        (
            "gpus",
            {"gpus": [{"name": "H100", "used_mib": 3}] * 2, "driver": "550.9"},
            "gpus: driver is 550.9, on n1 it is 570.1",
        ),
        ("shm", {"mib": 64}, "shm: /dev/shm has 64 MiB, loader workers need 1,024"),
        ("disk", {"gib": 3.5}, "disk: 3.5 GiB are free where the run's folder is, of 10"),
        ("first node", {"offset_s": -7.25}, "clock: 7.2 s behind the first node's"),
        ("dataset /d", {"fingerprint": "f1", "packs": 40}, "dataset /d: fingerprint is f1, on n1 it is f0"),
        ("weights /w", {"files": 4, "bytes": 90}, "weights /w: bytes is 90, on n1 it is 99"),
        ("live chunks /l", {"folder": "missing"}, "live chunks /l: folder is missing, on n1 it is there"),
    ],
)
def test_the_one_node_that_differs_is_named_with_what_to_do(check, facts, said):
    findings, _ = judge_nodes(lines("n1", "n2", "n3", **{check: facts}), ["n1", "n2", "n3"], LIMITS)
    assert findings[0].node == "n3"
    assert findings[0].what.startswith(said)
    assert all(finding.fix for finding in findings)


def test_an_image_of_other_code_than_what_submitted_is_told():
    nodes = ["n1", "n2"]
    assert judge_nodes(lines(*nodes), nodes, replace(LIMITS, code="ab"))[0] == []
    findings, _ = judge_nodes(lines(*nodes), nodes, replace(LIMITS, code="cd"))
    assert [finding.node for finding in findings] == nodes
    assert "not those that submitted the job (code cd)" in findings[0].what
    assert "docker/build.sh" in findings[0].fix


def test_a_silent_node_is_named_first_and_those_that_waited_for_another_last():
    said = [
        line("n1", "first node", error="no answer within 40 s", where="", fix="", late=True),
        "slurmstepd: something else",
        line("n2", "dataset /d", error="there is no dataset", where="/d", fix="copy it"),
    ]
    findings, _ = judge_nodes(said, ["n1", "n2", "n3"], Limits())
    assert [finding.node for finding in findings] == ["n3", "n2", "n1"]
    assert str(findings[1]) == "n2: dataset /d: there is no dataset (/d)\n  fix:   copy it"
    assert findings[0].what == "the node has said nothing"


def test_of_many_ranks_of_a_node_every_error_is_told():
    said = [line("n1", "all-reduce", rank=rank, error="no GPU", where="", fix="x") for rank in (0, 1)]
    findings, _ = judge_nodes(said, ["n1"], Limits())
    assert [finding.what for finding in findings] == ["rank 0, all-reduce: no GPU", "rank 1, all-reduce: no GPU"]


def test_checks_run_side_by_side_and_one_that_hangs_is_told_in_time(capsys):
    def refuses():
        raise HarnessError("no", where="here", fix="yes")

    began = time.monotonic()
    checks = {"hangs": threading.Event().wait, "refuses": refuses, "fails": lambda: 1 // 0, "is well": lambda: {"a": 1}}
    run_checks(checks, node="n1", timeout_s=0.5)
    assert time.monotonic() - began < 5
    told = {one["check"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert told["is well"] == {"node": "n1", "check": "is well", "facts": {"a": 1}}
    assert (told["refuses"]["error"], told["refuses"]["fix"]) == ("no", "yes")
    assert told["fails"]["error"].startswith("ZeroDivisionError")
    assert (told["hangs"]["error"], told["hangs"]["late"]) == ("no answer within 0.5 s", True)


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def test_nodes_meet_at_the_first_one_and_compare_clocks():
    port, found = free_port(), {}

    def join(number: int) -> None:
        found[number] = check_meeting(
            socket.gethostname(), port, name=f"n{number}", attempt="7.0", number=number, num_nodes=3, timeout_s=20
        )

    threads = [threading.Thread(target=join, args=(number,)) for number in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [0, 1, 2]
    assert all(abs(one["offset_s"]) < 1 for one in found.values())


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "MASTER_ADDR '' is no known name"),
        ("no-such-node.invalid", "MASTER_ADDR 'no-such-node.invalid' is no known name"),
        ("127.0.0.1", "is every node's own loopback"),
        ("localhost", "is every node's own loopback"),
    ],
)
def test_an_address_that_cannot_be_the_first_nodes_is_refused_at_once(address, said):
    began = time.monotonic()
    with pytest.raises(HarnessError, match=said):
        check_meeting(address, free_port(), name="n2", attempt="7.0", number=1, num_nodes=2, timeout_s=20)
    assert time.monotonic() - began < 10


def test_an_address_where_nobody_or_another_job_answers_is_refused():
    own = socket.gethostname()
    with pytest.raises(HarnessError, match="does not answer at MASTER_ADDR"):
        check_meeting(own, free_port(), name="n2", attempt="7.0", number=1, num_nodes=2, timeout_s=0.3)
    port = free_port()
    first = threading.Thread(
        target=check_meeting,
        args=(own, port),
        daemon=True,
        kwargs={"name": "n1", "attempt": "8.0", "number": 0, "num_nodes": 2, "timeout_s": 3},
    )
    first.start()
    with pytest.raises(HarnessError, match="is no node of this job"):
        check_meeting(own, port, name="n2", attempt="7.0", number=1, num_nodes=2, timeout_s=1)
    first.join()


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("", 0)) as server, pytest.raises(HarnessError, match="cannot listen on port"):
        check_meeting("n1", server.getsockname()[1], name="n1", attempt="7.0", number=0, num_nodes=1, timeout_s=1)


def test_a_folder_that_other_nodes_do_not_have_is_not_shared(tmp_path):
    with pytest.raises(HarnessError, match="not shared: there is no such folder here"):
        share_folder(tmp_path / "run", Place("n2", 1, 2, "7.0"), timeout_s=0.1)
    share_folder(tmp_path / "run", Place("n1", 0, 2, "7.0"), timeout_s=0.1)
    share_folder(tmp_path / "run", Place("n2", 1, 2, "7.0"), timeout_s=0.1)
    with pytest.raises(HarnessError, match="what the first node wrote there does not appear"):
        share_folder(tmp_path / "run", Place("n2", 1, 2, "8.0"), timeout_s=0.2)


def test_gpus_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor used in 4 51234; do echo "NVIDIA H100 80GB HBM3, 570.124.06, $used"; done\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    used = [gpu["used_mib"] for gpu in read_gpus()["gpus"]]
    assert (used, read_gpus()["driver"]) == ([4, 51234], "570.124.06")
    program.write_text("#!/bin/sh\necho 'Unable to determine the device handle for GPU0000:1B:00.0'\nexit 15\n")
    with pytest.raises(HarnessError, match="nvidia-smi ends with code 15: Unable to determine"):
        read_gpus()
