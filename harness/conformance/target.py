"""The interface between the checks and a trainer: the target, the layout that it builds, and the data that it gets."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.errors import ConfigError

# One conversation: `input_ids`, and `labels` of the same length, -100 where a token is not trained. Labels are not
# shifted: `labels[i]` is `input_ids[i]` or -100. A row of a trainer has the same fields and may have more.
Tokens = dict[str, list[int]]
Step = Callable[[Sequence[Tokens]], tuple[float, float | None]]


class NotSupported(Exception):  # noqa: N818 - a verdict, not an error
    """Raised by a target if the trainer lacks the feature that a check is about."""


@dataclass(frozen=True)
class Layout:
    """The settings of a training run that checks vary; everything else is the trainer's default, in float32.

    Attributes:
        dp_size: number of data-parallel ranks.
        tp_size: number of tensor-parallel ranks, with sequence parallelism if the trainer supports it.
        ep_size: number of data-parallel ranks over which the experts are divided.
        microbatches: number of microbatches per rank and step (gradient accumulation).
        pack_size: tokens per row into which several conversations are packed; 0 for one conversation per row, padded
            to the longest of its microbatch.
        loss_average: "token" for the mean over all trained tokens of a step, "conversation" for the mean over
            conversations of their means.
        num_workers: number of loader workers per rank.
        shuffle: train the data in a random order that depends on `seed`, instead of its stored order.
        seed: seed of all random numbers.
        learning_rate: learning rate of every step, without warm-up or decay; 0 does not change the weights.
        router_loss: coefficient of the loss that balances experts; 0 for none.
        mtp_loss: coefficient of the loss of the layer that predicts the token after the next; 0 leaves the layer out.
        lora_rank: rank of adapters of the attention's projections, which are trained alone; 0 trains all weights.
    """

    dp_size: int = 1
    tp_size: int = 1
    ep_size: int = 1
    microbatches: int = 1
    pack_size: int = 0
    loss_average: str = "token"
    num_workers: int = 0
    shuffle: bool = False
    seed: int = 1
    learning_rate: float = 0.0
    router_loss: float = 0.0
    mtp_loss: float = 0.0
    lora_rank: int = 0

    def changed(self) -> list[str]:
        """Return the names of the fields that are not at their defaults."""
        usual = asdict(Layout())
        return [name for name, value in asdict(self).items() if value != usual[name]]

    def only(self, *supported: str) -> None:
        """Raise NotSupported if any other field is not at its default."""
        if missing := [name for name in self.changed() if name not in supported]:
            raise NotSupported(f"the target has no setting for {' and '.join(missing)}")


class Target(Protocol):
    """A trainer, as the checks see it. All methods but `build` are optional; the ranks of a job make the same calls."""

    def build(self, model_folder: Path, data: Path, layout: Layout) -> Step:
        """Build the trainer, and return the function that trains one step.

        That function takes the conversations of one global batch, the same on every rank, divides them over ranks and
        microbatches as the trainer does, and returns the loss that the trainer reports and the norm of the gradients
        before clipping (None where the trainer does not report one).

        Args:
            model_folder: a Llama, a Mixtral or a Qwen3.5 of two layers in the files of Hugging Face, with a tokenizer
                and a chat template; for `mtp_loss`, the Llama has a third layer, in DeepSeek-V3's names.
            data: a file with one conversation per line, as JSON with `input_ids` and `labels`.
        """

    def evaluate(self, batch: Sequence[Tokens]) -> float:
        """Return the loss that the trainer reports for a validation set, with one conversation or row per batch."""

    def merge(self, folder: Path) -> None:
        """Write the weights with the adapters merged into them, as float32 in the files of Hugging Face."""

    def rows(self, steps: int | None) -> list[list[Tokens]]:
        """Train `steps` steps from the current position in `data`, None for the rest of the epoch.

        Returns:
            for each step, the rows that this rank trained, one per microbatch. `position_ids` of a row are optional,
            and checked if present.
        """

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the trainer and of its position in `data`; the folder does not exist yet."""

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint, right after `build`."""

    def render(self, records: Sequence[dict[str, Any]]) -> list[Tokens]:
        """Return chats (`messages` and `tools` in OpenAI's form) as the trainer tokenizes and masks them.

        Only assistant messages are to be trained.
        """


def load_target(spec: str) -> Any:
    """Return an instance of the class that `FILE.py[:CLASS]` or `MODULE:CLASS` names, by default `Trainer`.

    Raise ConfigError if there is no such module or class, or it has no `build`.
    """
    place, _, name = spec.partition(":")
    name = name or "Trainer"
    try:
        if place.endswith(".py"):
            sys.path.insert(0, str(Path(place).resolve().parent))
            found = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert found is not None
            assert found.loader is not None
            module = importlib.util.module_from_spec(found)
            sys.modules[Path(place).stem] = module
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        made = getattr(module, name)()
    except Exception as error:  # the module is the user's, and runs here
        fix = "name a class with a method `build`: FILE.py:CLASS or MODULE:CLASS"
        raise ConfigError(f"cannot load the target: {type(error).__name__}: {error}", where=spec, fix=fix) from error
    if not callable(getattr(made, "build", None)):
        raise ConfigError("the class has no method `build`", where=spec, fix="see `harness.conformance.Target`")
    return made
