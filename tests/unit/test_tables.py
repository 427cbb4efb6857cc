"""A table is the same in a terminal, in Markdown and in HTML, and what others wrote in it is text."""

from __future__ import annotations

import io
import re

import pytest

from harness.printing import open_console
from harness.tables import Table, TableCell, open_templates, shorten

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
    assert printed(TABLE) == ["cell      loss  state", "npy        4.5  same", "parquet  12.25  differs"]
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


def test_long_names_that_differ_at_an_end_differ_when_they_are_shortened() -> None:
    names = ["context: 4x dynamic_context max_tokens_per_rank=44 " + layout for layout in ("tp2_sp", "pp2", "ep2")]
    short = [shorten(name, 48) for name in (*names, "moe " + names[0], "4 words")]
    assert len(set(short)) == 5
    assert short[-1] == "4 words"
    assert {len(name) for name in short[:-1]} == {48}
