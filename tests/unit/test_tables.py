"""A table is the same in a terminal, in Markdown and in HTML, and what others wrote in it is text."""

from __future__ import annotations

import io
import re

import pytest

from harness.printing import open_console
from harness.tables import Table, TableCell, make_histogram, open_templates, shorten

TABLE = Table(
    ("cell", "loss", "state"),
    [
        ("npy", "4.5", TableCell("same", "same")),
        ("parquet", "12.25", TableCell("differs", "different", "#cell-1", "x")),
    ],
    "lrl",
)
HOSTILE = "<b onclick='x'>\x1b[31m|`[a](b)\n# two \ud800"


def printed(table: Table, width: int = 80) -> list[str]:
    file = io.StringIO()
    open_console(file=file, width=width).print(table.to_terminal())
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_numbers_are_aligned_right_in_a_terminal_and_a_narrow_one_folds_text() -> None:
    assert printed(TABLE) == [
        "cell      loss  state",
        "npy        4.5  same",
        "parquet  12.25  differs",
    ]
    lines = printed(Table((), [("path", "/data/" + "x" * 60)]), width=40)
    assert "".join(line.removeprefix("path").strip() for line in lines) == "/data/" + "x" * 60


def test_markdown_is_bold_where_something_is_wrong() -> None:
    assert TABLE.to_markdown().splitlines() == [
        "| cell | loss | state |",
        "| --- | --: | --- |",
        "| npy | 4.5 | same |",
        "| parquet | 12.25 | **differs** |",
    ]
    assert Table((), [("name", TableCell("a_b*", "code"))]).to_markdown().splitlines()[-1] == "| name | `a_b*` |"


def test_html_has_heads_of_rows_links_signs_and_bars() -> None:
    page = TABLE.to_html("all cells")
    assert 'aria-label="all cells"' in page
    assert '<th scope="col" class="number">loss</th>' in page
    assert '<th scope="row">npy</th><td class="number">4.5</td>' in page
    assert '<a class="tile different" href="#cell-1" title="x"><span class="sign" aria-hidden="true">✗</span>' in page
    bar = Table((), [("fast", TableCell("10", share=0.25))]).to_html("speed")
    assert '<td class="bar" style="--share: 0.250">10</td>' in bar


def test_several_cells_share_a_place_and_an_ellipsis_ends_shortened_text() -> None:
    table = Table((), [("both", [TableCell("a", "same"), TableCell("b")])])
    assert printed(table) == ["both  a b"]
    assert table.to_markdown().splitlines()[-1] == "| both | a b |"
    assert (shorten("12345", 5), shorten("123456", 5)) == ("12345", "1234…")


def test_a_histogram_draws_a_mark_for_every_count_but_zero() -> None:
    histogram = make_histogram("tokens", {"16": 0, "32": 1, "64": 999})
    assert [line.count("█") for line in printed(histogram)] == [0, 0, 1, 40]
    assert [line.count("█") for line in histogram.to_markdown().splitlines()] == [0, 0, 0, 1, 40]
    assert make_histogram("tokens", {"16": 0}).rows[0][:3] == ("16", "0", "0.0%")


@pytest.mark.parametrize("cell", [TableCell(HOSTILE, "code", HOSTILE, HOSTILE), TableCell(HOSTILE, HOSTILE), HOSTILE])
def test_texts_of_others_are_text(cell: str | TableCell, tmp_path) -> None:
    table = Table((HOSTILE, "b"), [(HOSTILE, cell)])
    (tmp_path / "page").write_text("{{ table | table(label) }}{{ label }}")
    page = open_templates(tmp_path).get_template("page").render(table=table, label=HOSTILE)
    assert "<b" not in page
    assert len(re.findall(r"<t[hd]", page)) == 4 + 1  # and <thead>
    assert not {"\x1b", "\ud800"} & {*page, *table.to_markdown(), *"".join(printed(table, 200))}
    head, _, row = table.to_markdown().splitlines()
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in (head, row)] == [3, 3]
    assert len(printed(table, 200)) == 2
