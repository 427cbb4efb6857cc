"""The history page shows the metrics of all nights with their bands, and marks where a value left its band."""

from __future__ import annotations

import re

from parity_nights import NEWEST, nights, quiet, restless

from harness.parity.history import History, Metric, Night
from harness.parity.pages import render_history
from harness.parity.pages.page import render_nights


def text_of(page: str) -> str:
    page = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_a_value_on_the_edge_is_within_its_band_and_a_missing_one_is_not():
    assert not Night("", 1.0, 1.0, 2.0).left_band
    assert Night("", 0.99, 1.0, 2.0).left_band
    assert Night("", float("nan"), 1.0, 2.0).left_band
    assert Night("", None, 1.0, 2.0).left_band
    assert not Night("", None).left_band


def test_the_newest_night_makes_the_verdict_and_older_ones_are_listed():
    history = restless()
    assert [(metric.name, night.value) for metric, night in history.left] == [
        ("tokens/s, to the reference reader", 0.61),
        ("loss at step 40", None),
        ("peak memory", 1900.0),
    ]
    text = text_of(render_nights(history))
    assert "Left its band 1 metric of 4 in the newest night." in text
    assert "tokens/s, to the reference reader , formats: parquet: 0.61 x, band 0.9 x to 1.05 x" in text
    assert "2026-11-10T02:10:00+00:00 peak memory formats: memmap 1,900 MB 1,200 MB to 1,400 MB" in text
    assert "2026-11-13T02:10:00+00:00 loss at step 40 &lt;b&gt;bold&lt;/b&gt; none 4 nats to 4.2 nats" in text
    assert NEWEST in text


def test_quiet_and_empty_histories_are_pages_too(tmp_path):
    assert "Within all bands 1 metric in the newest night." in text_of(render_nights(quiet()))
    assert "No nights There is no report to read yet." in text_of(render_nights(History("t", [])))
    new = History("t", [Metric("m", "c", "", nights([1.0, 2.0], 0, 1))])
    assert "No band yet." in text_of(render_nights(new))
    render_history(quiet(), tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["history.html"]


def test_a_long_history_lists_the_newest_and_counts_the_rest():
    values: list[float | None] = [9.0] * 28
    metrics = [Metric(f"m{number}", "c", "", nights(values, 0, 1)) for number in range(4)]
    text = text_of(render_nights(History("t", metrics)))
    assert "4 metrics of 4 in the newest night" in text
    assert "and 50 older ones." in text
