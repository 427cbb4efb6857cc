"""The HTML page of a preparation: counts, lengths, sources, and samples with their masks, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from harness.prep.report import PrepareReport
from harness.prep.samples import Sample
from harness.prep.shards import read_samples
from harness.tables import make_histogram, open_templates

# Rows of the table of source files.
_MAX_SOURCES = 200
# Samples of the page, and of one file.
_MAX_SAMPLES, _MAX_SAMPLES_A_FILE = 24, 3


def choose_samples(shards: Iterable[tuple[str, Path]]) -> list[Sample]:
    """Return the first samples of each file, as many as a page shows.

    Args:
        shards: the source file and the folder of each finished shard; folders of which none are needed are not read.
    """
    chosen: list[Sample] = []
    counts: dict[str, int] = {}
    for file, folder in shards:
        wanted = min(_MAX_SAMPLES_A_FILE - counts.get(file, 0), _MAX_SAMPLES - len(chosen))
        if wanted:
            found = list(islice(read_samples(folder), wanted))
            counts[file] = counts.get(file, 0) + len(found)
            chosen += found
    return chosen


def render_page(report: PrepareReport, samples: Sequence[Sample]) -> str:
    """Return the page; every text of the data is escaped."""
    return (
        open_templates(Path(__file__).parent)
        .get_template("report.html.j2")
        .render(
            name=Path(report.path).name,
            report=report,
            lengths={name: make_histogram("tokens", split.length_counts) for name, split in report.splits.items()},
            max_sources=_MAX_SOURCES,
            samples=samples,
        )
    )
