"""Tokenizing against the tokenizers library alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from harness.bench.apart import measure_apart
from harness.bench.figures import BenchReport, Progress
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, lognormal_lengths
from harness.prep.chat.records import Conversation
from harness.prep.sources.reading import cut_shards, read_shard
from harness.prep.tokenize import texts_of
from harness.prep.tokenize.bpe import train_bpe

_PROBES = "tests.benchmarks.probes"
_OURS, _THEIRS = "prepare: file to shard on disk", "tokenizers alone: text to ids"
_RATIO = "prepare to tokenizers alone"
# Writes tools and calls of them, and marks what the model writes.
_TOOL_TEMPLATE = "qwen2_5"


def bench_preparing(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure MB of text a second of processor time."""
    sizes.first("sequences", 1)
    report = BenchReport("prepare")
    source, tokenizer = workspace.folder / "chats.jsonl", workspace.folder / "tokenizer"
    _write_chats(source, sizes.sequences[0], seed=0)
    _train(source, tokenizer, "chatml", sizes, progress)
    progress("tokenizing")
    _compare(sizes, source, tokenizer, workspace.folder / "shards", report)
    tools, tool_tokenizer = workspace.folder / "tools.jsonl", workspace.folder / "tool-tokenizer"
    _write_tool_chats(tools, sizes.sequences[0], seed=2)
    _train(tools, tool_tokenizer, _TOOL_TEMPLATE, sizes, progress)
    progress("tokenizing conversations with tools")
    _compare(sizes, tools, tool_tokenizer, workspace.folder / "tool-shards", report, of=", with tools")
    report.notes.append("both tokenize on one core, in seconds of processor time, with the same tokenizer")
    return report


def _train(source: Path, folder: Path, template: str, sizes: Sizes, progress: Progress) -> None:
    progress("training a tokenizer")
    texts = (text for conversation in _read(source) for _, text in texts_of(conversation))
    train_bpe(texts, folder, vocab_size=max(500, 2 * sizes.sequences[0]), chat_template=template)


def _read(source: Path) -> list[Conversation]:
    (shard,) = cut_shards([source], shard_bytes=1 << 40)
    return [record for chunk in read_shard(shard) for record in chunk.parse() if isinstance(record, Conversation)]


def _compare(sizes: Sizes, source: Path, tokenizer: Path, shards: Path, report: BenchReport, *, of: str = "") -> None:
    """Run each side in processes of its own: in one heap with the library's garbage, ours took half longer.

    Args:
        of: the conversations, in words that follow the names of the figures.
    """
    rates: dict[str, list[float]] = {_OURS: [], _THEIRS: []}
    tokens: set[float] = set()
    for number in range(sizes.rounds):
        sides = [
            (_OURS, ("tokenize_shard", source, tokenizer, shards / str(number))),
            (_THEIRS, ("tokenizers_alone", source, tokenizer)),
        ]
        for name, (probe, *arguments) in sides if number % 2 == 0 else sides[::-1]:
            measured = measure_apart(f"{_PROBES}:{probe}", *arguments)
            rates[name].append(measured["megabytes_per_s"])
            tokens.add(measured["tokens"])
    # Speeds compare only where the work is the same.
    assert len(tokens) == 1, tokens
    for name, samples in rates.items():
        report.add_samples(name + of, samples, "MB/s")
    report.add_ratio(_RATIO + of, _OURS + of, _THEIRS + of, at_least=0.85)


def _write_chats(path: Path, count: int, *, seed: int) -> None:
    with path.open("w") as file:
        for text in _texts(count, seed=seed):
            turns = [{"role": "user", "content": text[: len(text) // 4] or "a"}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\n")


def _write_tool_chats(path: Path, count: int, *, seed: int) -> None:
    """Write conversations in which an assistant calls one of three tools, reads its result and answers."""
    names = ("search", "read_file", "run")
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    functions = [{"name": name, "description": f"{name} something", "parameters": parameters} for name in names]
    tools = [{"type": "function", "function": function} for function in functions]
    with path.open("w") as file:
        for number, text in enumerate(_texts(count, seed=seed)):
            fourth = max(1, len(text) // 4)
            call = {"name": names[number % 3], "arguments": {"text": text[:fourth]}}
            turns = [
                {"role": "user", "content": text[:fourth]},
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                {"role": "tool", "content": text[fourth : 3 * fourth] or "a"},
                {"role": "assistant", "content": text},
            ]
            file.write(json.dumps({"messages": turns, "tools": tools}) + "\n")


def _texts(count: int, *, seed: int) -> Iterator[str]:
    """Yield texts of a lognormal number of words, which are as frequent as Zipf's law has them."""
    random = np.random.default_rng(seed)
    words = np.array(["".join(map(chr, 97 + random.integers(0, 26, size))) for size in random.integers(2, 10, 5000)])
    for length in lognormal_lengths(count, median=300.0, longest=8000, seed=seed).tolist():
        yield " ".join(words[random.zipf(1.3, length) % 5000])
