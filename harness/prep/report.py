"""Report on a preparation: progress of its stages, and counts as a table, JSON, and pages in Markdown and HTML."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from harness.errors import PrepError
from harness.prep.packing import PackPlan
from harness.prep.shards import SAMPLES, Counts, Receipt, Sample
from harness.prep.spool import Split
from harness.printing import count_of, duration, escape_markdown, one_line
from harness.records import Int32Array
from harness.settings import from_plain, load, to_plain
from harness.storage import join_path
from harness.tables import Row, Table, TableCell, make_histogram, open_templates

_MAX_SOURCES = 200
_MAX_SAMPLES, _MAX_SAMPLES_A_FILE = 24, 3
# The report warns above this ratio of prepared tokens to the tokens of one rendering.
_MUCH_REPETITION = 1.5
_WATCH_S, _LOG_S = 0.5, 1.0
_KINDS = {
    "repeated_tokens": ("tokens repeated", "tokens repeat the conversation before a turn with its own sequence"),
    "truncated": ("cut", "conversations were cut"),
    "split": ("split", "conversations are longer than a pack and were divided"),
    "partial": ("kept in part", "conversations lost sequences that are longer than a pack"),
    "lost_tokens": ("trained tokens lost", "trained tokens were cut off or left out because of their length"),
    "media": ("media left out", "conversations are trained only on their text"),
    "placeholders": ("placeholders removed", "media placeholders were removed from the text"),
    "user_last": ("end with a user turn", "conversations end with a user turn without an answer"),
    "tagged_calls": ("calls in text", "conversations have tool calls in tags; source.tool_calls=hermes reads them"),
}


@dataclass
class SplitReport:
    """Counts of one dataset: conversations, the sequences made from them, tokens, trained tokens, and packs.

    `fill` is the share of the packs' room that is filled with tokens. `length_counts` (sequences by tokens) and
    `fill_counts` (packs by fill in percent) are histograms with upper bounds as keys.
    """

    conversations: int = 0
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    packs: int = 0
    fill: float = 0.0
    fingerprint: str = ""
    length_counts: dict[str, int] = field(default_factory=dict)
    fill_counts: dict[str, int] = field(default_factory=dict)

    def describe_packs(self, lengths: Int32Array, plan: PackPlan, *, pack_size: int) -> None:
        """Fill in the counts of packs and the histograms from the lengths of the sequences (int32 [sequences])."""
        tokens = np.add.reduceat(lengths[plan.sequence_ids], plan.pack_offsets[:-1], dtype=np.int64)
        self.packs = plan.num_packs
        self.fill = self.tokens / (plan.num_packs * pack_size)
        bounds = [1 << power for power in range(4, 40) if 1 << power < pack_size] + [pack_size]
        self.length_counts = _histogram(lengths, bounds)
        self.fill_counts = _histogram(100 * tokens / pack_size, [50, 80, 90, 95, 98, 99, 100])


@dataclass
class SourceReport:
    """Counts of one source file: its records, and the data made from them before duplicates are left out."""

    records: int = 0
    bad: int = 0
    conversations: int = 0
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0


@dataclass
class PrepareReport(Counts):
    """Counts of one preparation, in total and for each source file (by path) or source of a mix (by name).

    `settings` contains everything that the result depends on, `unused` the record fields that are not read, and `mask`
    the facts about the loss mask that the manifests also record. `reused` is true for the report of an earlier run.
    """

    path: str = ""
    settings_hash: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    files: int = 0
    sources: dict[str, SourceReport] = field(default_factory=dict)
    schema: str = ""
    unused: list[str] = field(default_factory=list)
    mask: dict[str, str] = field(default_factory=dict)
    vocab_size: int = 0
    splits: dict[str, SplitReport] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    reused: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in to_plain(self).items() if name != "reused"}

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, path: str) -> PrepareReport:
        """Return the report of an earlier run; raise PrepError if it is damaged."""
        try:
            return replace(from_plain(cls, {**values, "path": path}), reused=True)
        except ValueError as error:
            what = f"the report of the earlier run is damaged: {error}"
            fix = "remove the file and run again with data.overwrite=true, or use another folder"
            raise PrepError(what, where=join_path(path, "report.json"), fix=fix) from error

    def add_shard(self, path: str, receipt: Receipt) -> None:
        self.add(receipt.counts)
        counts = {**vars(receipt), "records": receipt.counts.records, "bad": receipt.counts.bad.total()}
        source = vars(self.sources.setdefault(path, SourceReport()))
        source |= {name: number + counts[name] for name, number in source.items()}

    def add_split(self, name: str, split: Split) -> None:
        counts = (split.num_conversations, len(split), split.num_tokens, split.num_trained_tokens)
        self.splits[name] = SplitReport(*counts)

    def provenance_counts(self) -> dict[str, int]:
        counts = {"records": self.records, "truncated": self.truncated, "vocab_size": self.vocab_size}
        names = ("split", "partial", "lost_tokens", "media", "placeholders", "user_last")
        counts |= {name: getattr(self, name) for name in names}
        if self.media_by_kind:
            counts |= {f"kept_{kind}": number for kind, number in sorted(self.media_by_kind.items())}
            counts |= {"media_tokens": self.media_tokens, "audio_seconds": round(self.audio_seconds)}
        counts |= {f"bad_{reason}": number for reason, number in sorted(self.bad.items())}
        return counts | {f"dropped_{reason}": number for reason, number in sorted(self.dropped.items())}

    def left_out(self) -> str:
        """Return the numbers of records left out by reason, as text; empty if there are none."""
        return ", ".join(f"{number:,} {why}" for why, number in sorted((self.bad + self.dropped).items()))

    def split_table(self) -> Table:
        """Return the main figures, one row per figure and one column per split."""
        rows: dict[str, list[str | TableCell]] = {}
        for split in self.splits.values():
            is_one = split.sequences == split.conversations
            each = "" if is_one else f" ({split.sequences / (split.conversations or 1):.2f} each)"
            figures: dict[str, str | TableCell] = {
                "conversations": f"{split.conversations:,}",
                "sequences": f"{split.sequences:,}{each}",
                "tokens": f"{split.tokens:,}",
                "trained tokens": f"{split.trained_tokens:,} ({split.trained_tokens / (split.tokens or 1):.1%})",
                "packs": f"{split.packs:,}",
                "fill": f"{split.fill:.2%}",
                "fingerprint": TableCell(split.fingerprint[:16], "code"),
            }
            for name, figure in figures.items():
                rows.setdefault(name, [name]).append(figure)
        return Table(("", *self.splits), list(rows.values()), "lr")

    def findings_table(self) -> Table:
        """Return a table of the findings about records, with the first places of each."""
        rows = [
            (title, f"{count:,}", text, TableCell("; ".join(places), "code"))
            for title, text, count, places in self.findings()
        ]
        return Table(("kind", "count", "meaning", "first"), rows, "lrl")

    def facts_table(self) -> Table:
        """Return a table of lost and repeated tokens, and of facts such as the schema, the mask and unused fields."""
        # Relative to one rendering of each conversation; duplicates count.
        tokens = sum(source.tokens for source in self.sources.values())
        repetition = tokens / (tokens - self.repeated_tokens) if tokens else 1.0
        repeated = (
            f"{repetition:.1f} times the tokens of one rendering: the chat template renders a turn differently once "
            "others follow, so each has a sequence of its own; to write one sequence per conversation, set "
            "tokenizer.train_on=last_turn, or tokenizer.history=kept (--preview shows how it differs from serving)"
        ) * (repetition > _MUCH_REPETITION)
        facts = {"schema": self.schema, "mask": self.mask.get("rule", ""), "because": self.mask.get("why", "")}
        facts |= {"history": self.mask.get("history", ""), "trained turns": self.mask.get("train_on", "")}
        if self.media_by_kind:
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(self.media_by_kind.items()))
            hours = f"; {self.audio_seconds / 3600:.2f} hours of audio" if self.audio_seconds else ""
            facts["media"] = f"{kinds}{hours}; {self.media_tokens:,} tokens"
        facts["tokens, relative to one rendering"] = f"{repetition:.2f}"
        facts["unused fields"] = ", ".join(self.unused)
        rows: list[Row] = [
            (name, TableCell(text, kind))
            for kind, texts in (("warning", {"lost": self.loss(), "repeated": repeated}), ("code", facts))
            for name, text in texts.items()
            if text
        ]
        return Table((), [*rows, ("vocabulary size", f"{self.vocab_size:,}")])

    def source_table(self, most: int) -> Table:
        head = ("file", "records", "bad", "conversations", "sequences", "tokens", "trained")
        rows = []
        for file, source in islice(self.sources.items(), most):
            counts = (source.records, source.bad, source.conversations, source.sequences, source.tokens)
            trained = f"{source.trained_tokens / source.tokens:.1%}" if source.tokens else ""
            rows.append((file, *(f"{count:,}" for count in counts), trained))
        return Table(head, rows, "lr")

    def findings(self) -> list[tuple[str, str, int, list[str]]]:
        """Return the findings about records: title, explanation, count and first places of each."""
        found = []
        for kind, text in (("bad", "bad records"), ("dropped", "conversations were left out")):
            counts = sorted(getattr(self, kind).items())
            found += [(f"{kind} {reason}", f"{kind}: {reason}", text, count) for reason, count in counts]
        found += [(kind, *words, getattr(self, kind)) for kind, words in _KINDS.items() if getattr(self, kind)]
        return [(title, text, count, self.examples.get(kind, [])) for kind, title, text, count in found]

    def loss(self) -> str:
        """Describe what was left out of conversations longer than a pack, with shares; empty if nothing was."""
        data = self.settings.get("data", {})
        # Dividing text costs one label per boundary, of a token that nothing in its pack precedes.
        if not self.lost_tokens or (self.schema == "text" and data.get("over_long") == "split"):
            return ""
        media = self.dropped["over_long_media"]
        dropped = media + self.dropped["over_long"] + self.dropped["untrained"]
        conversations = dropped + sum(source.conversations for source in self.sources.values())
        tokens = self.lost_tokens + sum(source.trained_tokens for source in self.sources.values())
        kinds = [(dropped, "left out"), (self.partial, "left out in part"), (self.truncated, "cut")]
        kinds += [] if any(number for number, _ in kinds) else [(self.split, "divided")]
        # Media are never split.
        can_split = data.get("over_long") != "split" and sum(number for number, _ in kinds) > media
        found = ", ".join(
            f"{number:,} of {conversations:,} conversations ({number / conversations:.1%}) {kind}"
            for number, kind in kinds
            if number
        )
        return (
            f"{found}, with {self.lost_tokens:,} of {tokens:,} trained tokens ({self.lost_tokens / tokens:.1%}): "
            f"longer than data.pack_size={data.get('pack_size')}, and data.over_long={data.get('over_long')}; "
            "to keep them: " + ("data.over_long=split or " if can_split else "") + "a larger data.pack_size"
        )


def render_report(report: PrepareReport) -> RenderableType:
    """Return a table with one column per split, and a table of findings and facts about the records."""
    below: list[Row] = [("records read", f"{report.records:,}")]
    for finding, _, count, places in report.findings():
        below.append((finding, f"{count:,}" + (f", first {places[0]}" if places else "")))
    below += [*report.facts_table().rows, ("seconds", f"{sum(report.seconds.values()):.1f}")]
    title = Text(one_line(report.path), style="bold")
    return Group(title, report.split_table().to_terminal(), "", Table((), below).to_terminal())


def to_markdown(report: PrepareReport) -> str:
    """Return a Markdown page: counts of records, and histograms of sequence lengths and pack fill."""
    left_out = f"; left out: {report.left_out()}" if report.left_out() else ""
    read = f"Read {count_of(report.records, 'record')} from {count_of(report.files, 'file')}{left_out}."
    parts = [f"# {escape_markdown(Path(report.path).name)}", report.split_table().to_markdown()]
    parts += [f"{read} The tokenizer has {report.vocab_size:,} tokens.", report.facts_table().to_markdown()]
    parts += [report.findings_table().to_markdown()] if report.findings() else []
    for name, split in report.splits.items():
        fill = {f"{key}%": count for key, count in split.fill_counts.items()}
        tables = (("tokens per sequence, at most", split.length_counts), ("pack fill, at most", fill))
        parts += [f"## {escape_markdown(name)}", *(make_histogram(*table).to_markdown() for table in tables)]
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in report.seconds.items())
    parts += [f"Settings `{report.settings_hash}`, in full in `report.json`. Time: {seconds}.\n"]
    return "\n\n".join(parts)


def choose_samples(shards: Iterable[tuple[str, Path]]) -> list[Sample]:
    """Return the first samples of each source file, up to a page's limits, given the file and folder of each shard."""
    chosen: list[Sample] = []
    counts: dict[str, int] = {}
    for file, folder in shards:
        wanted = min(_MAX_SAMPLES_A_FILE - counts.get(file, 0), _MAX_SAMPLES - len(chosen))
        if wanted:
            with (folder / SAMPLES).open("rb") as lines:
                found = [load(Sample, line, where=folder / SAMPLES) for line in islice(lines, wanted)]
            counts[file] = counts.get(file, 0) + len(found)
            chosen += found
    return chosen


def render_page(report: PrepareReport, samples: Sequence[Sample]) -> str:
    """Return the HTML page; all text from the data is escaped."""
    lengths = {name: make_histogram("tokens", split.length_counts) for name, split in report.splits.items()}
    values = {"report": report, "lengths": lengths, "max_sources": _MAX_SOURCES, "samples": samples}
    template = open_templates(Path(__file__).parent).get_template("report.html.j2")
    return template.render(name=Path(report.path).name, **values)


def _histogram(values: npt.NDArray[Any], bounds: list[int]) -> dict[str, int]:
    counts = np.bincount(np.searchsorted(bounds, values, side="left"), minlength=len(bounds))
    return {str(bound): int(count) for bound, count in zip(bounds, counts[: len(bounds)].tolist(), strict=True)}


class Stage:
    """A running stage: every half second, shows its progress plus that from `measure`; `summary` is printed last."""

    def __init__(self, stages: Stages, bar: Progress, name: str, doing: str, total: float | None) -> None:
        self.summary = ""
        self.measure: Callable[[], float] = lambda: 0.0
        self._stages, self._name, self._doing, self._total = stages, name, doing, int(total or 0)
        self._bar, self._task, self._lock = bar, bar.add_task(doing, total=total, left=""), threading.Lock()
        self._shown = self._done = self._earlier = 0.0
        self._first: tuple[float, float] | None = None
        self._began = self._written = time.perf_counter()
        self.advance(0)

    def advance(self, step: float, *, is_earlier: bool = False) -> None:
        """Add progress; progress of an earlier run is left out of the time estimate."""
        with self._lock:
            self._done += step
            self._earlier += step * is_earlier
            self._show(self._done)

    def next_part(self, doing: str) -> None:
        """Show another part of the stage, of unknown length, with a moving bar."""
        with self._lock:
            self._doing, self._total = doing, 0
            self._bar.update(self._task, visible=False)
            self._task = self._bar.add_task(doing, total=None, left="")

    def watch(self, measure: Callable[[], float]) -> None:
        """Also show the progress that `measure` returns; its current value counts as progress of an earlier run."""
        self._earlier, self.measure = self._earlier + measure(), measure

    def keep_showing(self, ended: threading.Event) -> None:
        while not ended.wait(_WATCH_S):
            with self._lock:
                self._show(self._done + self.measure())

    def _show(self, done: float) -> None:
        self._shown, left = max(self._shown, done), ""  # `done` drops when a part has ended but is not yet in `_done`
        now, own = time.perf_counter(), self._shown - self._earlier
        if own > 0 and self._shown < self._total:
            self._first = began, before = self._first or (now, own)
            speed = (own - before) / (now - began or 1)
            left = f"about {duration((self._total - self._shown) / speed)} left" if speed else ""
        self._bar.update(self._task, completed=self._shown, left=left)
        if self._stages.progress is not None:
            self._stages.progress(self._name, int(self._shown), self._total)
        # Log a line every second at first, later after each twentieth of the elapsed time.
        if self._bar.disable and now - self._written >= max(_LOG_S, (now - self._began) / 20):
            self._written, share = now, f"{self._shown / self._total:.1%}" if self._total else ""
            text = ", ".join(filter(None, (self._doing, share, left)))
            self._stages.show(f"{self._name:<10}{now - self._began:7.1f} s  {text}")


@dataclass
class Stages:
    """Display of a preparation's stages, with a bar while one runs and a line when it ends; records their times."""

    console: Console
    progress: Callable[[str, int, int], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, doing: str, *, total: float | None = None) -> Iterator[Stage]:
        """Show `doing` with a bar (a moving one if `total` is None), then a line with the time it took."""
        title, left = (TextColumn(f"{{task.{text}}}", markup=False) for text in ("description", "fields[left]"))
        columns = (title, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), left)
        began, ended = time.perf_counter(), threading.Event()
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            stage = Stage(self, bar, name, doing, total)
            thread = threading.Thread(target=stage.keep_showing, args=(ended,), daemon=True)
            thread.start()
            try:
                yield stage
            finally:
                ended.set()
                thread.join()
        self.seconds[name] = round(time.perf_counter() - began, 3)
        self.show(f"{name:<10}{self.seconds[name]:7.1f} s  {stage.summary}")

    def show(self, text: str) -> None:
        """Print a permanent line."""
        self.console.print(Text(one_line(text)), soft_wrap=True)
