"""Settings of training on live chunks. Imports no torch, so that a configuration is checked anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.checks import require_at_least, require_choice
from harness.errors import ConfigError
from harness.prep import MIN_SEQUENCE_TOKENS, TokenizerConfig


@dataclass
class LiveConfig:
    """Chunks that are read while they are made.

    Attributes:
        path: the folder; empty for none.
        pack_size: most tokens of a pack.
        tokenizer: of chunks that hold conversations; chunks of packs need none.
        over_long: `drop` or `truncate` conversations of more than `pack_size` tokens.
        on_bad: `refuse` stops at a conversation that cannot be used, `skip` leaves it out and counts it.
        open_packs: packs that wait for conversations to fill them, on each rank.
        timeout_s: the longest wait for a chunk.
        require_ready: take only chunks with a ready record. Without, for producers that write none, a chunk counts as
            whole once the next one is there, or once it was not written to for `settle_s` seconds.
        settle_s: see there.
    """

    path: str = ""
    pack_size: int = 4096
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    over_long: str = "drop"
    on_bad: str = "refuse"
    open_packs: int = 16
    timeout_s: float = 1800.0
    require_ready: bool = True
    settle_s: float = 5.0

    def __post_init__(self) -> None:
        require_at_least(self.pack_size, MIN_SEQUENCE_TOKENS, setting="data.live.pack_size")
        require_at_least(self.open_packs, 1, setting="data.live.open_packs")
        require_choice(self.over_long, ("drop", "truncate"), setting="data.live.over_long")
        require_choice(self.on_bad, ("refuse", "skip"), setting="data.live.on_bad")
        if not self.timeout_s > 0 or not self.settle_s >= 0:
            raise ConfigError(
                f"timeout_s is {self.timeout_s} and settle_s {self.settle_s}",
                where="data.live",
                fix="seconds: timeout_s above 0, settle_s 0 or more",
            )
