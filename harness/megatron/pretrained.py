"""Find the weights that a model starts from, compare them against its settings and data, and load them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from harness.errors import ConfigError
from harness.loader import RankLayout
from harness.megatron.hf_files import HfWeights
from harness.megatron.weights import TensorShard, check_weights, fill_model
from harness.plan import ModelConfig, read_hf_config
from harness.plan.hf_config import check_model, find_weights
from harness.prep import tokenizer_hash
from harness.printing import count_of

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Pretrained:
    """Folder of Hugging Face weights that fit the model.

    Attributes:
        vocab_size: rows of the embedding, including padding.
        mtp_layers: number of layers that predict further tokens (MTP) in the weights and are not loaded.
    """

    folder: Path
    model: ModelConfig
    vocab_size: int
    mtp_layers: int = 0

    @property
    def warnings(self) -> list[str]:
        """Warnings about weights that are not used."""
        if prefixes := self.model.left_out:
            with HfWeights(self.folder) as weights:
                counts = {start: sum(name.startswith(start) for name in weights.names) for start in prefixes}
            found = ", ".join(f"{start}* ({count_of(count, 'tensor')})" for start, count in counts.items() if count)
            kept = "; `harness export --mtp` copies mtp.*" if counts.get("mtp.") else ""
            return [f"some weights are neither trained nor exported: {found}{kept}"] if found else []
        if not self.mtp_layers:
            return []
        return [
            f"the multi-token prediction (MTP) layers of the weights, {self.mtp_layers}, are neither loaded nor "
            f"trained; model.mtp_layers={self.mtp_layers} trains them, `harness export --mtp` copies them"
        ]

    def check_data(self, *, vocab_size: int | None, dataset_tokenizer: str, where: str) -> None:
        """Raise ConfigError, with both values, if the data was prepared with another tokenizer."""
        problem = ""
        if vocab_size is not None and vocab_size > self.vocab_size:
            problem = f"the dataset's tokenizer has {vocab_size:,} tokens, but the weights have {self.vocab_size:,}"
        elif dataset_tokenizer and any((self.folder / name).is_file() for name in _TOKENIZER_FILES):
            own = tokenizer_hash(str(self.folder))
            if own != dataset_tokenizer:
                problem = (
                    f"the dataset was made with tokenizer {dataset_tokenizer}, but the weights have tokenizer {own}"
                )
        if problem:
            fix = "prepare the data with the tokenizer of the weights: "
            fix += f"tokenizer=huggingface tokenizer.name={self.model.init_from}"
            raise ConfigError(problem, where=f"{where} and model.init_from={self.model.init_from}", fix=fix)

    def filler(self, layout: RankLayout) -> Callable[[list[GPTModel]], None]:
        """Return a function that loads this rank's part of the weights into its chunks."""

        def fill(chunks: list[GPTModel]) -> None:
            with HfWeights(self.folder) as weights:
                experts = parallel_state.get_expert_tensor_parallel_rank(), chunks[0].config.expert_tensor_parallel_size
                shard = TensorShard(layout.tp_rank, layout.tp_size, *experts)
                check_weights(chunks, weights, self.model, shard, self.vocab_size, self.mtp_layers)
                fill_model(chunks, weights, self.model, shard)

        return fill


def find_pretrained(model: ModelConfig) -> Pretrained | None:
    """Return the weights that `model.init_from` names, or None."""
    if model.init_from is None:
        return None
    folder = find_weights(model.init_from)
    stored = read_hf_config(folder)
    check_model(model, stored, where=model.init_from)
    if model.mtp_layers not in (0, stored.mtp_layers):
        what = f"model.mtp_layers is {model.mtp_layers}, but the weights have {stored.mtp_layers} layers that predict "
        what += "further tokens"
        fix = f"model.mtp_layers={stored.mtp_layers}" + " trains them, 0 omits them" * bool(stored.mtp_layers)
        raise ConfigError(what, where=f"model.init_from={model.init_from}", fix=fix)
    return Pretrained(folder, model, stored.vocab_size, stored.mtp_layers - model.mtp_layers)
