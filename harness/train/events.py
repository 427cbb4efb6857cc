"""TensorBoard's event files, written by the thread that trains.

The writers of TensorBoard and of torch hand each value to a thread of their own, which dies with a traceback where the
disk refuses, and opens the file again for every value. Here a step is one write, and a refusal is an exception.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventFile:
    """A new event file in `folder`.

    Args:
        first_step: TensorBoard hides what earlier files of the folder have of this step and later ones.

    Raises:
        OSError: here and in `add`, the disk refuses.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._records = Event, Summary, RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = (folder / name).open("xb", buffering=0)
        self._write(
            Event(wall_time=time.time(), step=first_step, file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=first_step, session_log=SessionLog(status=SessionLog.START)),
        )

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Append the values of a step by the names of their curves."""
        summary = self._summary(
            value=[self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, *events: Any) -> None:
        block = io.BytesIO()
        records = self._records(block)
        for event in events:
            records.write(event.SerializeToString())
        rest = block.getbuffer()
        while rest:
            rest = rest[self._file.write(rest) :]
