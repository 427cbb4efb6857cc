"""The position of a run in its data: a few integers and a fingerprint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from harness.errors import LoaderError
from harness.printing import count_of
from harness.settings import load


@dataclass(frozen=True, slots=True)
class LoaderState:
    """The whole state of a loader, valid for any number of ranks and workers and any global batch size.

    Attributes:
        epoch: from 0.
        packs_consumed: packs of this epoch that were trained.
        order: `LoaderConfig.order_signature`; a different shuffle would repeat and skip packs of the epoch.
        tokenizer: hash of the tokenizer that made the dataset; empty if unknown, and then not compared.
        live: JSON of the `LivePosition` of a run on live chunks; empty for other runs.
    """

    seed: int
    epoch: int = 0
    packs_consumed: int = 0
    fingerprint: str = ""
    order: str = ""
    tokenizer: str = ""
    live: str = ""

    def advance(self, num_packs: int, *, of: int | None) -> LoaderState:
        """Return the state after `num_packs` more packs; `of` is the size of an epoch, None if endless."""
        consumed = self.packs_consumed + num_packs
        if of is not None and consumed > of:
            what = f"{consumed:,} packs of an epoch were read, but it has {of:,}"
            raise LoaderError(what, where="loader state", fix="resume with the dataset that the state was saved with")
        if consumed == of:
            return replace(self, epoch=self.epoch + 1, packs_consumed=0)
        return replace(self, packs_consumed=consumed)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LoaderState:
        """Return the state that `to_json` wrote; raise LoaderError for anything else."""
        what, where, fix = "the loader state is damaged", "the loader state", "resume from another checkpoint"
        # Checkpoints from before `tokenizer` and `live` were added still resume.
        state = load(cls, text, what=what, where=where, fix=fix, error=LoaderError)
        if state.epoch < 0 or state.packs_consumed < 0:
            what = f"{what}: it is at epoch {state.epoch}, after {state.packs_consumed} packs"
            raise LoaderError(what, where=where, fix=fix)
        return state

    def resumed(self, start: LoaderState, *, num_packs: int | None, allow_other_data: bool = False) -> LoaderState:
        """Return the state to continue from, given the initial state with the current data and settings.

        Args:
            start: state with the current seed, fingerprint, order and tokenizer.
            num_packs: current number of packs in an epoch; None if endless.
            allow_other_data: keep epoch and position even if data, seed, order or tokenizer differ. Packs of that epoch
                may then be trained twice or not at all. A position past the end of the new data starts the next epoch.

        Raises:
            LoaderError: data, seed, order or tokenizer differ.
        """
        changes = [
            f"{what} was {then!r} and is {now!r}"
            for what, then, now in (
                ("the dataset's fingerprint", self.fingerprint, start.fingerprint),
                ("the seed", self.seed, start.seed),
                ("the order", self.order, start.order),
                # The same token ids may mean different text.
                ("the tokenizer", self.tokenizer or start.tokenizer, start.tokenizer or self.tokenizer),
            )
            if then != now
        ]
        if changes and not allow_other_data:
            what = f"the checkpoint was trained on other data or in another order: {'; '.join(changes)}"
            fix = "restore the settings that the run started with, start a new run, or set loader.allow_other_data=true"
            fix += " to keep the position and accept that packs of this epoch repeat or are skipped"
            raise LoaderError(what, where=f"epoch {self.epoch}, after {count_of(self.packs_consumed, 'pack')}", fix=fix)
        start = replace(start, tokenizer=start.tokenizer or self.tokenizer)
        if num_packs is not None and self.packs_consumed >= num_packs:
            return replace(start, epoch=self.epoch + 1, packs_consumed=0)
        return replace(start, epoch=self.epoch, packs_consumed=self.packs_consumed)
