"""Summaries of a dataset (counts and lengths), and the text of one pack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from harness.errors import ConfigError
from harness.formats.opening import find_splits, holds_dataset, open_dataset
from harness.formats.reader import PackReader
from harness.printing import count_of, one_line, printable
from harness.records import Int64Array, Pack, SequenceView
from harness.storage import open_folder, parse_place
from harness.storage.connections import resolve_path
from harness.tables import Table, make_histogram

TRAINED_STYLE, CONTEXT_STYLE = "bold green", "dim"


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


def find_datasets(path: str) -> list[str]:
    """Return the datasets at a path: those of a prepared folder (`train`, `validation`), or the path itself."""
    splits = [*find_splits(path).values()]
    return splits if any(map(holds_dataset, splits)) else [path]


def inspect_dataset(path: str) -> dict[str, Any]:
    """Summarize a dataset from its index; only files without a manifest are read. FormatError if it is damaged.

    Without a manifest, `pack_size` is the longest pack, and `fingerprint` and `provenance` are empty. `fill` is the
    share of the packs' capacity that holds tokens; `shortest` to `longest` are tokens of a sequence.
    """
    reader = open_dataset(path)
    lengths, manifest = np.asarray(reader.sequence_lengths, np.int64), reader.manifest
    tokens = int(lengths.sum())
    trained = manifest.num_trained_tokens if manifest else sum(int(np.count_nonzero(pack.loss_mask)) for pack in reader)
    return {
        "path": path,
        "format": reader.format,
        "pack_size": reader.pack_size,
        "packs": len(reader),
        "sequences": len(lengths),
        "tokens": tokens,
        "trained_tokens": trained,
        "fill": tokens / (len(reader) * reader.pack_size),
        "shortest": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": tokens / len(lengths),
        "longest": int(lengths.max()),
        "histogram": length_histogram(lengths),
        "fingerprint": manifest.fingerprint if manifest else "",
        "provenance": asdict(manifest.provenance) if manifest else {},
        "media": reader.count_media(),
    }


def length_histogram(lengths: Int64Array) -> list[tuple[int, int, int]]:
    """Count sequences by length: (first, last, count) for each power of two from the shortest to the longest."""
    powers = np.frexp(lengths.astype(np.float64))[1] - 1
    counts = np.bincount(powers)
    return [(2**p, 2 ** (p + 1) - 1, int(counts[p])) for p in range(int(powers.min()), len(counts))]


def render_summary(summary: dict[str, Any]) -> RenderableType:
    """Render what `inspect_dataset` returns."""
    rows = {
        "format": summary["format"],
        "packs": "{packs:,} of up to {pack_size:,} tokens".format(**summary),
        "sequences": f"{summary['sequences']:,} ({summary['sequences'] / summary['packs']:.1f} per pack)",
        "tokens": f"{summary['tokens']:,}",
        "trained tokens": f"{summary['trained_tokens']:,} ({summary['trained_tokens'] / summary['tokens']:.1%})",
        "fill": f"{summary['fill']:.2%}",
        "sequence length": "{shortest:,} to {longest:,}, median {median:,.0f}, mean {mean:,.1f}".format(**summary),
        "media stored": ", ".join(f"{count:,} {kind}" for kind, count in summary["media"].items()),
    }
    known = {key: value for key, value in summary["provenance"].items() if key != "counts" and value is not None}
    mask = known.pop("mask", {})
    known["mask"] = "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in mask.items() if value != "[]")
    rows |= {key.replace("_", " "): str(value) for key, value in known.items()} | {
        "fingerprint": summary["fingerprint"]
    }
    counts = summary["provenance"].get("counts", {})
    rows |= {key.replace("_", " "): f"{value:,}" for key, value in counts.items() if value}
    table = Table((), [(name, shown) for name, shown in rows.items() if shown]).to_terminal()
    lengths = {f"{first:,}-{last:,}": count for first, last, count in summary["histogram"]}
    bars = make_histogram("tokens", lengths).to_terminal()
    below = Text("\nsequences by length in tokens", style="bold")
    return Group(Text(one_line(summary["path"]), style="bold"), table, below, bars)


class TokenizerFile:
    """Decodes with a folder's tokenizer.json alone, which loads in a moment."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer; raises ConfigError if that fails."""
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            fix = "set tokenizer.name=DIR to a folder that contains a tokenizer.json"
            raise ConfigError(f"the tokenizer cannot be loaded: {error}", where=str(file), fix=fix) from error
        self._folder = folder

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, special tokens included; raises ConfigError if an id is not in the vocabulary."""
        tokens = list(map(int, ids))
        if unknown := [token for token in tokens if self._tokenizer.id_to_token(token) is None]:
            what = f"the tokenizer has no token {unknown[0]:,}, so it is not the tokenizer of this dataset"
            fix = "set tokenizer.name=DIR to the tokenizer of the dataset"
            raise ConfigError(what, where=str(self._folder), fix=fix)
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def find_tokenizer(reader: PackReader, named: str = "") -> TokenizerFile:
    """Load the tokenizer of the named folder, or that of a dataset; raises ConfigError if there is none."""
    return TokenizerFile(Path(named) if named else find_tokenizer_folder(reader))


def find_tokenizer_folder(reader: PackReader) -> Path:
    """Return the tokenizer folder that a dataset's manifest names; raises ConfigError if it names none."""
    stored = reader.manifest.provenance.tokenizer if reader.manifest else ""
    if not stored:
        what = "the dataset does not record its tokenizer, or the tokenizer is not on this machine"
        raise ConfigError(what, where=reader.path, fix="set tokenizer.name=DIR")
    # Stored relative to the dataset, so that both can be moved together.
    place = parse_place(reader.path)
    is_file = place.is_file() if isinstance(place, Path) else reader.files() == [place]
    return open_folder(str(resolve_path(place.parent if is_file else place, stored))).copy()


def find_pack(reader: PackReader, index: int) -> Pack:
    """Return a pack; raise ConfigError if there is none, and FormatError if it is damaged."""
    if not -len(reader) <= index < len(reader):
        fix = f"packs are numbered 0 to {len(reader) - 1:,}"
        raise ConfigError(f"there is no pack {index:,}", where=reader.path, fix=fix)
    return reader[index]


def render_pack(reader: PackReader, index: int, tokenizer: Decoder) -> RenderableType:
    """Render the text of one pack, sequence by sequence; tokens that are trained stand out. Raises as `find_pack`."""
    pack = find_pack(reader, index)
    number = index % len(reader)
    trained = int(np.count_nonzero(pack.loss_mask))
    sequences = count_of(pack.num_sequences, "sequence")
    parts: list[RenderableType] = [
        Text(f"pack {number:,}: {sequences}, {count_of(len(pack), 'token')}, {trained:,} trained", style="bold"),
        render_runs([("trained tokens", True), (" others", False)]),
    ]
    for place, sequence in enumerate(pack.sequences()):
        trained = int(np.count_nonzero(sequence.loss_mask))
        counts = f"{count_of(len(sequence), 'token')}, {trained:,} trained"
        parts.append(Text(f"\nsequence {place}: {counts}", style="bold cyan"))
        # A token is marked if the position before it trains it.
        parts.append(render_runs(text_runs(sequence, tokenizer)))
    return Group(*parts)


def render_runs(runs: Iterable[tuple[str, bool]], *, has_color: bool = True) -> Text:
    """Render pieces of text, each with whether it is trained: in color, or else in double brackets."""
    text = Text()
    for run, trained in runs:
        shown = printable(run) if has_color or not trained else f"[[{printable(run)}]]"
        text.append(shown, style=TRAINED_STYLE if trained else CONTEXT_STYLE)
    return text


def text_runs(sequence: SequenceView, tokenizer: Decoder) -> Iterator[tuple[str, bool]]:
    """Yield the text of a sequence in pieces, each with whether it is trained."""
    marks = np.concatenate([np.zeros(1, np.uint8), sequence.loss_mask[:-1]])
    edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(marks)]
    for first, start, end in zip([0, *edges], edges, edges[1:], strict=False):
        # With the piece before it, because some tokenizers decode the space before a word only where something comes
        # before it. (Bytes of one character can lie on both sides of an edge; then its text is that of each side.)
        before, whole = (tokenizer.decode(sequence.input_ids[first:stop].tolist()) for stop in (start, end))
        text = whole.removeprefix(before)
        if not whole.startswith(before):
            text = tokenizer.decode(sequence.input_ids[start:end].tolist())
        yield text, bool(marks[start])
