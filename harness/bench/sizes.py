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
        path: dataset to measure; empty generates one.
        out: folder for the results of the parts and the report. Parts with results are not measured again.
        device: auto, cpu or cuda. Models use bfloat16 on GPUs.
        size: size of the models: `full`, or `tiny` for models that a CPU trains in seconds.
        parts: names of the formats, schedulers or measurements to run; empty runs all.
        packs: number of packs in the dataset.
        pack_size: number of tokens in a pack.
        large_packs: number of packs in a dataset that is only opened and takes little disk space; 0 omits it.
        sequences: numbers of sequences in a row, plan or source; each is measured.
        layers: number of layers of the model.
        hidden: hidden size of the model, a multiple of 64, with a head size of 32 and an MLP three times as wide.
        ranks: number of ranks, or of ranks that batches are planned for; 0 uses one per GPU, or 2 on a CPU.
        cp_size: number of context-parallel ranks that share a row.
        max_tokens_per_rank: maximum number of tokens per rank in a microbatch.
        global_batch: number of packs per step, or of sequences in a simulated step.
        workers: numbers of loader workers; each is measured.
        steps: number of measured steps per round.
        rounds: number of alternating rounds in a comparison; results are medians over them.
        peak_tflops: dense peak of the device in TFLOP/s in the model's dtype (H100 SXM in bfloat16: 989); 0 detects it.
        part_limit_s: time limit of a part in seconds, after which it is reported as failed, and time to soak a format.
        total_limit_s: seconds after which no new part starts; the next call continues. 0 disables the limit.
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
        """Return the parts to measure: all of `names`, or those that are set; raise ConfigError for other names."""
        known = list(names)
        for part in self.parts:
            require_choice(part, known, setting="parts")
        return list(dict.fromkeys(self.parts)) or known

    def first(self, setting: str, count: int) -> list[int]:
        """Return the first numbers of a list; raises ConfigError where it has fewer."""
        numbers: tuple[int, ...] = getattr(self, setting)
        if len(numbers) < count:
            raise ConfigError(f"{len(numbers)} numbers, expected {count}", where=setting, fix="list more values")
        return list(numbers[:count])

    def aim(self, target: float) -> float | None:
        """Return the target of a speed; None for tiny sizes, whose speed means nothing."""
        return None if self.is_tiny else target
