"""Packed data in the layout of other tools: import of what they wrote, and files that they read themselves."""

from __future__ import annotations

from harness.formats.foreign.exporting import BRIDGE, BridgeExport, BridgeFiles, export_to_bridge
from harness.formats.foreign.importing import CONVENTIONS, import_dataset

__all__ = ["BRIDGE", "CONVENTIONS", "BridgeExport", "BridgeFiles", "export_to_bridge", "import_dataset"]
