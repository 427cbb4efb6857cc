"""Where training stands in a stream of live chunks, whatever the number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from harness.errors import LoaderError

# Chunk and row in it.
Place = tuple[int, int]


@dataclass(frozen=True)
class LivePosition:
    """What was trained and what was only read, of all ranks together.

    Attributes:
        done_below: every row of the chunks before this one was read.
        finished: chunks from there on of which every row was read.
        taken: rows that were read of chunks that are not finished.
        open_packs: conversations that were read but wait in packs for more, pack by pack.
        rows: read so far, those that were left out included.
        steps: global batches that were given.
    """

    done_below: int = 0
    finished: frozenset[int] = frozenset()
    taken: dict[int, int] = field(default_factory=dict)
    open_packs: tuple[tuple[Place, ...], ...] = ()
    rows: int = 0
    steps: int = 0

    @property
    def first_unread(self) -> int:
        """The lowest chunk of which rows are still to be read."""
        index = self.done_below
        while index in self.finished:
            index += 1
        return index

    def is_finished(self, chunk: int) -> bool:
        return chunk < self.done_below or chunk in self.finished

    def trained_chunks(self, chunks: Iterable[int]) -> list[int]:
        """Those of `chunks` whose every row was trained: none waits in an open pack."""
        waiting = {chunk for pack in self.open_packs for chunk, _ in pack}
        return [chunk for chunk in chunks if self.is_finished(chunk) and chunk not in waiting]

    def after(self, parts: Iterable[RankPosition]) -> LivePosition:
        """The position of all ranks once each stands where it says, a step later."""
        parts = list(parts)
        finished = self.finished.union(*(part.finished for part in parts))
        done_below = replace(self, finished=finished).first_unread
        return LivePosition(
            done_below=done_below,
            finished=frozenset(chunk for chunk in finished if chunk > done_below),
            taken={chunk: rows for part in parts for chunk, rows in part.taken.items()},
            open_packs=tuple(pack for part in parts for pack in part.open_packs),
            rows=self.rows + sum(part.rows for part in parts),
            steps=self.steps + 1,
        )

    def to_json(self) -> str:
        return json.dumps(
            {
                "done_below": self.done_below,
                "finished": sorted(self.finished),
                "taken": sorted(self.taken.items()),
                "open_packs": self.open_packs,
                "rows": self.rows,
                "steps": self.steps,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> LivePosition:
        """What `to_json` wrote; raises LoaderError for anything else."""
        try:
            values: dict[str, Any] = json.loads(text)
            return cls(
                done_below=int(values["done_below"]),
                finished=frozenset(map(int, values["finished"])),
                taken={int(chunk): int(rows) for chunk, rows in values["taken"]},
                open_packs=tuple(tuple((int(c), int(row)) for c, row in pack) for pack in values["open_packs"]),
                rows=int(values["rows"]),
                steps=int(values["steps"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise LoaderError(
                f"a position in live chunks cannot be read: {text[:200]}",
                fix="resume from another checkpoint; this one was not trained on live chunks, or is damaged",
            ) from error


@dataclass(frozen=True)
class RankPosition:
    """One rank's part of a LivePosition, of the chunks that it reads.

    Attributes:
        finished, taken, open_packs: as there; chunks that all ranks know to be done may be left out.
        rows: read since the step before.
    """

    finished: frozenset[int] = frozenset()
    taken: dict[int, int] = field(default_factory=dict)
    open_packs: tuple[tuple[Place, ...], ...] = ()
    rows: int = 0
