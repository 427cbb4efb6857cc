"""What a preparation did: counted on the way, shown as a table, stored as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from harness.errors import PrepError


@dataclass
class SplitReport:
    """One dataset: conversations (each one sequence), tokens, those that are trained, and packs."""

    conversations: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    packs: int = 0
    fill: float = 0.0
    fingerprint: str = ""


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


def _with_share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else "0"
