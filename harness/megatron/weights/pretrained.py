"""Weights to start from: found, held against the model and the data, and put into the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from harness.errors import ConfigError
from harness.loader import RankLayout
from harness.megatron.weights.mapping import HfWeights, Shard, check_weights, fill_model
from harness.plan import ModelConfig, check_model, find_weights, read_hf_config
from harness.prep import tokenizer_hash

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Pretrained:
    """A folder of Hugging Face weights whose sizes are those of the model.

    Attributes:
        vocab_size: rows of its embedding, those that pad it included.
    """

    folder: Path
    model: ModelConfig
    vocab_size: int

    def check_data(self, *, vocab_size: int | None, dataset_tokenizer: str, where: str) -> None:
        """Refuse data of another tokenizer; raises ConfigError with both values.

        Args:
            vocab_size: of the data's tokenizer, None where it is not known.
            dataset_tokenizer: its hash, empty where it is not known.
        """
        if vocab_size is not None and vocab_size > self.vocab_size:
            raise ConfigError(
                f"the dataset's tokenizer has {vocab_size:,} tokens, and the weights know {self.vocab_size:,}",
                where=f"{where} and model.init_from={self.model.init_from}",
                fix="prepare the data with the tokenizer of the weights: "
                f"tokenizer=huggingface tokenizer.name={self.model.init_from}",
            )
        if not dataset_tokenizer or not any((self.folder / name).is_file() for name in _TOKENIZER_FILES):
            return
        own = tokenizer_hash(str(self.folder))
        if own != dataset_tokenizer:
            raise ConfigError(
                f"the dataset was made with tokenizer {dataset_tokenizer}, and that of the weights is {own}",
                where=f"{where} and model.init_from={self.model.init_from}",
                fix="prepare the data with the tokenizer of the weights: "
                f"tokenizer=huggingface tokenizer.name={self.model.init_from}",
            )

    def filler(self, layout: RankLayout) -> Callable[[list[GPTModel]], None]:
        """What puts this rank's part of the weights into its chunks."""

        def fill(chunks: list[GPTModel]) -> None:
            with HfWeights(self.folder) as weights:
                check_weights(weights, self.model, self.vocab_size)
                fill_model(chunks, weights, self.model, Shard(layout.tp_rank, layout.tp_size))

        return fill


def find_pretrained(model: ModelConfig) -> Pretrained | None:
    """What `model.init_from` names, None where it names nothing.

    Raises:
        ConfigError: there is no such model, or it is of other sizes than `model`.
    """
    if model.init_from is None:
        return None
    folder = find_weights(model.init_from)
    found = read_hf_config(folder)
    check_model(model, found, where=model.init_from)
    if model.vocab_size not in (None, found.vocab_size):
        raise ConfigError(
            f"model.vocab_size is {model.vocab_size:,}, and the weights have {found.vocab_size:,} rows",
            where=f"model.init_from={model.init_from}",
            fix="leave model.vocab_size null",
        )
    return Pretrained(folder, model, found.vocab_size)
