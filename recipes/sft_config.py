"""Settings of a fine-tuning run, and what is refused of them before any rank waits for another."""

from __future__ import annotations

from harness.errors import ConfigError
from harness.formats import PackReader, find_tokenizer_folder
from harness.loader.datasets import LiveData, RunData
from harness.loader.joined import JoinedReader
from harness.megatron.job import runtime
from harness.megatron.model import use_transformer_engine
from harness.megatron.weights import Pretrained
from harness.plan import SftConfig
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig
from harness.train import check_trackers


def check(config: SftConfig, data: RunData | LiveData, world_size: int, pretrained: Pretrained | None = None) -> int:
    """Refuse what cannot train, before any rank waits for another; gives the vocabulary size."""
    config.check_layout(world_size)
    if isinstance(data, RunData) and data.blend is not None:
        data.blend.check_lasts(config.trainer.steps * config.loader.global_batch_size)
    if isinstance(data, LiveData) and config.schedule.name != "as_packed":
        raise ConfigError(
            f"the schedule {config.schedule.name} plans with lengths that are not known yet of live chunks",
            where="schedule.name",
            fix="schedule=as_packed trains packs as they come",
        )
    check_trackers(config.trainer.trackers)
    use_transformer_engine(config.model.attention, runtime.choose_device(config.trainer.device))
    for reader in (data.train, data.validation, *data.evaluation.values()):
        if reader is not None and reader.pack_size > config.model.max_sequence_length:
            raise ConfigError(
                f"the dataset's pack_size {reader.pack_size:,} is above the model's max_sequence_length "
                f"{config.model.max_sequence_length:,}",
                where=str(reader.path),
                fix="raise model.max_sequence_length, or prepare the data with a smaller data.pack_size",
            )
    wanted, stored = config.model.vocab_size, data.vocab_size
    if pretrained is not None:
        hash = data.tokenizer_hash if isinstance(data, RunData) else data.tokenizer and data.tokenizer.tokenizer_hash
        pretrained.check_data(vocab_size=stored, dataset_tokenizer=hash or "", where=str(data.train.path))
        return pretrained.vocab_size
    if wanted is None and stored is None:
        raise ConfigError(
            "the vocabulary size is not known: the dataset does not say",
            where="model.vocab_size",
            fix="set it to the size of the tokenizer that made the dataset",
        )
    if wanted is not None and stored is not None and wanted < stored:
        raise ConfigError(
            f"model.vocab_size is {wanted:,}, and the dataset's tokenizer has {stored:,} tokens",
            where=str(data.train.path),
            fix=f"set model.vocab_size to {stored} or more, or leave it null",
        )
    return wanted or stored or 0


def find_tokenizer(config: SftConfig, data: RunData | LiveData) -> ChatTokenizer:
    """That of the data, with which `trainer.sample_prompts` are asked and answered.

    Raises:
        ConfigError: it is not on this machine, or prompts and answers are longer than the model's sequences.
    """
    tokenizer = data.tokenizer if isinstance(data, LiveData) else None
    if tokenizer is None:
        name = config.data.tokenizer
        try:
            train = data.train
            one = train.readers[0] if isinstance(train, JoinedReader) else train
            name = name or str(find_tokenizer_folder(one)) if isinstance(one, PackReader) else name
        except ConfigError:
            pass
        if not name:
            raise ConfigError(
                "prompts are answered with the tokenizer of the data, which does not say which",
                where="trainer.sample_prompts",
                fix="name it with data.tokenizer, or leave the prompts out",
            )
        tokenizer = ChatTokenizer(TokenizerConfig(name=name))
    longest = max(len(tokenizer.prompt(prompt)) for prompt in config.trainer.sample_prompts)
    if longest + config.trainer.sample_tokens > config.model.max_sequence_length:
        raise ConfigError(
            f"a prompt of {longest:,} tokens and an answer of {config.trainer.sample_tokens:,} are longer than the "
            f"model's max_sequence_length {config.model.max_sequence_length:,}",
            where="trainer.sample_prompts, trainer.sample_tokens",
            fix="shorten them",
        )
    return tokenizer
