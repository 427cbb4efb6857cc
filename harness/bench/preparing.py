"""`harness bench prepare`: tokenising against the tokenizers library alone, and memory as the input grows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from harness.bench.figures import BenchReport, Figure
from harness.bench.probe import measure_apart
from harness.bench.workspace import Workspace, lognormal_lengths
from harness.prep.chat import Conversation
from harness.prep.reading import cut_shards, read_shard
from harness.prep.tokenize import train_bpe

_OURS, _THEIRS = "prepare: file to shard on disk", "tokenizers alone: text to ids"
_MIB = float(1 << 20)


@dataclass(frozen=True)
class PrepareSettings:
    """Sizes of the bench.

    Attributes:
        conversations: of the source that is tokenised.
        median: words of a conversation, lognormal.
        vocab_size: of the tokenizer, trained on the source.
        memory_conversations: of the source whose preparation's memory is measured.
        growth: how many times as many are prepared too.
        rounds: turns of each side.
    """

    conversations: int = 4_000
    median: float = 300.0
    vocab_size: int = 8_000
    memory_conversations: int = 10_000
    growth: tuple[int, ...] = (1, 4, 16)
    rounds: int = 3


QUICK = PrepareSettings(conversations=300, vocab_size=1000, memory_conversations=500, growth=(1, 4), rounds=1)


def bench_preparing(settings: PrepareSettings, workspace: Workspace, say: Callable[[str], None]) -> BenchReport:
    """MB of text a second of processor time, and megabytes of a preparation's own memory."""
    report = BenchReport("prepare", asdict(settings))
    source = workspace.folder / "chats.jsonl"
    _write_chats(source, settings.conversations, settings.median, seed=0)
    folder = workspace.folder / "tokenizer"
    say("training a tokenizer")
    train_bpe(
        (message.content for one in _read(source) for message in one.messages), folder, vocab_size=settings.vocab_size
    )
    say("tokenising")
    _compare(settings, source, folder, workspace.folder / "shards", report)
    _measure_memory(settings, workspace.folder, folder, report, say)
    report.notes.append("both tokenise on one core, in seconds of processor time, with the same tokenizer")
    report.notes.append("memory is a preparation's own, above its imports and without mapped files, at its highest")
    return report


def _read(source: Path) -> list[Conversation]:
    (shard,) = cut_shards([source], shard_bytes=1 << 40)
    return [one for chunk in read_shard(shard) for one in chunk.parse() if isinstance(one, Conversation)]


def _compare(settings: PrepareSettings, source: Path, folder: Path, shards: Path, report: BenchReport) -> None:
    """Each side in processes of its own: in one heap with what the library leaves there, ours took half longer."""
    found: dict[str, list[float]] = {_OURS: [], _THEIRS: []}
    tokens: set[float] = set()
    for number in range(settings.rounds):
        sides = [
            (_OURS, ("tokenize_shard", str(source), str(folder), str(shards / str(number)))),
            (_THEIRS, ("tokenizers_alone", str(source), str(folder))),
        ]
        for name, arguments in sides if number % 2 == 0 else sides[::-1]:
            measured = measure_apart(*arguments)
            found[name].append(measured["megabytes_per_s"])
            tokens.add(measured["tokens"])
    # What is compared for its speed has to be the same work.
    assert len(tokens) == 1, tokens
    for name, rates in found.items():
        report.add_samples(name, rates, "MB/s")
    report.add_ratio("prepare to tokenizers alone", _OURS, _THEIRS, at_least=0.85)


def _measure_memory(
    settings: PrepareSettings, folder: Path, tokenizer: Path, report: BenchReport, say: Callable[[str], None]
) -> None:
    found = {}
    for times in settings.growth:
        say(f"preparing {times} times as much")
        source = folder / f"chats-{times}.jsonl"
        _write_chats(source, settings.memory_conversations * times, settings.median, seed=1)
        measured = measure_apart("prepare", str(source), str(tokenizer), str(folder / f"prepared-{times}"))
        found[times] = measured["megabytes"]
        report.add(Figure(f"memory, {times}x: {source.stat().st_size / 1e6:,.0f} MB of source", found[times], "MB"))
        source.unlink()
    low, high = min(found), max(found)
    more = settings.memory_conversations * (high - low)
    report.add(Figure("memory a conversation more", (found[high] - found[low]) * 1e6 / more, "bytes"))


def _write_chats(path: Path, count: int, median: float, *, seed: int) -> None:
    random = np.random.default_rng(seed)
    words = np.array(["".join(map(chr, 97 + random.integers(0, 26, size))) for size in random.integers(2, 10, 5000)])
    lengths = lognormal_lengths(count, median=median, longest=8000, seed=seed)
    with path.open("w") as file:
        for length in lengths.tolist():
            # As often as Zipf's law has them: the first words make up most of the text.
            text = " ".join(words[random.zipf(1.3, length) % 5000])
            turns = [{"role": "user", "content": text[: len(text) // 4] or "a"}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\n")
