"""A summary of a blend: the packs and the share of each source, and how often it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.loader.datasets import BlendSource, DataConfig, JoinedReader, open_datasets
from harness.printing import count_of
from harness.settings import from_plain
from harness.tables import Table

BLEND_SUFFIXES = (".yaml", ".yml")
_FIX = "specify the config.yaml of a run, or a file with `blend:` such as configs/data/train_blend.yaml"


@dataclass(frozen=True)
class SourceSummary:
    """One source of a blend.

    Attributes:
        path, format, packs, tokens: of the dataset.
        weight: as configured; None where packs are drawn in proportion to sizes.
        pack_share, token_share: of the trained packs, and on average of the trained tokens, as stored.
        drawn: its packs among the blend's first `BlendSummary.packs`.
        passes: drawn packs over all packs of the source.
    """

    path: str
    format: str
    packs: int
    tokens: int
    weight: float | None
    pack_share: float
    token_share: float
    drawn: int
    passes: float


@dataclass(frozen=True)
class BlendSummary:
    """A blend over a number of packs.

    Attributes:
        path: of the settings.
        packs: of the run; without one, of an epoch, or with weights as many as all sources have.
        of_run: True where the steps of the settings train these packs.
        ends_after: packs after which a source's epochs are used up; None where none are limited.
        sources: in order.
    """

    path: str
    packs: int
    of_run: bool
    ends_after: int | None
    sources: list[SourceSummary]


def summarize_blend(path: str) -> BlendSummary:
    """Open the datasets of the blend that a YAML file configures, and draw from it.

    Raises:
        ConfigError: the file configures no blend, or one that cannot be drawn.
        FormatError: a source is missing or damaged.
    """
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"the settings cannot be read: {str(error).splitlines()[0]}", where=path, fix=_FIX) from error
    data = settings.get("data", settings) if isinstance(settings, dict) else None
    blend_settings = data.get("blend") if isinstance(data, dict) else None
    if not blend_settings or not isinstance(blend_settings, list):
        raise ConfigError("the file configures no blend", where=path, fix=_FIX)
    try:
        sources = [from_plain(BlendSource, source) for source in blend_settings]
    except ValueError as odd:
        raise ConfigError(f"the blend contains an invalid source: {odd}", where=path, fix=_FIX) from None
    opened = open_datasets(DataConfig(path="", blend=sources))
    blend, train = opened.blend, opened.train
    assert blend is not None
    assert isinstance(train, JoinedReader)
    try:
        steps, size = int(settings["trainer"]["steps"]), int(settings["loader"]["global_batch_size"])
    except (KeyError, TypeError, ValueError):
        steps, size = 0, 1
    packs, epoch = max(0, steps * size), blend.num_packs
    counts = blend.counts_after(packs or epoch or len(train))
    if packs and epoch is not None:
        # Epochs of a blend without weights are alike, and end with a batch of the packs that are left.
        epochs, rest = divmod(steps, -(-epoch // size))
        last = blend.counts_after(rest * size)
        counts = [epochs * whole + part for whole, part in zip(blend.counts_after(epoch), last, strict=True)]
        packs = sum(counts)
    tokens = [int(reader.sequence_lengths.sum(dtype="int64")) for reader in train.readers]
    drawn_tokens = [share * total / size for share, total, size in zip(blend.shares, tokens, blend.sizes, strict=True)]
    summaries = [
        SourceSummary(
            path=blend.names[number],
            format=reader.format,
            packs=len(reader),
            tokens=tokens[number],
            weight=None if blend.weights is None else blend.weights[number],
            pack_share=blend.shares[number],
            token_share=drawn_tokens[number] / sum(drawn_tokens),
            drawn=counts[number],
            passes=counts[number] / len(reader),
        )
        for number, reader in enumerate(train.readers)
    ]
    return BlendSummary(path, packs or sum(counts), packs > 0, blend.ends_after(), summaries)


def render_blend(summary: BlendSummary) -> Any:
    """Return a table of the sources of a blend, and the packs until it ends."""
    from rich.console import Group
    from rich.text import Text

    head, rows = ("source", "packs", "tokens", "weight", "of packs", "of tokens", "packs read", "epochs"), []
    # Paths are long: in the table they would be cut or folded, and a wrapped path cannot be copied.
    paths = []
    for number, source in enumerate(summary.sources, start=1):
        paths.append(Text(f"{number}  {source.format}  {source.path}", no_wrap=True, overflow="ignore"))
        weight = "by size" if source.weight is None else f"{source.weight:g}"
        shares = (f"{source.pack_share:.2%}", f"{source.token_share:.2%}")
        counts = (f"{source.packs:,}", f"{source.tokens:,}")
        rows.append((str(number), *counts, weight, *shares, f"{source.drawn:,}", f"{source.passes:.2f}"))
    reach = "packs trained by the run" if summary.of_run else "packs"
    note = Text(f"packs read and epochs: in the first {summary.packs:,} {reach}")
    ending = []
    if summary.ends_after is not None:
        is_short = summary.of_run and summary.ends_after < summary.packs
        text = f"a source is exhausted after {count_of(summary.ends_after, 'pack')}"
        ending = [Text(f"{text}: too few for the run", style="bold red") if is_short else Text(text)]
    table = Table(head, rows, "r").to_terminal()
    return Group(Text(summary.path, style="bold"), *paths, table, note, *ending)
