"""A report shows the rows that data-parallel ranks share, as the run recorded them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import yaml
from harness.recipes.parity import make_dataset
from parity_reports import cell, read_report, reference, report

import harness.parity.pages
from harness.config import compose_config
from harness.formats import open_dataset
from harness.loader import Loader, LoaderConfig, RankLayout
from harness.parity.assemble import placement_of
from harness.parity.locate import recorded_run
from harness.parity.pages import render_all
from harness.parity.pages.curves import draw_waves
from harness.parity.result import REPORT_FILE, to_json
from harness.plan import SftConfig, sequence_cost
from harness.schedule import ScheduleConfig, SequenceCost, schedule
from harness.settings import to_plain
from harness.train.digests import DigestWriter, StepDigests, merge_ranks, rank_rows

RANKS, TOKENS = 4, 24
PLACED = {
    "step": 3,
    "dp_size": 2,
    "lengths": [40, 10, 12],
    "row_offsets": [0, 1, 1, 2, 3],
    "shared_by": [2, 2, 1, 1],
    "cost": {"linear": 1.0, "quadratic": 0.01, "exchange": 0.0, "swap": 0.0},
}


def digests(data: Path, name: str, step: int) -> StepDigests:
    """Return what the ranks of a run record of the first global batch."""
    options = {"schedule": ScheduleConfig(name, TOKENS if name == "dynamic_context" else 256), "cost": cost()}
    loading, parts = LoaderConfig(global_batch_size=6, num_workers=0), []
    for rank in range(RANKS):
        layout = RankLayout(dp_rank=rank, dp_size=RANKS, shares_rows=True)
        batch = next(iter(Loader(open_dataset(data), loading, layout=layout, num_steps=1, **options)))
        parts.append(rank_rows(batch, process=rank, dp_rank=rank, is_first_stage=True, is_last_stage=True))
    return merge_ranks(step, batch, parts)


def config() -> SftConfig:
    return compose_config("sft", SftConfig, ["model.vocab_size=300", "schedule=dynamic_context"])


def cost() -> SequenceCost:
    return sequence_cost(config().model)


def test_the_rows_of_a_report_are_those_that_the_ranks_trained(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data") / "train"
    run = tmp_path / "run"
    run.mkdir()
    assert placement_of(recorded_run(run), run, RANKS) is None  # recorded nothing
    (run / "config.yaml").write_text(yaml.safe_dump(to_plain(config())))
    writer = DigestWriter(run)
    writer.write(digests(data, "dp_balanced", 1))
    assert placement_of(recorded_run(run), run, RANKS) is None
    shared = digests(data, "dynamic_context", 2)
    writer.write(shared)
    writer.close()

    placed = placement_of(recorded_run(run), run, RANKS)
    # The same batch scheduled again: all sequences of the recorded rows, in the order of the dataset.
    reader = open_dataset(data)
    ids = np.concatenate([row.sequences for row in shared.rows])
    packs = np.asarray(shared.packs)
    order = np.concatenate([np.arange(*reader.pack_offsets[[pack, pack + 1]]) for pack in packs])
    assert sorted(ids) == sorted(order)
    sizes = {"dp_size": RANKS, "max_tokens_per_rank": TOKENS, "cost": cost()}
    again = schedule("dynamic_context", reader.sequence_lengths[order] - 1, **sizes)
    assert (placed["step"], placed["dp_size"]) == (2, RANKS)
    assert placed["row_offsets"] == again.row_offsets.tolist()
    assert placed["shared_by"] == again.shared_by.tolist()
    assert placed["lengths"] == (reader.sequence_lengths[order] - 1)[again.order].tolist()
    assert placed["cost"]["exchange"] == cost().exchange > 0
    assert max(placed["shared_by"]) == RANKS


def test_a_page_draws_the_rows_of_the_cells_that_have_some(tmp_path: Path) -> None:
    found = report([reference(), cell("a $x^ name", "parquet", 0, placement=PLACED), cell("b", "memmap", 0)])
    (chart,) = draw_waves(found)
    assert (chart.title, chart.source[:30]) == ("a $x^ name", "data:image/png;base64,iVBORw0K")
    render_all(found, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("Shared rows") == 2  # the heading, and the link to it
    assert page.count("data:image/png") == 4  # after three curves
    render_all(replace(found, cells=[found.cells[0], found.cells[2]]), tmp_path)
    assert "Shared rows" not in (tmp_path / "report.html").read_text()

    schema = json.loads(Path(harness.parity.pages.__file__).with_name("report.schema.json").read_text())
    (tmp_path / REPORT_FILE).write_text(to_json(found))
    jsonschema.validate(json.loads((tmp_path / REPORT_FILE).read_text()), schema)
    assert read_report(tmp_path / REPORT_FILE).cells[1].placement == PLACED
    assert set(schema["$defs"]["Placement"]["required"]) == set(PLACED)
