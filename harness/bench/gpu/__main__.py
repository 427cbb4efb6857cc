"""`python -m harness.bench.gpu PART DEVICE FILE [SIZE FOLDER]`: measure one part on this rank, and write it as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from harness.errors import HarnessError
from harness.megatron import prepare_process
from harness.printing import print_text


def _measure(name: str, device: str, made: str, size: str, folder: str) -> None:
    prepare_process()
    from harness.bench.gpu.parts import PARTS
    from harness.bench.gpu.sizes import SIZES, Place

    part = PARTS[name]
    module, _, function = part.function.partition(":")
    measure = getattr(importlib.import_module(f"harness.bench.gpu.{module}"), function)
    place = Place(device, SIZES[size], Path(folder))
    report = measure(place) if part.argument is None else measure(place, part.argument)
    if os.environ.get("RANK", "0") == "0":
        Path(made).write_text(json.dumps(report.to_dict()))


def _describe(device: str, made: str) -> None:
    prepare_process()
    from harness.bench.gpu.environment import describe_gpus

    Path(made).write_text(json.dumps(describe_gpus(device)))


if __name__ == "__main__":
    try:
        if sys.argv[1] == "machine":
            _describe(*sys.argv[2:])
        else:
            _measure(*sys.argv[1:])
    except HarnessError as error:
        from harness.bench.gpu.parts import fail

        print_text(fail(error), file=sys.stderr)
        sys.exit(1)
