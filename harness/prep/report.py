"""What a preparation did: counted on the way, shown as a table, stored as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from harness.errors import PrepError
from harness.prep.packing import PackPlan
from harness.records import Int32Array

_BAR = 50


@dataclass
class SplitReport:
    """One dataset: conversations (each one sequence), tokens, those that are trained, and packs.

    Attributes:
        fill: share of the packs' room that holds tokens.
        length_counts: conversations of so many tokens at most, and more than the bound before.
        fill_counts: packs that are so full at most, in percent, and fuller than the bound before.
    """

    conversations: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    packs: int = 0
    fill: float = 0.0
    fingerprint: str = ""
    length_counts: dict[str, int] = field(default_factory=dict)
    fill_counts: dict[str, int] = field(default_factory=dict)

    def describe_packs(self, lengths: Int32Array, plan: PackPlan, *, pack_size: int) -> None:
        """Count packs, their fill, and conversations by length (int32 [conversations])."""
        tokens = np.add.reduceat(lengths[plan.sequence_ids], plan.pack_offsets[:-1], dtype=np.int64)
        self.packs = plan.num_packs
        self.fill = self.tokens / (plan.num_packs * pack_size)
        bounds = [1 << power for power in range(4, 40) if 1 << power < pack_size] + [pack_size]
        self.length_counts = _count(lengths, bounds)
        self.fill_counts = _count(100 * tokens / pack_size, [50, 80, 90, 95, 98, 99, 100])


@dataclass
class PrepareReport:
    """Account of one preparation.

    Attributes:
        path: the folder.
        settings_hash: of `settings`.
        settings: all that the result depends on.
        files: source files read.
        records: records read; each is in a split, bad or dropped.
        bad: bad records by reason.
        dropped: conversations left out for their length, by reason.
        truncated: conversations that were cut and kept.
        vocab_size: of the tokenizer.
        splits: by name.
        seconds: by stage.
        reused: an earlier run had done it all.
    """

    path: str
    settings_hash: str
    settings: dict[str, Any]
    files: int = 0
    records: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    vocab_size: int = 0
    splits: dict[str, SplitReport] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    reused: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        # asdict() cannot rebuild a Counter.
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "reused"}
        splits = {name: asdict(split) for name, split in self.splits.items()}
        return values | {"bad": dict(self.bad), "dropped": dict(self.dropped), "splits": splits}

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, path: Path) -> PrepareReport:
        """The report of an earlier run."""
        try:
            kept = {name: values[name] for name in ("settings_hash", "settings", "files", "records", "truncated")}
            return cls(
                path=str(path),
                vocab_size=values["vocab_size"],
                bad=Counter(values["bad"]),
                dropped=Counter(values["dropped"]),
                splits={name: SplitReport(**split) for name, split in values["splits"].items()},
                seconds=values["seconds"],
                reused=True,
                **kept,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise PrepError(
                f"the report of the earlier run is damaged: {error!r}",
                where=str(path / "report.json"),
                fix="remove the file and run again with data.overwrite=true, or name another folder in data.path",
            ) from error

    def check_sums(self) -> None:
        """Raise PrepError unless every record that was read is accounted for."""
        kept = sum(split.conversations for split in self.splits.values())
        found = kept + self.bad.total() + self.dropped.total()
        if found != self.records:
            raise PrepError(f"{self.records:,} records were read but {found:,} are accounted for", where=self.path)

    def provenance_counts(self) -> dict[str, int]:
        """Whole numbers for a dataset's manifest."""
        counts = {"records": self.records, "truncated": self.truncated, "vocab_size": self.vocab_size}
        counts |= {f"bad_{reason}": number for reason, number in sorted(self.bad.items())}
        return counts | {f"dropped_{reason}": number for reason, number in sorted(self.dropped.items())}


def render_report(report: PrepareReport) -> Table:
    """What was done, as a table; one column a split."""
    names = list(report.splits)
    table = Table(title=f"{report.path}", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    splits = [report.splits[name] for name in names]
    table.add_row("conversations", *(f"{split.conversations:,}" for split in splits))
    table.add_row("tokens", *(f"{split.tokens:,}" for split in splits))
    table.add_row("trained tokens", *(_with_share(split.trained_tokens, split.tokens) for split in splits))
    table.add_row("packs", *(f"{split.packs:,}" for split in splits))
    table.add_row("fill", *(f"{split.fill:.2%}" for split in splits))
    table.add_section()
    table.add_row("records read", f"{report.records:,}")
    for reason, number in sorted(report.bad.items()):
        table.add_row(f"bad: {reason}", f"{number:,}")
    for reason, number in sorted(report.dropped.items()):
        table.add_row(f"dropped: {reason}", f"{number:,}")
    table.add_row("truncated", f"{report.truncated:,}")
    table.add_row("tokens of the tokenizer", f"{report.vocab_size:,}")
    table.add_row("seconds", f"{sum(report.seconds.values()):.1f}")
    return table


def to_markdown(report: PrepareReport) -> str:
    """A page: what was read, kept and left out, and how long conversations and how full packs are."""
    lines = [f"# {Path(report.path).name}", ""]
    names = list(report.splits)
    lines += ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    splits = [report.splits[name] for name in names]
    for title, values in (
        ("conversations", [f"{split.conversations:,}" for split in splits]),
        ("tokens", [f"{split.tokens:,}" for split in splits]),
        ("trained tokens", [_with_share(split.trained_tokens, split.tokens) for split in splits]),
        ("packs", [f"{split.packs:,}" for split in splits]),
        ("fill", [f"{split.fill:.2%}" for split in splits]),
        ("fingerprint", [f"`{split.fingerprint[:16]}`" for split in splits]),
    ):
        lines.append(f"| {title} | " + " | ".join(values) + " |")
    left_out = [f"{number:,} {why}" for why, number in sorted((report.bad + report.dropped).items())]
    lines += [
        "",
        f"{report.records:,} records were read from {report.files:,} files"
        + (f"; left out: {', '.join(left_out)}" if left_out else "")
        + (f"; {report.truncated:,} were cut" if report.truncated else "")
        + f". The tokenizer has {report.vocab_size:,} tokens.",
    ]
    for name, split in report.splits.items():
        lines += ["", f"## {name}", "", "```", "conversations by tokens, at most", *_bars(split.length_counts)]
        lines += ["", "packs by fill, at most", *_bars({f"{key}%": count for key, count in split.fill_counts.items()})]
        lines += ["```"]
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in report.seconds.items())
    lines += ["", f"Settings `{report.settings_hash}`, in full in `report.json`. Time: {seconds}.", ""]
    return "\n".join(lines)


def _bars(counts: dict[str, int]) -> list[str]:
    most, total = max(counts.values(), default=0), sum(counts.values())
    width = max(map(len, counts), default=0)
    return [
        f"{key:>{width}} {'#' * round(_BAR * count / most) if most else '':<{_BAR}} {count:,} ({count / total:.1%})"
        for key, count in counts.items()
        if total
    ]


def _count(values: npt.NDArray[Any], bounds: list[int]) -> dict[str, int]:
    found = np.bincount(np.searchsorted(bounds, values, side="left"), minlength=len(bounds))
    return {str(bound): int(count) for bound, count in zip(bounds, found[: len(bounds)].tolist(), strict=True)}


def _with_share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else "0"
