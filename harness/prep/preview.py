"""Show conversations as a preparation would train them, before anything is written."""

from __future__ import annotations

import difflib
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

from harness.formats.inspect import render_runs
from harness.prep.chat import BadRecord, Conversation
from harness.prep.chat.records import as_share
from harness.prep.fitting import fit_conversation
from harness.prep.folder import TOKENIZER
from harness.prep.pipeline import Preparation, PrepareConfig
from harness.prep.report import PrepareReport, Stages
from harness.prep.shards import make_sample
from harness.prep.sources.finding import find_sources
from harness.prep.tokenize import ChatTokenizer, Encoded
from harness.printing import count_of, one_line, open_console
from harness.tables import Table

# Number of records that a preview trains a tokenizer on.
_TRAINING_RECORDS = 2000
# Differing lines to print per record between the kept history and the served history.
_MAX_LINES = 12


def show_preview(config: PrepareConfig, *, console: Console | None = None) -> None:
    """Print the first `config.preview` records as they will be trained, or the reasons why they are refused.

    For a mix, prints that many records of each source. The console defaults to standard output, 80 columns wide if it
    is not a terminal; without colors, trained text is in double brackets.
    """
    console = console or open_console(width=80)
    config = replace(config, source=config.source.resolve())
    found = find_sources(config.source, lambda text: console.print(Text(text)))
    # Train a tokenizer only on the first records.
    for one in found:
        one.config = replace(one.config, limit=min(one.config.limit or _TRAINING_RECORDS, _TRAINING_RECORDS))
    first = replace(config, source=replace(config.source, on_bad="skip"))
    with TemporaryDirectory(prefix="harness-preview-") as scratch:
        run = Preparation(first, Path(scratch), found, PrepareReport(), Stages(open_console(quiet=True)), date.today())
        tokenizer = run.begin()
        for one, given in zip(found, config.source.each(), strict=True):
            one.config = given
        served = None
        if config.tokenizer.history == "kept":
            as_served = replace(config.tokenizer, history="as_served", chat_template="")
            served = ChatTokenizer(as_served, str(Path(scratch) / TOKENIZER), today=date.today())
        records = [record for one in run.sources for chunk in one.chunks(config.preview) for record in chunk.parse()]
        facts, name, schema = run.report.mask, config.tokenizer.name, run.report.schema
        schema += ", detected" * (schema != "" and not all(one.schema for one in config.source.each()))
        trained = "trained on the first records for this preview; the preparation trains it on all records"
        facts_of_run = (
            ("source", config.source.name),
            ("schema", schema),
            ("not read", ", ".join(run.report.unused)),
            ("tokenizer", f"{name}, {tokenizer.vocab_size:,} tokens" if name else trained),
            ("mask", f"{facts['rule']}, because {facts['why']}"),
            ("history", facts.get("history", "")),
            ("trains", facts.get("train_on", "")),
            ("pack size", f"{config.data.pack_size:,} tokens; longer conversations: {config.data.over_long}"),
        )
        console.print(Table((), [(name, text) for name, text in facts_of_run if text]).to_terminal())
        legend = [("trained", True), (" not trained", False)]
        console.print(render_runs(legend, has_color=console.color_system is not None))
        made = tokenizer.encode_each(records)
        equal = Counter((one.reason, one.detail) for one in made if isinstance(one, BadRecord))
        for record, sequences in zip(records, made, strict=True):
            if isinstance(sequences, BadRecord):
                # Print a reason once for all records that are refused for it.
                if count := equal.pop((sequences.reason, sequences.detail), 0):
                    more = f" (and {count_of(count - 1, 'more record')})" if count > 1 else ""
                    console.print(Text("\n" + _wrapped(sequences.where + more, console), style="bold"))
                    what = f"refused, {sequences.reason}: {sequences.detail}"
                    console.print(Text(_wrapped(what, console), style="red"))
                continue
            assert isinstance(record, Conversation)
            _show(record, sequences, tokenizer, config, console)
            if served is not None:
                _show_difference(record, tokenizer, served, console)
    console.print(Text(f"\n{count_of(len(records), 'record')} shown; nothing was written."))


def _show(
    record: Conversation, made: Sequence[Encoded], tokenizer: ChatTokenizer, config: PrepareConfig, console: Console
) -> None:
    console.print()
    data = config.data
    fitted = fit_conversation(record, made, tokenizer, pack_size=data.pack_size, over_long=data.over_long)
    sample = make_sample(record, fitted.pieces, tokenizer, is_whole=True)
    console.print(Text(_wrapped(sample.title, console), style="bold"))
    if record.messages and record.messages[-1].role == "user":
        console.print(Text("ends with a user turn without an answer", style="yellow"))
    if not fitted.pieces:
        console.print(Text(f"left out, {fitted.reason}: {max(len(one.view) for one in made):,} tokens", style="red"))
    if fitted.is_cut or fitted.is_split or fitted.is_partial:
        done = "cut" if fitted.is_cut else "divided" if fitted.is_split else "in part too long"
        console.print(Text(f"longer than a pack, {done}: {fitted.num_lost:,} trained tokens are lost", style="yellow"))
    for number, sequence in enumerate(sample.sequences, start=1):
        share = sequence.num_trained / sequence.num_tokens
        counts = f"{count_of(sequence.num_tokens, 'token')}, {sequence.num_trained:,} trained ({share:.0%})"
        if config.tokenizer.train_on == "weighted":
            weights = Counter(fitted.pieces[number - 1].loss_mask.tolist())
            counts += ", weights " + ", ".join(f"{as_share(one)} ({weights[one]:,})" for one in sorted(weights) if one)
        console.print(Text(f"sequence {number} of {sample.num_sequences}: {counts}", style="cyan"))
        console.print(render_runs(sequence.runs, has_color=console.color_system is not None))


def _show_difference(record: Conversation, kept: ChatTokenizer, served: ChatTokenizer, console: Console) -> None:
    """Print how a conversation's only sequence differs from the text that a server sends for the last turn."""
    one, several = kept.encode_each([record])[0], served.encode_each([record])[0]
    if isinstance(one, BadRecord) or isinstance(several, BadRecord) or len(several) == 1:
        return
    tokens, others = (sum(len(made.view) for made in sequences) for sequences in (one, several))
    text = f"history=kept: {tokens:,} tokens instead of {others:,} in {len(several)} sequences; "
    console.print(Text(_wrapped(text + "the last turn is trained after lines that a server would omit:", console)))
    lines = difflib.unified_diff(several[-1].text.splitlines(), one[-1].text.splitlines(), n=0, lineterm="")
    changed = [line for line in list(lines)[2:] if not line.startswith("@@") and line[1:].strip()]
    for line in changed[:_MAX_LINES]:
        console.print(Text(one_line(line), style="yellow"))
    if len(changed) > _MAX_LINES:
        console.print(Text(f"and {len(changed) - _MAX_LINES:,} more", style="yellow"))


def _wrapped(text: str, console: Console) -> str:
    """Return a text wrapped to the console's width, indented so that only its first line starts with a word."""
    return "\n".join(textwrap.wrap(one_line(text), console.width, subsequent_indent=" " * 9))
