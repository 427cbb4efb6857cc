"""Sizes of `harness bench formats`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FormatsSettings:
    """Sizes of the bench.

    Attributes:
        packs, pack_size: of the dataset that is read.
        rounds: turns of each side of a comparison; medians are over them.
        reads: packs that a side reads in a round.
        peer_reads: packs of a round against the row-group reader, which is slow.
        open_packs: packs of the dataset that is opened.
        write_packs, write_pack_size: of the dataset that is written.
        parts: what to measure, of `harness.bench.formats.PARTS`.
    """

    packs: int = 20_000
    pack_size: int = 4096
    rounds: int = 9
    reads: int = 4096
    peer_reads: int = 60
    open_packs: int = 2_000_000
    write_packs: int = 50_000
    write_pack_size: int = 2048
    parts: tuple[str, ...] = ("random", "order", "peer", "checks", "open", "write", "legacy")
