"""Faults of nodes from recorded output of srun, nvidia-smi, the kernel and DCGM, and from measured rates."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.launch.cluster import PreflightConfig
from harness.launch.preflight.hardware import (
    parse_dcgm,
    parse_gpu_states,
    parse_xids,
    read_free_space,
    read_gpus,
    read_ports,
    read_rate,
)
from harness.launch.preflight.judge import Fault, culprits, judge_nodes, read_srun

NODES = ["node1", "node2", "node3"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [  # Slurm 22.05, on a cluster of three nodes
        (
            [
                "1: slurmstepd-node2: error: execve(): /shared/py: Permission denied",
                "srun: error: node2: task 1: Exited with exit code 13",
            ],
            {"node2": "launch: /shared/py: Permission denied"},
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
        (  # without the node's name, as newer versions print it
            [
                "2: slurmstepd: error: pyxis: couldn't start container",
                "srun: error: node3: task 2: Exited with exit code 1",
            ],
            {"node3": "launch: pyxis: couldn't start container"},
        ),
        (["1: slurmstepd-node2: error: couldn't chdir to `/w': No such file or directory: going to /tmp instead"], {}),
        (
            [
                "0: slurmstepd-node1: error: *** STEP 1.1 ON node1 CANCELLED AT 2026-11-22T23:56:09 ***",
                "srun: error: node2: task 1: Killed",
            ],
            {},
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
    faults, _ = judge_nodes(answers, NODES, PreflightConfig(), srun=errors)
    assert [(fault.node, fault.what) for fault in faults] == [("node2", "launch: Communication connection failure")]
    # Without a cause, every node without an answer is named.
    assert [fault.node for fault in judge_nodes(answers, NODES, PreflightConfig())[0]] == ["node2", "node3"]


def gpu_xml(driver: str, *, bus: str = "00000000:1B:00.0", **sections: str) -> str:
    """Return what `nvidia-smi -q -x` prints of one GPU: elements by name, with their own text or elements."""
    inner = "".join(f"<{name}>{text}</{name}>" for name, text in sections.items())
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device.dtd">\n<nvidia_smi_log>\n'
        f"<timestamp>Mon Nov 23 09:00:00 2026</timestamp><driver_version>{driver}</driver_version>"
        f'<attached_gpus>1</attached_gpus><gpu id="{bus}">{inner}</gpu>\n</nvidia_smi_log>\n'
    )


def elements(names: str, value: str) -> str:
    return "".join(f"<{name}>{value}</{name}>" for name in names.split())


def clocks(kind: str) -> str:
    """Return the reasons for which clocks are lowered; an idle GPU has one."""
    prefix = f"{kind}_reason_"
    reasons = ["hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sync_boost", "sw_thermal_slowdown"]
    idle = f"<{prefix}gpu_idle>Active</{prefix}gpu_idle>"
    return idle + elements(" ".join(prefix + reason for reason in reasons), "Not Active")


def link(current: str, most: str = "16x", generation: str = "1") -> str:
    """Return the PCIe link; an idle GPU lowers its generation."""
    widths = f"<max_link_width>{most}</max_link_width><current_link_width>{current}</current_link_width>"
    speed = f"<max_link_gen>5</max_link_gen><current_link_gen>{generation}</current_link_gen>"
    return f"<pci_gpu_link_info><pcie_gen>{speed}</pcie_gen><link_widths>{widths}</link_widths></pci_gpu_link_info>"


PLACES = "device_memory register_file l1_cache l2_cache texture_memory texture_shm cbu total"
ROWS = "<remapped_row_corr>0</remapped_row_corr><remapped_row_unc>1</remapped_row_unc>" + elements(
    "remapped_row_pending remapped_row_failure", "No"
)
GONE = "Requested functionality has been deprecated"
ZEROS, TWOS = elements(PLACES, "0"), elements(PLACES, "2")
SRAM = "sram_correctable sram_uncorrectable_parity sram_uncorrectable_secded dram_correctable dram_uncorrectable"
# Names and values as drivers of these generations print them for healthy GPUs, which are idle.
GENERATIONS = {
    "V100, 418": gpu_xml(
        "418.87.00",
        clocks_throttle_reasons=clocks("clocks_throttle"),
        fb_memory_usage="<total>32510 MiB</total><used>0 MiB</used>",
        ecc_errors=f"<volatile><single_bit>{elements(PLACES, '4')}</single_bit>"
        f"<double_bit>{elements(PLACES, '0')}</double_bit></volatile>"
        f"<aggregate><double_bit>{elements(PLACES, '1')}</double_bit></aggregate>",
        retired_pages="<pending_blacklist>No</pending_blacklist><pending_retirement>No</pending_retirement>",
        pci=link("16x", generation="3"),
    ),
    "H100, 550": gpu_xml(
        "550.54.15",
        gpu_reset_status="<reset_required>No</reset_required><drain_and_reset_recommended>N/A"
        "</drain_and_reset_recommended>",
        clocks_event_reasons=clocks("clocks_event"),
        fb_memory_usage="<used>1 MiB</used>",
        ecc_errors=f"<volatile>{elements(SRAM, '0')}</volatile><aggregate>{elements(SRAM, '2')}"
        "<sram_threshold_exceeded>No</sram_threshold_exceeded></aggregate>",
        remapped_rows=ROWS,
        pci=link("16x"),
        fabric="<state>Completed</state><status>Success</status>",
    ),
    "B200, 575": gpu_xml(
        "575.51.02",
        product_name="NVIDIA B200",
        display_mode=GONE,
        gpu_reset_status=elements("reset_required drain_and_reset_recommended", GONE),
        gpu_recovery_action="None",
        c2c_mode="Disabled",
        clocks_event_reasons=clocks("clocks_event"),
        clocks_event_reasons_counters="<clocks_event_reasons_counters_sw_power_cap>254 us"
        "</clocks_event_reasons_counters_sw_power_cap>",
        fb_memory_usage="<used>51234 MiB</used>",
        ecc_errors=f"<volatile>{elements(SRAM, '0')}</volatile>"
        f"{elements('channel_repair_pending tpc_repair_pending', 'No')}<unrepairable_memory>N/A</unrepairable_memory>",
        remapped_rows=ROWS,
        pci=link("16x"),
        voltage=f"<graphics_volt>{GONE}</graphics_volt>",
        fabric="<state>Completed</state><status>Success</status><health><summary>Healthy</summary>"
        "<bandwidth>Full</bandwidth><route_unhealthy>False</route_unhealthy></health>",
    ),
    "GB200, 590": gpu_xml(
        "590.44.01",
        bus="00000008:01:00.0",
        gpu_recovery_action="None",
        c2c_mode="Enabled",
        fb_memory_usage="<used>N/A</used>",
        ecc_errors=f"<volatile>{elements(SRAM, GONE)}</volatile>",
        remapped_rows=ROWS,
        pci=link("1x"),
        fabric="<state>Completed</state><status>Success</status>",
    ),
}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_healthy_gpu_of_any_generation_has_no_faults(generation):
    (state,) = parse_gpu_states(GENERATIONS[generation])
    assert state["faults"] == []
    assert state["action"] == ("None" if generation.startswith(("B200", "GB200")) else "")
    # What the tool prints about a damaged infoROM follows the document.
    (state,) = parse_gpu_states(f"{GENERATIONS[generation]}WARNING: infoROM is corrupted at gpu 0000:1B:00.0\n")
    assert state["faults"] == []


@pytest.mark.parametrize(
    ("generation", "healthy", "faulty", "message"),
    [
        ("H100, 550", "<dram_uncorrectable>0<", "<dram_uncorrectable>3<", "3 uncorrectable ECC errors"),
        ("V100, 418", f"<double_bit>{ZEROS}", f"<double_bit>{TWOS}", "2 uncorrectable ECC errors"),
        ("V100, 418", "blacklist>No<", "blacklist>Yes<", "a page of its memory is retired only after a reset"),
        ("H100, 550", "reset_required>No<", "reset_required>Yes<", "the driver asks for a reset"),
        ("H100, 550", "pending>No<", "pending>Yes<", "a row of its memory is remapped only after a reset"),
        ("H100, 550", "hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active", "its clocks are lowered"),
        ("H100, 550", "<current_link_width>16x", "<current_link_width>8x", "its PCIe link has 8 lanes of 16"),
        ("H100, 550", "<status>Success", "<status>Timeout", "NVSwitch's fabric has ended with 'Timeout'"),
        ("H100, 550", "<used>1 MiB", "<used>Unknown Error", "it does not answer: nvidia-smi prints 'Unknown Error'"),
        ("B200, 575", "action>None", "action>Drain and Reset", "the driver asks for recovery: Drain and Reset"),
        ("B200, 575", "unhealthy>False", "unhealthy>True", "a route of NVSwitch's fabric is unhealthy"),
        ("B200, 575", "tpc_repair_pending>No", "tpc_repair_pending>Yes", "a part of its processors is repaired only"),
        ("B200, 575", f"<display_mode>{GONE}", "<display_mode>GPU requires reset", "it does not answer: nvidia-smi"),
    ],
)
def test_faults_of_a_gpu_are_read_from_nvidia_smi(generation, healthy, faulty, message):
    printed = GENERATIONS[generation]
    assert healthy in printed
    (state,) = parse_gpu_states(printed.replace(healthy, faulty))
    (fault,) = state["faults"]
    assert fault.startswith(message)


def tools(folder: Path, monkeypatch: pytest.MonkeyPatch, **outputs: tuple[str, int]) -> None:
    """Put programs in front of those of the machine, each with what it prints and its exit code."""
    folder.mkdir(exist_ok=True)
    for name, (text, code) in outputs.items():
        (folder / f"{name}.txt").write_text(text)
        program = folder / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\ncat '{folder / name}.txt'\nexit {code}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


LOST = "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


def test_what_the_tools_of_a_node_print_and_their_exit_codes_are_read_together(tmp_path, monkeypatch):
    watches = "Error: Health watches not enabled. Please enable watches. \n"
    tools(tmp_path, monkeypatch, nvidia_smi=(GENERATIONS["B200, 575"], 0), dmesg=("", 0), dcgmi=(watches, 253))
    read = read_gpus()
    assert read["notes"] == ["dcgmi health: Error: Health watches not enabled. Please enable watches."]
    assert (read["gpus"], read["driver"]) == ([{"name": "NVIDIA B200", "used_mib": 51234}], "575.51.02")
    # An error that the driver considers repaired is no fault; drivers before 560 do not tell.
    warning = "WARNING: infoROM is corrupted at gpu 0000:1B:00.0\n"
    tools(tmp_path, monkeypatch, nvidia_smi=(GENERATIONS["B200, 575"] + warning, 14), dmesg=(LOST, 0), dcgmi=("", 0))
    assert [note[:40] for note in read_gpus()["notes"]] == [warning[:40], "Xid 79 of GPU 0000:1b:00: pid='<unknown>"]
    tools(tmp_path, monkeypatch, nvidia_smi=(GENERATIONS["H100, 550"], 0))
    with pytest.raises(HarnessError, match=r"Xid 79 of GPU 0000:1b:00: .*GPU has fallen off the bus"):
        read_gpus()
    tools(tmp_path, monkeypatch, dmesg=("", 1))
    assert "closed to this user" in read_gpus()["notes"][0]
    tools(tmp_path, monkeypatch, nvidia_smi=("Unable to determine the device handle for GPU0: GPU is lost.\n", 15))
    with pytest.raises(HarnessError, match="nvidia-smi -q -x ends with code 15: Unable to determine"):
        read_gpus()


def test_errors_after_which_a_gpu_has_to_be_reset_are_read_from_the_kernels_log():
    log = (
        "[ 99.1] NVRM: Xid (PCI:0000:1b:00): 31, pid=77, name=python, MMU Fault\n"
        f"[100.2] {LOST}[100.3] {LOST}"
        "Nov 23 09:00:00 gpu7 kernel: NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:00): 95, pid=7194, Uncontained: LTC\n"
        "[101.0] NVRM: Xid (0000:5e:00): 48, An uncorrectable double bit error (DBE) has been detected on GPU.\n"
    )
    found = parse_xids(log)
    assert {bus: [error.partition(" of ")[0] for error in errors] for bus, errors in found.items()} == {
        "0000:1b:00": ["Xid 79"],
        "0000:3b:00": ["Xid 95"],
        "0000:5e:00": ["Xid 48"],
    }
    assert found["0000:1b:00"][0].endswith("GPU has fallen off the bus.")


@pytest.mark.parametrize(
    "table",
    [
        """+---------------------------+----------------------------------------------------------+
| Health Monitor Report                                                                |
+===========================+==========================================================+
| Overall Health            | {0}                                                      |
| GPU                       |                                                          |
| -> 0                      | {0}                                                      |
|    -> Errors              |                                                          |
|       -> NVLink system    | {0}                                                      |
|                           | Detected 16 NvLink errors on GPU 0's NVLink 3            |
+---------------------------+----------------------------------------------------------+
""",
        """Health Monitor Report
+------------------+---------------------------------------------------------+
| Overall Health:    {0}                                                     |
+==================+=========================================================+
| 0                | {0}                                                     |
|                  | Detected 16 NvLink errors on GPU 0's NVLink 3           |
+------------------+---------------------------------------------------------+
""",
    ],
)
def test_a_failure_that_dcgm_reports_is_read_and_a_warning_is_not(table):
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
    # The beginning of names, as NCCL takes them: those that are active.
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    assert read_ports(root)["active ports"] == 2
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_2")
    with pytest.raises(HarnessError, match="port 1 of mlx5_2 is DOWN"):
        read_ports(root)
    # The second port of an adapter that is named by its first one has no cable.
    port = root / "mlx5_0" / "ports" / "2"
    port.mkdir()
    (port / "state").write_text("1: DOWN\n")
    for name, fault in (
        ("=mlx5_0:1", None),
        ("=mlx5_0", "port 2 of mlx5_0 is DOWN"),
        ("=mlx5_0:3", "mlx5_0:3 is missing"),
    ):
        monkeypatch.setenv("NCCL_IB_HCA", name)
        with pytest.raises(HarnessError, match=fault) if fault else nullcontext():
            assert read_ports(root)["active ports"] == 1
    monkeypatch.setenv("NCCL_IB_HCA", "^mlx5_0")
    assert read_ports(root)["active ports"] == 2
    monkeypatch.delenv("NCCL_IB_HCA")
    assert read_ports(root) == {"active ports": 2, "rates": "400 Gb/sec (4X NDR)"}
    assert read_ports(tmp_path / "none") == {}


def test_inodes_and_the_rate_of_reading_are_measured(tmp_path):
    assert min(read_free_space(tmp_path / "not" / "yet").values()) > 0
    (tmp_path / "small").write_bytes(b"x")
    assert read_rate(str(tmp_path)) == {}
    (tmp_path / "shard").write_bytes(bytes(5 << 20))
    assert read_rate(str(tmp_path))["mib_s"] > 0


def measured(
    pairs: dict[str, float],
    *,
    rate: float = 40,
    within: float = 300,
    backend: str = "nccl",
    copies: float = 3000,
    **ranks: float,
) -> list[str]:
    entries = [
        {"node": node, "gemm_tflops": ranks.get(node, 700), "from_host_gb_s": 50, "copy_gb_s": 3000} for node in NODES
    ]
    entries[2]["copy_gb_s"] = copies
    facts = {"backend": backend, "ranks": 24, "rate_s": rate, "seconds_s": 1.0, "ranks_s": entries}
    facts |= {"node_rates_s": dict.fromkeys(NODES, within), "pair_rates_s": pairs}
    return [json.dumps({"node": node, "check": "all-reduce", "facts": facts}) for node in NODES]


LINKS = PreflightConfig(min_node_gb_s=200, min_pair_gb_s=30, min_all_gb_s=30, min_gemm_tflops=400)
FAST = {"node1 node2": 45.0, "node2 node3": 44.0, "node3 node1": 46.0}


def test_links_and_processors_within_the_limits_pass_and_a_slower_gpu_is_named():
    faults, summary = judge_nodes(measured(FAST), NODES, LINKS)
    assert faults == []
    assert "all-reduce by nccl over 24 ranks in 1.0 s, 40 GB/s, 44 to 46 GB/s between two nodes" in summary
    faults, _ = judge_nodes(measured(FAST, node3=420.0), NODES, LINKS)
    assert [fault.node for fault in faults] == ["node3"]
    assert "processor of rank 2: a matrix product reaches 420 TFLOP/s, 490 are required" in faults[0].what
    faults, _ = judge_nodes(measured(FAST, copies=1500.0), NODES, LINKS)
    assert [fault.node for fault in faults] == ["node3"]
    assert "its memory copies reach 1.5e+03 GB/s, 2.1e+03 are required" in faults[0].what


def test_a_node_with_slow_links_is_named_and_left_out_and_a_rate_that_names_none_is_an_error_of_all():
    slow = {"node1 node2": 1.2, "node2 node3": 1.1, "node3 node1": 46.0}
    faults, _ = judge_nodes(measured(slow, rate=1.1), NODES, LINKS)
    assert faults[0].node == "node2"
    assert "links to other nodes: nccl all-reduces 1.1 GB/s with each, " in faults[0].what
    assert "NCCL_IB_HCA" in faults[0].fix
    assert list(culprits(faults, NODES)) == ["node2"]
    faults, _ = judge_nodes(measured(dict.fromkeys(FAST, 0.9), rate=0.0), NODES, LINKS)
    assert all("," in fault.node for fault in faults)
    assert "0.9 GB/s, 30 are required" in faults[0].what
    assert "over 24 ranks, 30 are required" in faults[-1].what
    assert culprits(faults, NODES) == {}


def test_a_job_goes_on_only_without_nodes_that_are_clearly_to_blame():
    shm, address = Fault("node2", "shm: 64 MiB"), Fault("node3", "first node: does not answer")
    assert culprits([shm, address], NODES) == {"node2": "shm: 64 MiB"}
    assert culprits([address], NODES) == {}
    assert culprits([shm, Fault("node1", "shm: 64 MiB")], NODES) == {}
    assert culprits([shm], ["node2"]) == {}
