"""Sample answers of the model during training: greedy decoding for a few prompts, on any layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from harness.errors import ConfigError
from harness.formats.inspect import find_tokenizer_folder
from harness.loader import RunData
from harness.loader.datasets import LiveData
from harness.megatron.batch import RowsAhead, run_row
from harness.megatron.step import MegatronStep, share_last_stage
from harness.plan import SftConfig, TrainerConfig
from harness.prep import ChatTokenizer, TokenizerConfig
from harness.records import SequenceView
from harness.thd import build_thd_batch, context_parallel_indices, pad_row
from harness.train import is_due
from harness.train.folder import SAMPLES_FILE
from harness.train.lines import LineFile, describe_hole, keep_lines_before


def generate(
    step: MegatronStep, prompts: Sequence[Sequence[int]], *, max_tokens: int, ends: Sequence[int]
) -> list[list[int]]:
    """Extend each prompt with its most likely tokens, one at a time; every rank takes part and gets the answers.

    All prompts form one row, recomputed for each token: a few answers per evaluation do not justify a cache. Prompts
    need at least one token each. Tokens that end an answer (`ends`) are not part of it.
    """
    for chunk in step.chunks:
        chunk.eval()
    answers: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(answers)))
    with torch.no_grad():
        for _ in range(max_tokens):
            if not unfinished:
                break
            tokens = _next_tokens(step, [[*prompts[index], *answers[index]] for index in unfinished])
            for index, token in zip(list(unfinished), tokens, strict=True):
                if token in ends:
                    unfinished.remove(index)
                else:
                    answers[index].append(token)
    return answers


def _next_tokens(step: MegatronStep, sequences: list[list[int]]) -> list[int]:
    # The last token is only a label, which a row drops: append a dummy.
    views = [SequenceView(np.array([*ids, 0], np.int32), np.zeros(len(ids) + 1, np.uint8)) for ids in sequences]
    row = build_thd_batch(views, pad_to_multiple=step.layout.pad_to_multiple)
    lasts = (row.cu_seqlens_padded[:-1].astype(np.int64) + np.diff(row.cu_seqlens) - 1)[: len(sequences)]
    if step.pad_rows_to is not None and len(row) <= step.pad_rows_to:
        row = pad_row(row, step.pad_rows_to)
    held = context_parallel_indices(row.cu_seqlens_padded, cp_size=step.layout.cp_size, cp_rank=step.layout.cp_rank)
    place_of = np.full(len(row), -1, dtype=np.int64)
    place_of[held] = np.arange(held.shape[0])
    # Indices of the last tokens in this rank's slice; -1 on the other context-parallel ranks.
    places = torch.from_numpy(place_of[lasts]).to(step.device)
    kept: list[torch.Tensor] = []

    def keep(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not kept:  # [1, T / cp, V / tp]
            chosen = gather_from_tensor_model_parallel_region(logits[0, places.clamp(min=0)])
            kept.append(torch.where(places >= 0, chosen[:, : step.vocab_size].argmax(dim=-1), 0))
            if step.layout.cp_size > 1:
                torch.distributed.all_reduce(kept[0], group=parallel_state.get_context_parallel_group())
        return logits.sum() * 0, torch.tensor(1), torch.zeros(2, dtype=torch.float64)

    def forward(rows: RowsAhead, chunk: Any) -> tuple[torch.Tensor, Any]:
        return run_row(chunk, rows.take()[1], with_labels=False), keep

    step.run_rows([row] * step.group_size, forward)
    tokens = kept[0] if kept else torch.zeros(len(sequences), dtype=torch.int64, device=step.device)
    share_last_stage(tokens)
    return [int(token) for token in tokens.tolist()]


# The tokenizer of prompts and answers, and the ids of the tokens that end an answer of the trained model.
Answering = tuple[ChatTokenizer, Sequence[int]]


def find_tokenizer(config: SftConfig, data: RunData | LiveData) -> Answering:
    """Return the tokenizer of the data, for `trainer.sample_prompts` and their answers, and the ids of end tokens."""
    tokenizer = data.tokenizer if isinstance(data, LiveData) else None
    if tokenizer is not None:
        ends = tokenizer.ends
    else:
        readers = data.sources if isinstance(data, RunData) else ()
        name = config.data.tokenizer
        if not name and readers:
            with suppress(ConfigError):
                name = str(find_tokenizer_folder(readers[0]))
        if not name:
            what = "sample prompts require the tokenizer of the data, but the data does not specify one"
            raise ConfigError(what, where="trainer.sample_prompts", fix="set data.tokenizer, or omit the prompts")
        # Prompts have no mask, so use a rule that works with every template.
        tokenizer = ChatTokenizer(TokenizerConfig(name=name, mask="all"))
        masks = [reader.manifest.provenance.mask for reader in readers if reader.manifest is not None]
        ends = sorted({token for mask in masks or [{}] for token in tokenizer.ends_of(mask)})
    prompts = [tokenizer.prompt({"role": "user", "content": prompt}) for prompt in config.trainer.sample_prompts]
    size, largest = config.model.vocab_size, max((token for prompt in prompts for token in prompt), default=0)
    if size is not None and largest >= size:
        what = f"a sample prompt contains token {largest}, but the model has {size} tokens"
        fix = "set data.tokenizer to the tokenizer of the data, or omit the prompts"
        raise ConfigError(what, where="trainer.sample_prompts, data.tokenizer", fix=fix)
    longest = max(map(len, prompts))
    if longest + config.trainer.sample_tokens > config.model.max_sequence_length:
        what = f"a prompt of {longest:,} tokens and an answer of {config.trainer.sample_tokens:,} are longer than the "
        what += f"model's max_sequence_length {config.model.max_sequence_length:,}"
        raise ConfigError(what, where="trainer.sample_prompts, trainer.sample_tokens", fix="shorten them")
    return tokenizer, ends


class Sampler:
    """Answers a run's prompts at its evaluations, and appends the answers to `samples.jsonl` in `folder`, if given.

    Lines of `first_step` and later ones, left by a stopped run, are removed.
    """

    def __init__(
        self, step: MegatronStep, answering: Answering, folder: Path | None, trainer: TrainerConfig, first_step: int
    ) -> None:
        self._step, (self._tokenizer, self._ends) = step, answering
        self._prompts, self._max_tokens = trainer.sample_prompts, trainer.sample_tokens
        self._ids = [self._tokenizer.prompt({"role": "user", "content": prompt}) for prompt in self._prompts]
        self._file: LineFile | None = None
        self.hole = ""  # a warning about lost answers
        if folder is not None:
            path = folder / SAMPLES_FILE
            due = (n for n in range(1, first_step) if is_due(n, trainer.eval_interval, trainer.last_step))
            self.hole = describe_hole(path, keep_lines_before(path, first_step), due)
            self._file = LineFile(path, "the answers to sample prompts")

    def answer(self, step: int) -> list[tuple[str, str]]:
        """Return every prompt with its answer; every rank of the job takes part."""
        answers = generate(self._step, self._ids, max_tokens=self._max_tokens, ends=self._ends)
        texts = [self._tokenizer.decode(ids) for ids in answers]
        if self._file is not None:
            for prompt, text, ids in zip(self._prompts, texts, answers, strict=True):
                line = {"step": step, "prompt": prompt, "answer": text, "tokens": ids}
                self._file.append(json.dumps(line, ensure_ascii=False) + "\n")
        return list(zip(self._prompts, texts, strict=True))

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()
