"""Settings of training on live chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.checks import require_choice, require_numbers
from harness.prep import MIN_SEQUENCE_TOKENS, TokenizerConfig


@dataclass
class LiveConfig:
    """Settings of chunks that are read while they are written.

    Attributes:
        path: the folder; empty to train on stored datasets.
        pack_size: the most tokens of a pack.
        tokenizer: for chunks of conversations; chunks of packs need none.
        over_long: `drop` or `truncate` conversations of more than `pack_size` tokens.
        on_bad: `refuse` stops at an unusable conversation, `skip` leaves it out and counts it.
        open_packs: packs on each rank that wait for conversations to fill them.
        timeout_s: the longest wait for a chunk.
        require_ready: accept only chunks with a ready record. Otherwise, for producers that write none, a chunk counts
            as whole when the next one exists, or when it was not written to for `settle_s` seconds.
        settle_s: see `require_ready`.
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
        require_numbers(self, "data.live", "pack_size", lowest=MIN_SEQUENCE_TOKENS)
        require_numbers(self, "data.live", "open_packs", lowest=1)
        require_numbers(self, "data.live", "timeout_s", above=0)
        require_numbers(self, "data.live", "settle_s", lowest=0)
        require_choice(self.over_long, ("drop", "truncate"), setting="data.live.over_long")
        require_choice(self.on_bad, ("refuse", "skip"), setting="data.live.on_bad")
