"""The answers of the nodes, and the faults that are concluded from them."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.errors import HarnessError
from harness.launch.cluster import PreflightConfig
from harness.launch.preflight import probe
from harness.launch.preflight.judge import judge_nodes
from harness.launch.preflight.probe import check_rendezvous, run_checks, share_folder
from harness.launch.ranks import NodePlace

H100 = {"name": "H100", "used_mib": 3}
VERSIONS = {"python": "3.12.3", "torch": "2.9.0", "megatron-core": "0.19.2", "code": "ab", "folder": "/w"}


def line(node: str, check: str, **outcome) -> str:
    return json.dumps({"node": node, "check": check, **outcome})


def lines(*nodes: str, **changed: dict) -> list[str]:
    """Answers of healthy nodes with two GPUs; `changed` replaces the facts of a check on the last node."""
    facts = {
        "versions": VERSIONS,
        "gpus": {"gpus": [H100] * 2, "driver": "570.1"},
        "shm": {"mib": 64000},
        "disk": {"gib": 500.0, "free": 10**6},
        "read rate of /d": {"mib_s": 900.0},
        "first node": {"offset_s": 0.001},
        "dataset /d": {"fingerprint": "f0", "packs": 40},
        "weights /w": {"files": 4, "bytes": 99},
        "live chunks /l": {"folder": "there"},
    }
    return [
        line(node, check, facts=changed.get(check, healthy) if node == nodes[-1] else healthy)
        for node in nodes
        for check, healthy in facts.items()
    ]


LIMITS = PreflightConfig(min_shm_mib=1024, min_disk_gib=10, max_clock_offset_s=2)


def test_healthy_nodes_are_summarized_in_one_line_unless_the_code_of_their_image_differs():
    faults, summary = judge_nodes(lines("n1", "n2", "n3"), ["n1", "n2", "n3"], LIMITS, gpus=2)
    assert faults == []
    expected = "3 nodes, 2 GPUs each, python 3.12.3, torch 2.9.0, megatron-core 0.19.2, clocks within 1.0 ms"
    assert summary == expected
    nodes = ["n1", "n2"]
    assert judge_nodes(lines(*nodes), nodes, LIMITS, gpus=2, code="ab")[0] == []
    faults, _ = judge_nodes(lines(*nodes), nodes, LIMITS, gpus=2, code="cd")
    assert [fault.node for fault in faults] == nodes
    assert "differ from those that submitted the job (cd)" in faults[0].what
    assert "docker/build.sh" in faults[0].fix


@pytest.mark.parametrize(
    ("check", "facts", "message"),
    [
        ("versions", {**VERSIONS, "torch": "2.8.0"}, "versions: torch is 2.8.0, on n1 it is 2.9.0"),
        ("versions", {**VERSIONS, "folder": "/tmp"}, "versions: folder is /tmp, on n1 it is /w"),
        ("gpus", {"gpus": [H100], "driver": "570.1"}, "gpus: nvidia-smi shows 1"),
        (
            "gpus",
            {"gpus": [H100, {**H100, "used_mib": 40960}], "driver": "570.1"},
            "gpus: 40,960 MiB of GPU 1 are in use",
        ),
        ("gpus", {"gpus": [H100] * 2, "driver": "550.9"}, "gpus: driver is 550.9, on n1 it is 570.1"),
        ("shm", {"mib": 64}, "shm: /dev/shm has 64 MiB, loader workers need 1,024"),
        ("disk", {"gib": 3.5}, "disk: 3.5 GiB are free for the run's folder, 10 are required"),
        ("disk", {"free": 3}, "disk: 3 files can be created for the run, 1,000 are required"),
        ("read rate of /d", {"mib_s": 1.5}, "read rate of /d: 1.5 MiB/s, 5 are required"),
        ("first node", {"offset_s": -7.25}, "clock: 7.2 s behind that of the first node"),
        ("dataset /d", {"fingerprint": "f1", "packs": 40}, "dataset /d: fingerprint is f1, on n1 it is f0"),
        ("weights /w", {"files": 4, "bytes": 90}, "weights /w: bytes is 90, on n1 it is 99"),
        ("live chunks /l", {"folder": "missing"}, "live chunks /l: folder is missing, on n1 it is there"),
    ],
)
def test_the_one_node_that_differs_is_named_with_a_fix(check, facts, message):
    faults, _ = judge_nodes(lines("n1", "n2", "n3", **{check: facts}), ["n1", "n2", "n3"], LIMITS, gpus=2)
    assert faults[0].node == "n3"
    assert faults[0].what.startswith(message)
    assert all(fault.fix for fault in faults)


def test_a_node_without_an_answer_is_named_first_and_nodes_that_waited_for_it_last():
    answers = [
        line("n1", "first node", error="no answer within 40 s", where="", fix="", late=True),
        "slurmstepd: something else",
        line("n2", "dataset /d", error="there is no dataset", where="/d", fix="copy it"),
    ]
    faults, _ = judge_nodes(answers, ["n1", "n2", "n3"], PreflightConfig())
    assert [fault.node for fault in faults] == ["n3", "n2", "n1"]
    assert str(faults[1]) == "n2: dataset /d: there is no dataset (/d)\n  fix:   copy it"
    assert faults[0].what == "no answer from the node"
    answers = [line("n1", "all-reduce", rank=rank, error="no GPU", where="", fix="x") for rank in (0, 1)]
    faults, _ = judge_nodes(answers, ["n1"], PreflightConfig())
    assert [fault.what for fault in faults] == ["rank 0, all-reduce: no GPU", "rank 1, all-reduce: no GPU"]


def test_checks_run_side_by_side_and_each_reports_its_facts_its_error_or_that_it_hangs(capsys):
    both = threading.Barrier(2)

    def refuses():
        both.wait(300)
        raise HarnessError("no", where="here", fix="yes")

    def passes():
        both.wait(300)
        return {"a": 1}

    run_checks({"refuses": refuses, "fails": lambda: 1 // 0, "passes": passes}, node="n1", timeout_s=60)
    answers = {answer["check"]: answer for answer in map(json.loads, capsys.readouterr().out.splitlines())}
    assert answers["passes"] == {"node": "n1", "check": "passes", "facts": {"a": 1}}
    assert (answers["refuses"]["error"], answers["refuses"]["fix"]) == ("no", "yes")
    assert answers["fails"]["error"].startswith("ZeroDivisionError")
    run_checks({"hangs": threading.Event().wait}, node="n1", timeout_s=0.1)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["error"], answer["late"]) == ("no answer within 0.1 s", True)


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def place(number: int, num_nodes: int, attempt: str = "7.0") -> NodePlace:
    return NodePlace(f"n{number + 1}", number, num_nodes, attempt)


def test_nodes_meet_at_the_first_one_and_compare_their_clocks(monkeypatch):
    """The clock of each node's thread is ahead by so many seconds; the thread that answers has the first node's."""
    ahead_s = {"n1": 0.0, "n2": 7.25, "n3": -2.5}
    clock = SimpleNamespace(
        time=lambda: 1000.0 + ahead_s.get(threading.current_thread().name, 0.0),
        monotonic=time.monotonic,
        sleep=time.sleep,
    )
    monkeypatch.setattr(probe, "time", clock)
    port, offsets_s = free_port(), {}

    def join(number: int) -> None:
        facts = check_rendezvous(socket.gethostname(), port, place(number, 3), timeout_s=60)
        offsets_s[f"n{number + 1}"] = facts["offset_s"]

    threads = [threading.Thread(target=join, args=(number,), name=f"n{number + 1}") for number in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert offsets_s == ahead_s


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "MASTER_ADDR '' does not resolve"),
        ("no-such-node.invalid", "MASTER_ADDR 'no-such-node.invalid' does not resolve"),
        ("127.0.0.1", "is each node's loopback"),
        ("localhost", "is each node's loopback"),
    ],
)
def test_an_address_that_cannot_be_the_first_nodes_is_refused_without_connecting(address, message, monkeypatch):
    monkeypatch.setattr(probe, "_exchange", lambda *_: pytest.fail("connected"))
    with pytest.raises(HarnessError, match=message):
        check_rendezvous(address, free_port(), place(1, 2), timeout_s=20)


def test_an_address_where_nothing_or_another_job_answers_and_a_port_in_use_are_refused():
    own = socket.gethostname()
    with pytest.raises(HarnessError, match="does not answer at MASTER_ADDR"):
        check_rendezvous(own, free_port(), place(1, 2), timeout_s=0.3)
    port = free_port()
    first = threading.Thread(
        target=check_rendezvous, args=(own, port, place(0, 2, "8.0")), kwargs={"timeout_s": 60}, daemon=True
    )
    first.start()
    wait_until_listening(own, port)
    with pytest.raises(HarnessError, match="is not a node of this job"):
        check_rendezvous(own, port, place(1, 2), timeout_s=1)
    check_rendezvous(own, port, place(1, 2, "8.0"), timeout_s=60)
    first.join(300)
    with socket.create_server(("", 0)) as server, pytest.raises(HarnessError, match="cannot listen on port"):
        check_rendezvous("n1", server.getsockname()[1], place(0, 1), timeout_s=1)


def wait_until_listening(address: str, port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection((address, port), timeout=10).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"nothing listens on port {port}")


def test_a_folder_that_the_nodes_do_not_share_is_reported(tmp_path):
    with pytest.raises(HarnessError, match="not shared: it does not exist here"):
        share_folder(tmp_path / "run", place(1, 2), timeout_s=0.1)
    share_folder(tmp_path / "run", place(0, 2), timeout_s=0.1)
    share_folder(tmp_path / "run", place(1, 2), timeout_s=0.1)
    with pytest.raises(HarnessError, match="a file that the first node wrote there does not appear"):
        share_folder(tmp_path / "run", place(1, 2, "8.0"), timeout_s=0.2)


def test_the_command_of_a_script_judges_by_its_settings(harness, monkeypatch, tmp_path):
    paths = {"srun": tmp_path / "srun", "failed": tmp_path / "failed"}
    paths["srun"].write_text("srun: error: node2: task 1: Killed\n")
    facts = [{"check": "gpus", "facts": {"gpus": [], "driver": "none"}}, {"check": "shm", "facts": {"mib": 63}}]
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("".join(json.dumps({"node": "node1", **fact}) + "\n" for fact in facts))
    )
    arguments = [f"{name}={path}" for name, path in paths.items()]
    settings = ("cluster.gpus_per_node=1", "cluster.preflight.min_shm_mib=64")
    code, printed, _ = harness("preflight", "judge", "node1,node2", *arguments, *settings)
    assert code == 1  # none is left to run the job
    assert "preflight: node2: launch: Killed" in printed
    assert "preflight: node1: gpus: nvidia-smi shows 0, the job asks for 1" in printed
    assert "preflight: node1: shm: /dev/shm has 63 MiB, loader workers need 64" in printed


def test_the_command_of_a_script_probes_what_the_run_needs(harness, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "harness.launch.preflight.probe.node_checks", lambda place, **needed: asked.update(needed) or {}
    )
    monkeypatch.setattr("os._exit", lambda code: None)
    needed = ('data.path=[/a,"/b,c"]', "data.live.path=[/l]", "model.init_from=/w", "cluster.preflight.timeout_s=7")
    assert harness("preflight", "probe", "/run", *needed)[0] == 0
    expected = {"run_dir": Path("/run"), "data": ["/a", "/b,c"], "weights": "/w", "live": ["/l"], "timeout_s": 7.0}
    assert asked == expected
