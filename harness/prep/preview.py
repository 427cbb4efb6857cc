"""Show conversations as a preparation would train them, before anything is written."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

from harness.formats.inspect import render_runs
from harness.prep.chat import BadRecord, Conversation, RecordReader
from harness.prep.fitting import fit_conversation
from harness.prep.pipeline import PrepareConfig
from harness.prep.pydoc import write_pydoc_corpus
from harness.prep.samples import make_sample
from harness.prep.sources.finding import SourceFiles, find_files
from harness.prep.sources.reading import read_chunks
from harness.prep.sources.schema import find_schema
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, texts_of, train_bpe
from harness.printing import one_line, open_console
from harness.storage import stamp_of
from harness.tables import Table

# Records on which a tokenizer is trained for a preview.
_TRAINING_RECORDS = 2000


def show_preview(config: PrepareConfig, *, console: Console | None = None) -> None:
    """Print the first `config.preview` records as they will be trained, refused ones with their reasons.

    Args:
        config: settings of the preparation.
        console: receives the text; None is standard output, 80 columns wide if it is no terminal. Without colors,
            trained text is in double brackets.

    Raises:
        HarnessError: the source, the tokenizer or a setting is unusable.
    """
    console = console or open_console(width=80)
    config = replace(config, source=config.source.resolve())
    with TemporaryDirectory(prefix="harness-preview-") as scratch:
        files = _find(config, Path(scratch), console)
        schema = find_schema(files.files, config.source)
        records = list(_parsed(files, schema.reader, config.preview))
        tokenizer, origin = _load(config.tokenizer, _parsed(files, schema.reader, _TRAINING_RECORDS), Path(scratch))
        facts = tokenizer.mask_facts(schema.reader.schema)
        has_color = console.color_system is not None
        facts_of_run = (
            ("source", config.source.path or "the built-in corpus, Python's documentation"),
            ("schema", schema.reader.schema + (", detected" if schema.is_detected else "")),
            ("not read", ", ".join(schema.unused)),
            ("tokenizer", origin),
            ("mask", f"{facts['rule']}, because {facts['why']}"),
            ("history", f"{facts['history']}; trains {facts['train_on']}" if "history" in facts else ""),
            ("pack size", f"{config.data.pack_size:,} tokens; longer conversations: {config.data.over_long}"),
        )
        console.print(Table((), [(name, text) for name, text in facts_of_run if text]).to_terminal())
        console.print(render_runs([("trained", True), (" not trained", False)], has_color=has_color))
        for record in records:
            _show(record, tokenizer, config, console, has_color=has_color)
    shown = f"The first {len(records):,} records as they are" if len(records) != 1 else "The first record as it is"
    console.print(Text(f"\n{shown} trained; nothing was written."))


def _find(config: PrepareConfig, scratch: Path, console: Console) -> SourceFiles:
    if config.source.kind != "pydoc":
        return find_files(config.source, show=lambda text: console.print(Text(text)))
    corpus = scratch / "pydoc.jsonl"
    write_pydoc_corpus(corpus)
    return SourceFiles((corpus,), (stamp_of(corpus),))


def _parsed(files: SourceFiles, reader: RecordReader, limit: int) -> Iterator[Conversation | BadRecord]:
    return (record for chunk in read_chunks(files.files, limit=limit, reader=reader) for record in chunk.parse())


def _load(
    config: TokenizerConfig, records: Iterable[Conversation | BadRecord], scratch: Path
) -> tuple[ChatTokenizer, str]:
    """Return the tokenizer, or one that is trained on the records; and where it comes from, in words."""
    if config.name:
        tokenizer = ChatTokenizer(config, today=date.today())
        return tokenizer, f"{config.name}, {tokenizer.vocab_size:,} tokens"
    conversations = [record for record in islice(records, _TRAINING_RECORDS) if isinstance(record, Conversation)]
    texts = (text for conversation in conversations for _, text in texts_of(conversation))
    folder = scratch / "tokenizer"
    train_bpe(texts, folder, vocab_size=config.vocab_size, chat_template=config.chat_template or "chatml")
    tokenizer = ChatTokenizer(config, str(folder), today=date.today())
    many = f"the first {len(conversations):,} conversations"
    return tokenizer, f"trained for this preview on {many}; the preparation trains one on all, with other counts"


def _show(
    record: Conversation | BadRecord,
    tokenizer: ChatTokenizer,
    config: PrepareConfig,
    console: Console,
    *,
    has_color: bool,
) -> None:
    made = record if isinstance(record, BadRecord) else tokenizer.encode_each([record])[0]
    console.print()
    if isinstance(record, BadRecord) or isinstance(made, BadRecord):
        bad = record if isinstance(record, BadRecord) else made
        assert isinstance(bad, BadRecord)
        console.print(Text(_wrapped(bad.where, console), style="bold"))
        console.print(Text(_wrapped(f"refused, {bad.reason}: {bad.detail}", console), style="red"))
        return
    data = config.data
    fitted = fit_conversation(record, made, tokenizer, pack_size=data.pack_size, over_long=data.over_long)
    sample = make_sample(record, fitted.pieces, tokenizer, is_whole=True)
    console.print(Text(_wrapped(sample.title, console), style="bold"))
    if record.messages and record.messages[-1].role == "user":
        console.print(Text("ends with a user turn, which nothing answers", style="yellow"))
    if not fitted.pieces:
        longest = max(len(one.view) for one in made)
        console.print(Text(f"left out, {fitted.reason}: {longest:,} tokens", style="red"))
    if fitted.is_cut or fitted.is_split or fitted.is_partial:
        done = "cut" if fitted.is_cut else "divided" if fitted.is_split else "in part too long"
        console.print(Text(f"longer than a pack, {done}: {fitted.num_lost:,} trained tokens are lost", style="yellow"))
    for number, sequence in enumerate(sample.sequences, start=1):
        share = sequence.num_trained / sequence.num_tokens
        counts = f"{sequence.num_tokens:,} tokens, {sequence.num_trained:,} trained ({share:.0%})"
        console.print(Text(f"sequence {number} of {sample.num_sequences}: {counts}", style="cyan"))
        console.print(render_runs(sequence.runs, has_color=has_color))


def _wrapped(text: str, console: Console) -> str:
    """Return a text in lines of the console's width, of which no word of the text begins one but the first."""
    return "\n".join(textwrap.wrap(one_line(text), console.width, subsequent_indent=" " * 9))
