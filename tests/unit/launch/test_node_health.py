"""Faults of nodes from recorded output of srun, nvidia-smi, the kernel and DCGM, and from measured rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.launch.preflight.hardware import (
    parse_dcgm,
    parse_gpu_states,
    parse_xids,
    read_inodes,
    read_ports,
    read_rate,
)
from harness.launch.preflight.judge import Fault, Limits, culprits, judge_nodes
from harness.launch.preflight.srun import read_srun

NODES = ["node1", "node2", "node3"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [  # Slurm 22.05, on a cluster of three nodes
        (
            [
                "1: slurmstepd-node2: error: execve(): /shared/py: Permission denied",
                "srun: error: node2: task 1: Exited with exit code 13",
            ],
            {"node2": "permission: /shared/py: Permission denied"},
        ),
        (
            ["1: slurmstepd-node2: error: execve(): bad interpreter(/opt/python): No such file or directory"],
            {"node2": "interpreter: bad interpreter(/opt/python): No such file or directory"},
        ),
        (
            [
                "srun: error: Task launch for StepId=7.0 failed on node node2: Communication connection failure",
                "srun: error: Application launch failed: Communication connection failure",
                "srun: Job step aborted",
            ],
            {"node2": "launch: Communication connection failure"},
        ),
        (
            ["srun: error: node2: task 1: Exited with exit code 3", "1: ModuleNotFoundError: No module named 'torch'"],
            {"node2": "launch: Exited with exit code 3: ModuleNotFoundError: No module named 'torch'"},
        ),
        (["srun: error: node2: task 1: Killed"], {"node2": "launch: Killed"}),
        (["srun: error: node[2-3]: tasks 1-2: Out Of Memory"], dict.fromkeys(NODES[1:], "memory: Out Of Memory")),
        (  # without the node's name, as newer versions print it
            [
                "2: slurmstepd: error: pyxis: couldn't start container",
                "srun: error: node3: task 2: Exited with exit code 1",
            ],
            {"node3": "container: pyxis: couldn't start container"},
        ),
        (["1: slurmstepd-node2: error: couldn't chdir to `/w': No such file or directory: going to /tmp instead"], {}),
        (
            [
                "0: slurmstepd-node1: error: *** STEP 1.1 ON node1 CANCELLED AT 2026-11-22T23:56:09 ***",
                "srun: error: node2: task 1: Killed",
            ],
            {},
        ),
        *(
            (["srun: forcing job termination", "srun: got SIGCONT", f"srun: error: node2: task 1: {end}"], {})
            for end in ("Killed", "Terminated", "Exited with exit code 143")
        ),
    ],
)
def test_the_node_that_failed_and_why_is_read_from_srun(lines, expected):
    causes, _ = read_srun(lines, NODES)
    assert {node: what for node, (what, _) in causes.items()} == expected
    assert all(fix for _, fix in causes.values())


def test_nodes_that_srun_stopped_for_a_neighbor_are_not_blamed():
    errors = [
        "srun: error: Task launch for StepId=7.0 failed on node node2: Communication connection failure",
        "srun: Job step aborted",
    ]
    answers = ['0: {"node": "node1", "check": "shm", "facts": {"mib": 9000}}']
    faults, _ = judge_nodes(answers, NODES, Limits(), srun=errors)
    assert [(fault.node, fault.what) for fault in faults] == [("node2", "launch: Communication connection failure")]
    # Without a cause, every node without an answer is named.
    assert [fault.node for fault in judge_nodes(answers, NODES, Limits())[0]] == ["node2", "node3"]


# As `nvidia-smi -q -x` of driver 550 prints an H100, cut to what is read.
GPU = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>550.54.15</driver_version>
  <gpu id="00000000:1B:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <uuid>GPU-7c1b</uuid>
    <pci><pci_gpu_link_info>
      <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
      <link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
    </pci_gpu_link_info></pci>
    <fabric><state>Completed</state><status>Success</status></fabric>
    <gpu_recovery_action>None</gpu_recovery_action>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <ecc_errors>
      <volatile>
        <sram_correctable>0</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <dram_correctable>7</dram_correctable>
        <dram_uncorrectable>0</dram_uncorrectable>
      </volatile>
      <aggregate>
        <dram_uncorrectable>2</dram_uncorrectable>
        <sram_threshold_exceeded>No</sram_threshold_exceeded>
      </aggregate>
    </ecc_errors>
    <remapped_rows>
      <remapped_row_corr>0</remapped_row_corr>
      <remapped_row_unc>1</remapped_row_unc>
      <remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
  </gpu>
</nvidia_smi_log>
"""


@pytest.mark.parametrize(
    ("healthy", "faulty", "message"),
    [
        ("", "", None),
        (
            "<dram_uncorrectable>0<",
            "<dram_uncorrectable>3<",
            "3 uncorrectable ECC errors since the last reset (dram_uncorrectable)",
        ),
        ("exceeded>No<", "exceeded>Yes<", "its SRAM has more errors than the threshold for replacement"),
        ("failure>No<", "failure>Yes<", "a row of its memory could not be remapped"),
        ("pending>No<", "pending>Yes<", "a row of its memory is remapped only after a reset"),
        ("hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active", "its clocks are lowered: hw thermal slowdown"),
        ("<current_link_width>16x", "<current_link_width>8x", "its PCIe link has 8x lanes of 16x"),
        ("<state>Completed", "<state>In Progress", "NVSwitch's fabric is In Progress"),
        ("action>None", "action>Drain and Reset", "the driver asks for recovery: Drain and Reset"),
    ],
)
def test_faults_of_a_gpu_are_read_from_nvidia_smi(healthy, faulty, message):
    (state,) = parse_gpu_states(GPU.replace(healthy, faulty))
    assert state["faults"] == ([message] if message else [])
    assert state["bus"] == "00000000:1B:00.0"


def test_output_of_nvidia_smi_that_is_not_xml_is_refused():
    with pytest.raises(HarnessError, match="is not XML"):
        parse_gpu_states("Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error")


def test_errors_after_which_a_gpu_has_to_be_reset_are_read_from_the_kernels_log():
    log = (
        "[ 99.1] NVRM: Xid (PCI:0000:1b:00): 31, pid=77, name=python, MMU Fault\n"
        "[100.2] NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "[100.3] NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    )
    (found,) = parse_xids(log)
    assert found.startswith("Xid 79 of GPU 0000:1b:00: ")
    assert found.endswith("GPU has fallen off the bus.")


def test_a_failure_that_dcgm_reports_is_read_and_a_warning_is_not():
    table = """+---------------------------+----------------------------------------------------------+
| Health Monitor Report                                                                |
+===========================+==========================================================+
| Overall Health            | {0}                                                      |
| GPU                       |                                                          |
| -> 0                      | {0}                                                      |
|    -> Errors              |                                                          |
|       -> NVLink system    | {0}                                                      |
|                           | Detected 16 NvLink errors on GPU 0's NVLink 3            |
+---------------------------+----------------------------------------------------------+
"""
    (failure,) = parse_dcgm(table.format("Failure"))
    assert "Detected 16 NvLink errors on GPU 0's NVLink 3" in failure
    assert parse_dcgm(table.format("Warning")) == parse_dcgm("") == []


def adapters(root: Path, **states: str) -> Path:
    for name, state in states.items():
        port = root / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "phys_state").write_text("5: LinkUp\n" if "ACTIVE" in state else "3: Disabled\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    return root


def test_ports_that_nccl_is_to_use_have_to_be_active(tmp_path, monkeypatch):
    root = adapters(tmp_path / "ib", mlx5_0="4: ACTIVE", mlx5_1="4: ACTIVE", mlx5_2="1: DOWN")
    monkeypatch.setenv("NCCL_IB_HCA", "=mlx5_0,mlx5_1")
    assert read_ports(root) == {"active ports": 2, "rates": "400 Gb/sec (4X NDR)"}
    monkeypatch.setenv("NCCL_IB_HCA", "=mlx5_0,mlx5_2,mlx5_9")
    with pytest.raises(HarnessError, match=r"mlx5_9 is missing; port 1 of mlx5_2 is DOWN \(3: Disabled\)"):
        read_ports(root)
    monkeypatch.delenv("NCCL_IB_HCA")
    assert read_ports(root) == {"active ports": 2, "rates": "400 Gb/sec (4X NDR)"}
    assert read_ports(tmp_path / "none") == {}


def test_inodes_and_the_rate_of_reading_are_measured(tmp_path):
    assert read_inodes(tmp_path / "not" / "yet").get("free", 1) > 0
    (tmp_path / "small").write_bytes(b"x")
    assert read_rate(str(tmp_path)) == {}
    (tmp_path / "shard").write_bytes(bytes(5 << 20))
    assert read_rate(str(tmp_path))["mib_s"] > 0


def measured(
    pairs: dict[str, float], *, rate: float = 40, within: float = 300, backend: str = "nccl", **ranks: float
) -> list[str]:
    entries = [
        {"node": node, "gemm_tflops": ranks.get(node, 700), "from_host_gb_s": 50, "copy_gb_s": 3000} for node in NODES
    ]
    facts = {"backend": backend, "ranks": 24, "rate_s": rate, "seconds_s": 1.0, "ranks_s": entries}
    facts |= {"node_rates_s": dict.fromkeys(NODES, within), "pair_rates_s": pairs}
    return [json.dumps({"node": node, "check": "all-reduce", "facts": facts}) for node in NODES]


LINKS = Limits(min_node_gb_s=200, min_pair_gb_s=30, min_all_gb_s=30, min_gemm_tflops=400)
FAST = {"node1 node2": 45.0, "node2 node3": 44.0, "node3 node1": 46.0}


def test_links_and_processors_within_the_limits_pass():
    faults, summary = judge_nodes(measured(FAST), NODES, LINKS)
    assert faults == []
    assert "all-reduce by nccl over 24 ranks in 1.0 s, 40 GB/s, 44 to 46 GB/s between two nodes" in summary


def test_a_node_whose_links_to_all_others_are_slow_is_named_and_left_out():
    slow = {"node1 node2": 1.2, "node2 node3": 1.1, "node3 node1": 46.0}
    faults, _ = judge_nodes(measured(slow, rate=1.1), NODES, LINKS)
    assert faults[0].node == "node2"
    assert "links to other nodes: nccl all-reduces 1.1 GB/s with each, " in faults[0].what
    assert "NCCL_IB_HCA" in faults[0].fix
    assert list(culprits(faults, NODES)) == ["node2"]


def test_a_rate_that_names_no_node_is_an_error_of_all():
    faults, _ = judge_nodes(measured(dict.fromkeys(FAST, 0.9), rate=0.0), NODES, LINKS)
    assert all("," in fault.node for fault in faults)
    assert "0.9 GB/s, 30 are required" in faults[0].what
    assert "over 24 ranks, 30 are required" in faults[-1].what
    assert culprits(faults, NODES) == {}


def test_a_gpu_that_is_slower_than_the_others_is_named():
    faults, _ = judge_nodes(measured(FAST, node3=420.0), NODES, LINKS)
    assert [fault.node for fault in faults] == ["node3"]
    assert "processor of rank 2: a matrix product reaches 420 TFLOP/s, 490 are required" in faults[0].what


def test_few_inodes_and_slow_reads_are_reported():
    lines = [
        json.dumps({"node": "node1", "check": "inodes", "facts": {"free": 3}}),
        json.dumps({"node": "node1", "check": "read rate of /d", "facts": {"mib_s": 1.5}}),
    ]
    faults, _ = judge_nodes(lines, ["node1"], Limits(min_inodes=1000, min_read_mib_s=5))
    assert [fault.what for fault in faults] == [
        "inodes: 3 files can be created in the run's folder, 1,000 are required",
        "read rate of /d: 1.5 MiB/s, 5 are required",
    ]


def test_a_job_goes_on_only_without_nodes_that_are_clearly_to_blame():
    shm, address = Fault("node2", "shm: 64 MiB"), Fault("node3", "first node: does not answer")
    assert culprits([shm, address], NODES) == {"node2": "shm: 64 MiB"}
    assert culprits([address], NODES) == {}
    assert culprits([shm, Fault("node1", "shm: 64 MiB")], NODES) == {}
    assert culprits([shm], ["node2"]) == {}
