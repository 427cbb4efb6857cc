"""Where a run is in its data: a few integers and a fingerprint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace

from harness.errors import LoaderError


@dataclass(frozen=True, slots=True)
class LoaderState:
    """The whole state of a loader. It holds for any number of ranks and workers and any global batch size.

    Attributes:
        seed: of the order.
        epoch: from 0.
        packs_consumed: packs of this epoch that were trained.
        fingerprint: of the dataset.
        order: `OrderConfig.signature`; another shuffle would repeat some packs of the epoch and miss others.
        tokenizer: hash of what made the dataset; empty where it does not say, and then not compared.
        live: of a run on live chunks, where it is in them (`harness.loader.live.position`); empty of others.
    """

    seed: int
    epoch: int = 0
    packs_consumed: int = 0
    fingerprint: str = ""
    order: str = ""
    tokenizer: str = ""
    live: str = ""

    def advance(self, num_packs: int, *, of: int | None) -> LoaderState:
        """The state after `num_packs` more packs of an epoch of `of`, whose end begins the next; None has no end."""
        consumed = self.packs_consumed + num_packs
        if of is None:
            return replace(self, packs_consumed=consumed)
        if consumed > of:
            raise LoaderError(f"{consumed:,} packs of an epoch were read, and it has {of:,}")
        if consumed == of:
            return replace(self, epoch=self.epoch + 1, packs_consumed=0)
        return replace(self, packs_consumed=consumed)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LoaderState:
        """The state that `to_json` wrote; raises LoaderError for anything else."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise LoaderError(f"a loader state is not JSON: {error}", fix="resume from another checkpoint") from error
        if isinstance(values, dict):
            # Runs of before these were kept go on.
            for name in ("tokenizer", "live"):
                values.setdefault(name, "")
        kinds = {field.name: int if field.type == "int" else str for field in fields(cls)}
        if not isinstance(values, dict) or {name: type(value) for name, value in values.items()} != kinds:
            expected = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
            raise LoaderError(
                f"a loader state holds {text[:200]}, expected {expected}",
                fix="resume from another checkpoint",
            )
        state = cls(**values)
        if state.epoch < 0 or state.packs_consumed < 0:
            raise LoaderError(
                f"a loader state is at epoch {state.epoch}, after {state.packs_consumed} packs",
                fix="resume from another checkpoint",
            )
        return state

    def resumed(self, start: LoaderState, *, num_packs: int | None, allow_other_data: bool = False) -> LoaderState:
        """The state to go on from, given the state that a new run of today's data and configuration starts from.

        Args:
            start: the seed, fingerprint, order and tokenizer of what is configured now.
            num_packs: packs of an epoch of what is configured now; None is without end.
            allow_other_data: keep epoch and position although data, seed, order or tokenizer differ. Packs of that
                epoch may then be trained twice or not at all; a position past the end of the new data begins its next
                epoch.

        Raises:
            LoaderError: data, seed, order or tokenizer differ.
        """
        changes = [
            f"{what} was {then!r} and is {now!r}"
            for what, then, now in (
                ("the dataset's fingerprint", self.fingerprint, start.fingerprint),
                ("the seed", self.seed, start.seed),
                ("the order", self.order, start.order),
                # The same token ids may be another text.
                ("the tokenizer", self.tokenizer or start.tokenizer, start.tokenizer or self.tokenizer),
            )
            if then != now
        ]
        if changes and not allow_other_data:
            raise LoaderError(
                f"this run was trained on other data or in another order: {'; '.join(changes)}",
                where=f"epoch {self.epoch}, after {self.packs_consumed:,} packs",
                fix="configure what the run was started with, start a new run, or set loader.allow_other_data=true "
                "to keep the position and accept that packs of this epoch repeat or are missed",
            )
        start = replace(start, tokenizer=start.tokenizer or self.tokenizer)
        if num_packs is not None and self.packs_consumed >= num_packs:
            return replace(start, epoch=self.epoch + 1, packs_consumed=0)
        return replace(start, epoch=self.epoch, packs_consumed=self.packs_consumed)
