"""Read the state of a node's GPUs, InfiniBand ports and files from the tools and files of its system."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness.errors import HarnessError

# Xid errors after which a GPU has to be reset or replaced (NVIDIA's "GPU Deployment and Management" and "Xid errors"):
# uncorrectable memory, GSP, NVLink and lost GPUs. Others may be an application's own mistake.
_FATAL_XIDS = {46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158}
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),? *(.*)")
_DRAIN = "drain the node: the GPU has to be reset or replaced"
_SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
_READ_BYTES = 64 << 20
# Fewer bytes than that measure the opening of a file.
_LEAST_READ_BYTES = 4 << 20


def parse_gpu_states(text: str) -> list[dict[str, Any]]:
    """Return the faults of each GPU in the output of `nvidia-smi -q -x`: a list of messages per GPU.

    Raises:
        HarnessError: it is not XML.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise HarnessError(f"nvidia-smi -q -x is not XML: {error}", where="nvidia-smi", fix=_DRAIN) from None
    return [
        {"bus": gpu.get("id", ""), "uuid": gpu.findtext("uuid", ""), "faults": _gpu_faults(gpu)}
        for gpu in root.iter("gpu")
    ]


def _gpu_faults(gpu: ElementTree.Element) -> list[str]:
    faults = []
    for kind in ("volatile", "aggregate"):
        for entry in gpu.iterfind(f"ecc_errors/{kind}/*"):
            # Errors of earlier days were repaired by a reset; one that is volatile was not.
            if (
                kind == "volatile"
                and "uncorrectable" in entry.tag
                and (entry.text or "").strip() not in ("0", "N/A", "")
            ):
                faults.append(
                    f"{(entry.text or '').strip()} uncorrectable ECC errors since the last reset ({entry.tag})"
                )
            if entry.tag == "sram_threshold_exceeded" and (entry.text or "").strip() == "Yes":
                faults.append("its SRAM has more errors than the threshold for replacement")
    if gpu.findtext("remapped_rows/remapped_row_failure", "No").strip() == "Yes":
        faults.append("a row of its memory could not be remapped")
    if gpu.findtext("remapped_rows/remapped_row_pending", "No").strip() == "Yes":
        faults.append("a row of its memory is remapped only after a reset")
    if gpu.findtext("retired_pages/pending_retirement", "No").strip() == "Yes":
        faults.append("a page of its memory is retired only after a reset")
    action = gpu.findtext("gpu_recovery_action", "None").strip()
    if action not in ("None", "N/A", ""):
        faults.append(f"the driver asks for recovery: {action}")
    for group in ("clocks_event_reasons/clocks_event_reason_", "clocks_throttle_reasons/clocks_throttle_reason_"):
        faults += [
            f"its clocks are lowered: {name.replace('_', ' ')}"
            for name in _SLOWED
            if gpu.findtext(group + name, "Not Active").strip() == "Active"
        ]
    generation = gpu.findtext("pci/pci_gpu_link_info/link_widths/current_link_width", "").strip()
    widest = gpu.findtext("pci/pci_gpu_link_info/link_widths/max_link_width", "").strip()
    if generation and widest and "N/A" not in (generation, widest) and generation != widest:
        faults.append(f"its PCIe link has {generation} lanes of {widest}")
    if gpu.findtext("fabric/state", "N/A").strip() not in ("N/A", "Completed"):
        faults.append(f"NVSwitch's fabric is {gpu.findtext('fabric/state', '').strip()}")
    return faults


def read_gpu_states() -> dict[str, Any]:
    """Return the GPUs with faults, by what `nvidia-smi -q -x`, the kernel's log and DCGM know.

    Raises:
        HarnessError: with all faults of the node's GPUs.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    found = _output("nvidia-smi", "-q", "-x")
    faults = [
        f"GPU {number} ({gpu['bus']}): {fault}"
        for number, gpu in enumerate(parse_gpu_states(found) if found else [])
        for fault in gpu["faults"]
    ]
    faults += parse_xids(_output("dmesg") or "")
    faults += parse_dcgm(_output("dcgmi", "health", "--group", "0", "--check") or "")
    if faults:
        raise HarnessError("; ".join(faults), where="nvidia-smi -q -x, dmesg, dcgmi health", fix=_DRAIN)
    return {}


def parse_xids(log: str) -> list[str]:
    """Return the errors in the kernel's log after which a GPU has to be reset, one per GPU and Xid."""
    found = {
        (match[1], match[2]): f"Xid {match[2]} of GPU {match[1]}: {match[3].strip()[:120]}"
        for match in _XID.finditer(log)
        if int(match[2]) in _FATAL_XIDS
    }
    return list(found.values())


def parse_dcgm(text: str) -> list[str]:
    """Return the failures that `dcgmi health --check` reports; warnings and a node without DCGM report none."""
    if re.search(r"Overall Health\s*\|\s*Failure", text) is None:
        return []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    details = " ".join(row[-1] for row in rows if len(row) > 1 and not row[-1].startswith(("Health", "Failure")))
    return [f"DCGM reports a failure: {details[:300]}"]


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return done.stdout if done.returncode == 0 else None


def read_ports(root: Path = Path("/sys/class/infiniband")) -> dict[str, Any]:
    """Return the number of active InfiniBand or RoCE ports and their rates, of those that NCCL_IB_HCA names.

    Raises:
        HarnessError: a port that it names is not active, or missing.
    """
    named = os.environ.get("NCCL_IB_HCA", "")
    wanted = [name.partition(":")[0] for name in named.lstrip("=").split(",") if name and not named.startswith("^")]
    present = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    is_exact = named.startswith("=")
    missing = [
        name for name in wanted if not any(port == name if is_exact else port.startswith(name) for port in present)
    ]
    faults = [f"{name} is missing" for name in missing]
    rates: list[str] = []
    for device in present:
        if wanted and not any(device == name if is_exact else device.startswith(name) for name in wanted):
            continue
        for port in sorted((root / device / "ports").iterdir()):
            state = _text(port / "state").partition(": ")[2]
            if state == "ACTIVE":
                rates.append(_text(port / "rate"))
            elif wanted:
                faults.append(f"port {port.name} of {device} is {state or 'unknown'} ({_text(port / 'phys_state')})")
    if faults:
        raise HarnessError(
            "; ".join(faults),
            where="/sys/class/infiniband, NCCL_IB_HCA",
            fix="drain the node: a cable, an adapter or a switch port has failed; or correct cluster.env.NCCL_IB_HCA",
        )
    return {"active ports": len(rates), "rates": ", ".join(sorted(set(rates)))} if rates else {}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_inodes(folder: Path) -> dict[str, Any]:
    """Return the number of files that can still be created there; nothing on file systems that do not count them."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    counts = os.statvfs(existing)
    return {"free": counts.f_favail} if counts.f_files else {}


def read_rate(path: str) -> dict[str, Any]:
    """Return the rate in MiB/s at which the largest file of a dataset or model is read from its file system.

    Empty if the path is not on a disk, or its files are small.
    """
    place = Path(path)
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    if largest is None or largest.stat().st_size < _LEAST_READ_BYTES:
        return {}
    with largest.open("rb", buffering=0) as file:
        # Not the copy in this node's memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began, done = time.perf_counter(), 0
        while done < _READ_BYTES and (part := file.read(4 << 20)):
            done += len(part)
        return {"mib_s": done / 2**20 / max(time.perf_counter() - began, 1e-9)}
