"""Read the state of a node's GPUs, InfiniBand ports and file systems with the system's tools and files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness.errors import HarnessError
from harness.launch.queue import output_of
from harness.launch.ranks import address_of

# Xid errors after which a GPU has to be reset or replaced (NVIDIA's "GPU Deployment and Management" and "Xid errors"):
# uncorrectable memory, GSP, NVLink and lost GPUs. Others may be an application's own mistake.
_FATAL_XIDS = {46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158}
# Under MIG, the GPU's instances follow its address; drivers before 340 omit "PCI:".
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+),? *(.*)")
_DRAIN = "drain the node: the GPU must be reset or replaced"
_SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
# Text that nvidia-smi prints instead of any value of a GPU that does not answer, in brackets in tables. The last two
# also mean a failed fan or sensor.
_LOST_GPU = re.compile(r"GPU requires reset|GPU is lost", re.IGNORECASE)
_NO_ANSWER = re.compile(rf"\[?({_LOST_GPU.pattern}|Unknown Error|ERR!)\]?", re.IGNORECASE)
# Exit code of nvidia-smi if it prints everything and a warning about the GPU's infoROM, which training does not need.
_WARNED = 14
_END = "</nvidia_smi_log>"
# Each is "Yes" on a GPU with the fault in the message; GPUs and drivers without the value print other words.
_STATES = {
    "remapped_rows/remapped_row_failure": "a row of its memory could not be remapped",
    "remapped_rows/remapped_row_pending": "a row of its memory is remapped only after a reset",
    "retired_pages/pending_retirement": "a page of its memory is retired only after a reset",
    "retired_pages/pending_blacklist": "a page of its memory is retired only after a reset",
    "ecc_errors/aggregate/sram_threshold_exceeded": "its SRAM has more errors than the threshold for replacement",
    "ecc_errors/channel_repair_pending": "a channel of its memory is repaired only after a reset",
    "ecc_errors/tpc_repair_pending": "a part of its processors is repaired only after a reset",
    "ecc_errors/unrepairable_memory": "its memory cannot be repaired",
    "gpu_reset_status/reset_required": "the driver asks for a reset",
    "gpu_reset_status/drain_and_reset_recommended": "the driver asks to drain the node and reset the GPU",
}
_READ_BYTES = 64 << 20
# Reading fewer bytes than this would mostly measure the opening of a file.
_LEAST_READ_BYTES = 4 << 20


def parse_gpu_states(text: str) -> list[dict[str, Any]]:
    """Return name, used memory, address, recovery action and faults of each GPU in the output of `nvidia-smi -q -x`.

    GPUs that share the memory of the node do not report their used memory, and count as 0.

    Supports drivers from 390 (double bit errors of Volta) to 590. The action is empty before 560.
    """
    try:
        root = ElementTree.fromstring(text[: text.find(_END) + len(_END)] if _END in text else text)
    except ElementTree.ParseError as error:
        what = f"nvidia-smi -q -x is not XML: {error}: {text.strip()[:200]}"
        raise HarnessError(what, where="nvidia-smi", fix=_DRAIN) from None
    return [
        {
            "name": gpu.findtext("product_name", ""),
            "used_mib": int(re.sub(r"\D", "", _text_of(gpu, "fb_memory_usage/used")) or 0),
            "driver": root.findtext("driver_version", "none"),
            "bus": gpu.get("id", ""),
            "action": _text_of(gpu, "gpu_recovery_action"),
            "faults": _gpu_faults(gpu),
        }
        for gpu in root.iter("gpu")
    ]


def _text_of(gpu: ElementTree.Element, path: str) -> str:
    """Return a value; empty if the GPU or the driver does not support it."""
    text = gpu.findtext(path, "").strip()
    return "" if text in ("N/A", "Not Supported", "Requested functionality has been deprecated") else text


def _gpu_faults(gpu: ElementTree.Element) -> list[str]:
    words = [text for text in map(str.strip, gpu.itertext()) if _LOST_GPU.fullmatch(text)]
    words += filter(_NO_ANSWER.fullmatch, [_text_of(gpu, "fb_memory_usage/used")])
    faults = [f"it does not answer: nvidia-smi prints {word!r}" for word in dict.fromkeys(words)]
    # Aggregate errors, from before the last reset, were repaired by it; volatile ones were not.
    for entry in gpu.iterfind("ecc_errors/volatile/*"):
        count = _text_of(entry, "total" if entry.tag == "double_bit" else ".")
        if ("uncorrectable" in entry.tag or entry.tag == "double_bit") and count.isdecimal() and int(count):
            faults.append(f"{count} uncorrectable ECC errors since the last reset ({entry.tag})")
    faults += dict.fromkeys(message for path, message in _STATES.items() if _text_of(gpu, path) == "Yes")
    if (action := _text_of(gpu, "gpu_recovery_action")) not in ("", "None") and not _NO_ANSWER.fullmatch(action):
        faults.append(f"the driver asks for recovery: {action}")
    for group in ("clocks_event_reasons/clocks_event_reason_", "clocks_throttle_reasons/clocks_throttle_reason_"):
        active = [name.replace("_", " ") for name in _SLOWED if _text_of(gpu, group + name) == "Active"]
        faults += [f"its clocks are lowered: {name}" for name in active]
    lanes, most = (
        _text_of(gpu, f"pci/pci_gpu_link_info/link_widths/{name}_link_width").removesuffix("x")
        for name in ("current", "max")
    )
    # Not if the GPU is connected to its CPU by NVLink instead (Grace).
    if lanes.isdecimal() and most.isdecimal() and lanes != most and _text_of(gpu, "c2c_mode") != "Enabled":
        faults.append(f"its PCIe link has {lanes} lanes of {most}")
    return faults + list(_fabric_faults(gpu))


def _fabric_faults(gpu: ElementTree.Element) -> Iterator[str]:
    """Yield the faults of the GPU's NVSwitch fabric; none for GPUs without NVSwitches."""
    state, status = _text_of(gpu, "fabric/state"), _text_of(gpu, "fabric/status")
    if state in ("Not Started", "In Progress"):
        yield f"NVSwitch's fabric is {state}"
    elif state == "Completed" and status not in ("", "Success"):
        yield f"NVSwitch's fabric has ended with {status!r}"
    if _text_of(gpu, "fabric/health/bandwidth") == "Degraded":
        yield "NVSwitch's fabric has reduced bandwidth"
    if _text_of(gpu, "fabric/health/route_unhealthy") == "True":
        yield "a route of NVSwitch's fabric is unhealthy"
    elif _text_of(gpu, "fabric/health/summary") == "Unhealthy":
        yield "NVSwitch's fabric is unhealthy"


def read_gpus() -> dict[str, Any]:
    """Check the GPUs with nvidia-smi, the kernel's log and DCGM; raise HarnessError for faults, but not for `notes`."""
    printed, code = output_of("nvidia-smi", "-q", "-x")
    if code is None:
        return {"gpus": [], "driver": "none"}
    if code not in (0, _WARNED) and _END not in printed:
        what = f"nvidia-smi -q -x ends with code {code}: {printed.strip()[:300]}"
        raise HarnessError(what, where="nvidia-smi", fix=_DRAIN)
    notes = [line.strip() for line in printed.partition(_END)[2].splitlines() if line.strip()]
    gpus = parse_gpu_states(printed)
    faults = [f"GPU {number} ({gpu['bus']}): {fault}" for number, gpu in enumerate(gpus) for fault in gpu["faults"]]
    if code not in (0, _WARNED) and not faults:
        faults.append(f"nvidia-smi -q -x ends with code {code}")
    log, code = output_of("dmesg")
    notes += [] if code == 0 else ["the kernel's log is closed to this user: it was not searched for Xid errors"]
    # The log also contains errors that a reset has repaired since; newer drivers report if an action is still needed.
    is_well = {address_of(gpu["bus"]): gpu["action"] == "None" for gpu in gpus}
    for bus, errors in parse_xids(log).items():
        if is_well.get(address_of(bus), False):
            notes += [f"{error} (before its last reset: the driver asks for no action)" for error in errors]
        else:
            faults += errors
    report, code = output_of("dcgmi", "health", "--group", "0", "--check")
    faults += parse_dcgm(report)
    if code not in (0, None) and "Health Monitor Report" not in report:
        notes.append(f"dcgmi health: {report.strip()[:120] or f'code {code}'}")
    if faults:
        raise HarnessError("; ".join(faults), where="nvidia-smi -q -x, dmesg, dcgmi health", fix=_DRAIN)
    shown = [{name: gpu[name] for name in ("name", "used_mib")} for gpu in gpus]
    return {"gpus": shown, "driver": gpus[0]["driver"] if gpus else "none", "notes": notes}


def parse_xids(log: str) -> dict[str, list[str]]:
    """Return, by GPU, the errors in the kernel's log that require a reset, one per Xid."""
    found: dict[str, dict[str, str]] = {}
    for bus, number, text in _XID.findall(log):
        if int(number) in _FATAL_XIDS:
            found.setdefault(bus, {})[number] = f"Xid {number} of GPU {bus}: {text.strip()[:120]}"
    return {bus: list(errors.values()) for bus, errors in found.items()}


def parse_dcgm(text: str) -> list[str]:
    """Return the failures that `dcgmi health --check` reports; none for warnings only, or without DCGM."""
    if re.search(r"Overall Health\s*[|:]\s*Failure", text) is None:
        return []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    details = " ".join(row[-1] for row in rows if len(row) > 1 and not row[-1].startswith(("Health", "Failure")))
    return [f"DCGM reports a failure: {details[:300]}"]


def read_ports(root: Path = Path("/sys/class/infiniband")) -> dict[str, Any]:
    """Return the number of active InfiniBand or RoCE ports that NCCL_IB_HCA selects, and their rates.

    NCCL treats names such as `mlx5` as prefixes and uses the matching ports that are active; `judge` checks that their
    number is equal on all nodes. Raises HarnessError if a port that is named in full is not active, or if no selected
    port is active.
    """
    named = os.environ.get("NCCL_IB_HCA", "")
    is_exact = named.startswith("=")
    names = [] if named.startswith("^") else filter(None, named.lstrip("=").split(","))
    wanted = [name.partition(":")[::2] for name in names]
    ports = sorted((port.parts[-3], port.name) for port in root.glob("*/ports/*"))

    def matches(port: tuple[str, str], want: tuple[str, ...], *, in_full: bool) -> bool:
        is_named = port[0] == want[0] if in_full else port[0].startswith(want[0])
        return is_named and want[1] in ("", port[1])

    missing = (want for want in wanted if not any(matches(port, want, in_full=is_exact) for port in ports))
    faults = [f"{':'.join(filter(None, want))} is missing" for want in missing]
    down, rates = list[str](), list[str]()
    for port in ports:
        if wanted and not any(matches(port, want, in_full=is_exact) for want in wanted):
            continue
        folder = root / port[0] / "ports" / port[1]
        state = _text(folder / "state").partition(": ")[2]
        if state == "ACTIVE":
            rates.append(_text(folder / "rate"))
            continue
        message = f"port {port[1]} of {port[0]} is {state or 'unknown'} ({_text(folder / 'phys_state')})"
        is_in_full = any(matches(port, want, in_full=True) for want in wanted)
        (faults if is_in_full else down).append(message)
    faults += down if wanted and not rates else []
    if faults:
        fix = "drain the node: a cable, an adapter or a switch port has failed; or correct cluster.env.NCCL_IB_HCA"
        raise HarnessError("; ".join(faults), where="/sys/class/infiniband, NCCL_IB_HCA", fix=fix)
    return {"active ports": len(rates), "rates": ", ".join(sorted(set(rates)))} if rates else {}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_free_space(folder: Path) -> dict[str, Any]:
    """Return the free space for a folder, which may not exist yet, and its number of free inodes if it is known."""
    counts = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    space = {"gib": counts.f_bavail * counts.f_frsize / 2**30}
    return {**space, "free": counts.f_favail} if counts.f_files else space


def read_rate(path: str) -> dict[str, Any]:
    """Return the rate in MiB/s of reading the largest file of a dataset or model; nothing if the file is small."""
    place = Path(path)
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    if largest is None or largest.stat().st_size < _LEAST_READ_BYTES:
        return {}
    with largest.open("rb", buffering=0) as file:
        # Do not measure the page cache of this node.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began, done = time.perf_counter(), 0
        while done < _READ_BYTES and (part := file.read(4 << 20)):
            done += len(part)
        return {"mib_s": done / 2**20 / max(time.perf_counter() - began, 1e-9)}
