"""No number of workers, way to start them, prefetch or format changes a batch of any rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.formats import FORMATS, open_dataset
from harness.loader import Loader, LoaderConfig, RankLayout
from harness.schedule import ScheduleConfig
from tests.samples.small_packs import batch_digest


@dataclass(frozen=True)
class Cell:
    """One way to run a loader."""

    format: str
    num_workers: int
    persistent: bool
    start: str
    prefetch: int
    dp_size: int

    def __str__(self) -> str:
        kept = "kept" if self.persistent else "new"
        return f"{self.format}-{self.num_workers}-{kept}-{self.start}-{self.prefetch}-dp{self.dp_size}"


CELLS = [
    Cell(*one)
    for one in itertools.product(
        FORMATS, (0, 1, 2, 4, 8), (True, False), ("fork", "spawn", "forkserver"), (1, 2, 4), (1, 2)
    )
    # Without workers the other settings are not used.
    if one[1] or one[2:5] == (True, "fork", 1)
]


def covering(cells: list[Cell], *, together: int) -> list[Cell]:
    """Few of the cells, so that any `together` settings that occur in one of them do so here; cheap ones if possible.

    Cells that start fewer workers are cheaper: those kept over the epochs, of fewer ranks.
    """

    def combinations(cell: Cell) -> set[tuple[tuple[int, object], ...]]:
        return set(itertools.combinations(enumerate(vars(cell).values()), together))

    offered = {cell: combinations(cell) for cell in sorted(cells, key=lambda cell: (not cell.persistent, cell.dp_size))}
    missing = set().union(*offered.values())
    chosen = []
    while missing:
        chosen.append(max(offered, key=lambda cell: len(offered[cell] & missing)))
        missing -= offered[chosen[-1]]
    return chosen


# Few workers; every one that is not forked imports torch, which takes seconds. By default a quarter of the cells.
FORKED = covering([cell for cell in CELLS if cell.start == "fork" and cell.num_workers < 8], together=2)
IMPORTING = [Cell("memmap", 1, True, "spawn", 2, 1), Cell("parquet", 1, False, "forkserver", 4, 1)]


def run(cell: Cell, folder: Path, *, seed: int) -> list[str]:
    """Return the digests of every rank's batches over two epochs."""
    config = LoaderConfig(
        global_batch_size=5,
        seed=seed,
        block_packs=4,
        window_blocks=2,
        num_workers=cell.num_workers,
        persistent_workers=cell.persistent,
        start_method=cell.start,
        prefetch_factor=cell.prefetch,
        timeout_s=120.0,
    )
    digests: list[str] = []
    for rank in range(cell.dp_size):
        reader = open_dataset(folder)
        # Used before it is handed to workers, which must not read with this process's files.
        reader.read([0, len(reader) - 1])
        layout = RankLayout(dp_rank=rank, dp_size=cell.dp_size, pad_to_multiple=2)
        schedule = ScheduleConfig("dp_balanced", 64)
        with Loader(reader, config, schedule=schedule, layout=layout, num_epochs=2) as made:
            digests += [batch_digest(batch) for batch in made]
        assert reader[1] == open_dataset(folder)[1]
    return digests


def by_one_process(folders: dict[str, Path], *, seed: int) -> dict[int, list[str]]:
    """Return by number of ranks what one process without workers reads from memory-mapped arrays."""
    cells = [Cell("memmap", 0, True, "fork", 1, dp_size) for dp_size in (1, 2)]
    return {cell.dp_size: run(cell, folders["memmap"], seed=seed) for cell in cells}


@pytest.fixture(scope="module")
def expected(in_every_format: dict[str, Path]) -> dict[int, list[str]]:
    found = by_one_process(in_every_format, seed=0)
    assert [len(set(digests)) for digests in found.values()] == [16, 32]
    return found


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=() if at % 4 == 0 else pytest.mark.submission)
        for at, cell in enumerate(FORKED + IMPORTING)
    ],
)
def test_a_cell_of_the_matrix(in_every_format: dict[str, Path], expected: dict[int, list[str]], cell: Cell) -> None:
    assert run(cell, in_every_format[cell.format], seed=0) == expected[cell.dp_size]


# A spawned worker costs two seconds of a processor, and all cells with one start 2,430: of these cells, so many that
# any three settings that occur together do so here.
WHOLE = [cell for cell in CELLS if cell.start != "spawn"] + covering(
    [cell for cell in CELLS if cell.start == "spawn"], together=3
)
SEEDS = 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_whole_matrix(in_every_format: dict[str, Path], seed: int) -> None:
    # Every two settings on every seed, the whole matrix dealt out over the seeds.
    expected = by_one_process(in_every_format, seed=seed)
    for cell in dict.fromkeys(FORKED + WHOLE[seed::SEEDS]):
        assert run(cell, in_every_format[cell.format], seed=seed) == expected[cell.dp_size], str(cell)
