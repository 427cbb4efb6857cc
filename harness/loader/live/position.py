"""The position of training in a stream of live chunks, valid for any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from harness.errors import LoaderError

# Chunk, row in it, and sequence of the row.
Place = tuple[int, int, int]


@dataclass(frozen=True)
class LivePosition:
    """Rows that are trained, and rows that are only read, of all ranks together."""

    done_below: int = 0  # every row of the chunks before this one is read
    finished: frozenset[int] = frozenset()  # later chunks of which every row is read
    taken: dict[int, int] = field(default_factory=dict)  # rows read of chunks that are not finished
    # Sequences read of the next row of such a chunk, where a row has several.
    begun: dict[int, int] = field(default_factory=dict)
    open_packs: tuple[tuple[Place, ...], ...] = ()  # sequences that are read but wait in packs for more, pack by pack
    rows: int = 0  # read so far, including those that were left out
    steps: int = 0  # global batches so far
    lost: int = 0  # chunks that were deleted before all of their rows were trained (`data.live.completed=read`)
    drawn: int = 0  # packs, or sequences of a window, that were requested of this folder so far
    ended: bool = False  # the stream of this folder has ended, and other folders of the blend have its share

    @property
    def first_unread(self) -> int:
        """The lowest chunk with unread rows."""
        index = self.done_below
        while index in self.finished:
            index += 1
        return index

    def trained_chunks(self, chunks: Iterable[int]) -> list[int]:
        """Return those of `chunks` of which every row is trained, so that none waits in an open pack."""
        waiting = {chunk for pack in self.open_packs for chunk, *_ in pack}
        return [c for c in chunks if (c < self.done_below or c in self.finished) and c not in waiting]

    def after(self, parts: Sequence[LivePosition], *, drawn: int, ended: bool) -> LivePosition:
        """Return the position of all ranks after a step; a part is of one rank, with its chunks and new rows alone."""
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
        """Return the position that continues after chunks which are lost, with nothing of them waiting."""
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
        """Return this position with more chunks of which every row is read."""
        finished = self.finished.union(*chunks)
        done_below = replace(self, finished=finished).first_unread
        return replace(self, done_below=done_below, finished=frozenset(c for c in finished if c > done_below))


def positions_to_json(positions: Sequence[LivePosition]) -> str:
    """Return the positions of all folders of a run as text: an object of a single folder, else a list of such texts."""
    texts = []
    for one in positions:
        counts = {name: sorted(getattr(one, name).items()) for name in ("taken", "begun")}
        texts.append(json.dumps({**vars(one), "finished": sorted(one.finished), **counts}))
    return texts[0] if len(texts) == 1 else json.dumps(texts)


def positions_from_json(text: str, num_folders: int) -> list[LivePosition]:
    """Return what `positions_to_json` wrote, the beginnings for an empty text; raise LoaderError for other folders."""
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
