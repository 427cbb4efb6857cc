"""How packs are read: the settings of a loader. Imports no torch, so that a configuration is checked anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import ConfigError
from harness.loader.order import OrderConfig

_START_METHODS = (None, "fork", "spawn", "forkserver")


@dataclass
class LoaderConfig:
    """How packs are read.

    Attributes:
        global_batch_size: packs of one global batch, over all ranks.
        seed: of the order.
        num_workers: reading processes of each rank; 0 reads in the training process. No number changes a batch.
        persistent_workers: workers live across epochs and read ahead over their end; without, each epoch starts new.
        prefetch_factor: steps that each worker reads ahead.
        start_method: fork, spawn or forkserver; None is the platform's.
        block_packs, window_blocks, drop_last, shuffle: see `harness.loader.order.OrderConfig`.
        timeout_s: the longest wait for one step's data before the run stops with an error.
        allow_other_data: resume although the dataset, seed, order or tokenizer is not the one of the checkpoint.
    """

    global_batch_size: int = 8
    seed: int = 0
    num_workers: int = 2
    persistent_workers: bool = True
    prefetch_factor: int = 2
    start_method: str | None = None
    block_packs: int = 64
    window_blocks: int = 16
    drop_last: bool = False
    shuffle: bool = True
    timeout_s: float = 300.0
    allow_other_data: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("global_batch_size", 1),
            ("num_workers", 0),
            ("prefetch_factor", 1),
            ("block_packs", 1),
            ("window_blocks", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", where=f"loader.{name}", fix=f"give at least {least}"
                )
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}", where="loader.timeout_s", fix="give seconds above 0")
        if self.start_method not in _START_METHODS:
            raise ConfigError(
                f"there is no start method {self.start_method!r}",
                where="loader.start_method",
                fix="choose fork, spawn, forkserver, or null for the platform's",
            )

    def order(self) -> OrderConfig:
        return OrderConfig(
            seed=self.seed,
            global_batch_size=self.global_batch_size,
            block_packs=self.block_packs,
            window_blocks=self.window_blocks,
            drop_last=self.drop_last,
            shuffle=self.shuffle,
        )
