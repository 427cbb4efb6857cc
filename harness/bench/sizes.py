"""Sizes of the benches: one class, of which each bench uses the settings that its presets name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.checks import CheckedSettings, bounded, one_of, require_choice
from harness.errors import ConfigError


@dataclass(frozen=True)
class Sizes(CheckedSettings):
    """Sizes and places of one run of a bench; `Bench.full` and `Bench.quick` are the presets of each.

    Attributes:
        path: a dataset; empty for made data.
        out: folder of the parts' files and of the report; parts that it has are not measured again.
        device: auto, cpu or cuda; models are in bfloat16 on GPUs.
        size: of the models: full, or tiny for ones that a CPU trains in seconds.
        parts: formats, schedulers or measurements to make, by name; empty for all.
        packs, pack_size: size of the dataset, in packs and in tokens of a pack.
        large_packs: packs of a dataset that is only opened, on little disk; 0 leaves that out.
        sequences: numbers of sequences of a row, a plan or a source; each is measured.
        layers: layers of the model.
        hidden: width of the model, a multiple of 64; heads are 32 wide, the feed-forward is three times as wide.
        ranks: ranks of the largest job, or that batches are planned for; 0 for one a GPU, and 2 on a CPU.
        cp_size: context-parallel ranks that share a row.
        max_tokens_per_rank: tokens of one rank in one microbatch.
        global_batch: packs of a step, or sequences of a simulated one.
        workers: numbers of worker processes of the loader; each is measured where there are several.
        steps: measured steps of a round.
        rounds: turns of each side of a comparison; figures are medians over them.
        peak_tflops: of the device, dense, in the model's dtype (H100 SXM in bfloat16: 989); 0 for what is known or
            measured.
        part_limit_s: a part that takes longer is ended, and reported as failed; formats are soaked so long each.
        total_limit_s: begin no part after so many seconds; the next call continues. 0 for no limit.
    """

    path: str = ""
    out: str = ""
    device: str = one_of("auto", ("auto", "cpu", "cuda"))
    size: str = one_of("full", ("full", "tiny"))
    parts: tuple[str, ...] = ()
    packs: int = bounded(1, lowest=1)
    pack_size: int = bounded(4096, lowest=8)
    large_packs: int = bounded(0)
    sequences: tuple[int, ...] = bounded((), lowest=1)
    layers: int = bounded(1, lowest=1, highest=10_000)
    hidden: int = bounded(64, lowest=64, highest=1_000_000)
    ranks: int = bounded(0, highest=100_000)
    cp_size: int = bounded(1, lowest=1)
    max_tokens_per_rank: int = bounded(8192, lowest=8)
    global_batch: int = bounded(1, lowest=1)
    workers: tuple[int, ...] = bounded((), highest=1024)
    steps: int = bounded(1, lowest=1)
    rounds: int = bounded(1, lowest=1)
    peak_tflops: float = bounded(0.0, lowest=0, highest=1_000_000_000)
    part_limit_s: float = bounded(480.0, lowest=0, highest=86_400)
    total_limit_s: float = bounded(0.0, lowest=0, highest=86_400)

    @property
    def is_tiny(self) -> bool:
        return self.size == "tiny"

    def choose(self, names: Iterable[str]) -> list[str]:
        """Return the parts to measure: all of `names`, or those that are set.

        Raises:
            ConfigError: a part is none of `names`.
        """
        known = list(names)
        for part in self.parts:
            require_choice(part, known, setting="parts")
        return list(dict.fromkeys(self.parts)) or known

    def first(self, setting: str, count: int) -> list[int]:
        """Return the first numbers of a list; raises ConfigError where it has fewer."""
        numbers: tuple[int, ...] = getattr(self, setting)
        if len(numbers) < count:
            raise ConfigError(f"{len(numbers)} numbers, {count} needed", where=setting, fix="list more of them")
        return list(numbers[:count])

    def aim(self, target: float) -> float | None:
        """Return the target of a speed; None for tiny sizes, whose speed means nothing."""
        return None if self.is_tiny else target
