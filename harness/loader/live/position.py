"""The position of training in a stream of live chunks, valid for any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from harness.errors import LoaderError

# Chunk, row in the chunk, and sequence in the row.
Place = tuple[int, int, int]


@dataclass(frozen=True)
class LivePosition:
    """Rows that were trained, and rows that were only read, over all ranks."""

    done_below: int = 0  # all rows of earlier chunks were read
    finished: frozenset[int] = frozenset()  # later chunks that were read completely
    taken: dict[int, int] = field(default_factory=dict)  # rows read of unfinished chunks
    # Sequences read of the next row of an unfinished chunk, if the row has several.
    begun: dict[int, int] = field(default_factory=dict)
    open_packs: tuple[tuple[Place, ...], ...] = ()  # sequences that were read and wait in open packs
    rows: int = 0  # rows read so far, including those left out
    steps: int = 0  # global batches so far
    lost: int = 0  # chunks that were deleted before all of their rows were trained (`data.live.completed=read`)
    drawn: int = 0  # packs, or sequences of a window, requested from this folder so far
    ended: bool = False  # the stream ended, and its share goes to other folders

    @property
    def first_unread(self) -> int:
        """Lowest chunk with unread rows."""
        index = self.done_below
        while index in self.finished:
            index += 1
        return index

    def trained_chunks(self, chunks: Iterable[int]) -> list[int]:
        """Return those of `chunks` that were trained completely, without rows in open packs."""
        waiting = {chunk for pack in self.open_packs for chunk, *_ in pack}
        return [c for c in chunks if (c < self.done_below or c in self.finished) and c not in waiting]

    def after(self, parts: Sequence[LivePosition], *, drawn: int, ended: bool) -> LivePosition:
        """Return the position of all ranks after a step; `parts` cover the chunks and new rows of each rank."""
        return replace(
            self._finish(*(part.finished for part in parts)),
            taken={chunk: rows for part in parts for chunk, rows in part.taken.items()},
            begun={chunk: sequences for part in parts for chunk, sequences in part.begun.items()},
            open_packs=tuple(pack for part in parts for pack in part.open_packs),
            rows=self.rows + sum(part.rows for part in parts),
            steps=self.steps + 1,
            drawn=drawn,
            ended=ended,
        )

    def without(self, chunks: Iterable[int]) -> LivePosition:
        """Return the position without lost chunks, which count as finished."""
        lost = frozenset(chunks)
        packs = (tuple(place for place in pack if place[0] not in lost) for pack in self.open_packs)
        return replace(
            self._finish(lost),
            taken={chunk: rows for chunk, rows in self.taken.items() if chunk not in lost},
            begun={chunk: sequences for chunk, sequences in self.begun.items() if chunk not in lost},
            open_packs=tuple(pack for pack in packs if pack),
            lost=self.lost + len(lost),
        )

    def _finish(self, *chunks: frozenset[int]) -> LivePosition:
        """Return this position with additional finished chunks."""
        finished = self.finished.union(*chunks)
        done_below = replace(self, finished=finished).first_unread
        return replace(self, done_below=done_below, finished=frozenset(c for c in finished if c > done_below))


def positions_to_json(positions: Sequence[LivePosition]) -> str:
    """Return the positions of all folders as JSON: an object for a single folder, else a list of such texts."""
    texts = []
    for one in positions:
        counts = {name: sorted(getattr(one, name).items()) for name in ("taken", "begun")}
        texts.append(json.dumps({**vars(one), "finished": sorted(one.finished), **counts}))
    return texts[0] if len(texts) == 1 else json.dumps(texts)


def positions_from_json(text: str, num_folders: int) -> list[LivePosition]:
    """Parse the result of `positions_to_json`, "" for initial positions; raise LoaderError for another folder count."""
    if not text:
        return [LivePosition()] * num_folders
    values = json.loads(text)
    parts = values if isinstance(values, list) else [text]
    if len(parts) != num_folders:
        what = f"the checkpoint has positions in {len(parts)} folders of live chunks, and {num_folders} are named"
        fix = "use the folders that the run started with, or start a new run"
        raise LoaderError(what, where="data.live.blend", fix=fix)
    positions = []
    for part in map(json.loads, parts):
        built = {"finished": frozenset(part["finished"]), "taken": dict(part["taken"]), "begun": dict(part["begun"])}
        packs = tuple(tuple((c, r, s) for c, r, s in pack) for pack in part["open_packs"])
        positions.append(LivePosition(**{**part, **built, "open_packs": packs}))
    return positions
