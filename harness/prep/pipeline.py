"""The whole preparation: source, tokenizer, tokens, packs, report."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.checks import require_choice
from harness.errors import ConfigError, PrepError
from harness.formats import FORMATS, Provenance, load_manifest
from harness.prep import folder as layout
from harness.prep.chat import BadRecord
from harness.prep.engines import (
    BAD_RECORDS,
    Receipt,
    ShardJob,
    Split,
    Spool,
    TokenizeJob,
    count_workers,
    divide,
    do_shards,
    refuse,
    shard_folder,
)
from harness.prep.folder import PreparedFolder, files_digest, settings_hash
from harness.prep.packing import PACKED_STORAGE, PackingConfig, plan_packs
from harness.prep.pydoc import write_pydoc_corpus
from harness.prep.reading import cut_shards, read_chunks
from harness.prep.report import PrepareReport, SplitReport, render_report, to_markdown
from harness.prep.sources import SourceConfig, files_left_out, list_files
from harness.prep.stages import Stages
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, train_bpe
from harness.prep.write import write_packs
from harness.storage import write_atomically

# Raised when the same settings begin to give other data.
_VERSION = 1
# A tokenizer learns no more from more text than this, and memory stays bounded.
_TRAIN_CHARACTERS = 256 << 20
# More shards than these are made larger.
_MAX_SHARDS = 4096


@dataclass
class PrepareConfig:
    """Settings of `python -m recipes.prepare`: where chats come from, the tokenizer, and how they are packed.

    Attributes:
        engine: who tokenises: `local`, processes of this machine; or `ray`, the cluster that RAY_ADDRESS names.
    """

    source: SourceConfig = field(default_factory=SourceConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: PackingConfig = field(default_factory=PackingConfig)
    engine: str = "local"

    def __post_init__(self) -> None:
        require_choice(self.engine, ("local", "ray"), setting="engine")


def prepare(config: PrepareConfig, *, console: Console | None = None) -> PrepareReport:
    """Turn chats into packed datasets in `config.data.path`.

    Writes `train`, `validation` and `test` (datasets), `tokenizer`, `report.md`, `report.json` (last), `source` (the
    built-in corpus), and `bad_records.jsonl` where records were skipped. Does nothing where the same settings are
    done already; one that was interrupted goes on with the shards that it had done.

    Raises:
        HarnessError: the source, a setting or the destination is not usable; nothing then counts as prepared.
    """
    stages = Stages(console or Console())
    files = [] if config.source.kind == "pydoc" else list_files(config.source.path)
    if PACKED_STORAGE[config.data.packed_storage] not in FORMATS:
        known = [name for name, form in PACKED_STORAGE.items() if form in FORMATS]
        raise ConfigError(
            f"{config.data.packed_storage} cannot be written",
            where="data.packed_storage",
            fix=f"choose one of: {', '.join(known)}",
        )
    settings = _settings(config, files)
    folder = PreparedFolder(Path(config.data.path))
    earlier = folder.finished_report(settings, overwrite=config.data.overwrite)
    if earlier is not None:
        report = PrepareReport.from_dict(earlier, path=folder.path)
        stages.say(f"{folder.path} is there already, prepared with the same settings.")
    else:
        left_out = files_left_out(config.source.path) if config.source.kind == "files" else []
        if left_out:
            stages.say(f"{len(left_out):,} files of the source are not chat files and are left out:")
            stages.say("  " + ", ".join(map(str, left_out[:5])) + (", ..." if len(left_out) > 5 else ""))
        report = PrepareReport(str(folder.path), settings_hash(settings), settings)
        try:
            folder.begin()
            _Preparation(config, folder.path, files, report, stages).run()
            report.seconds = stages.seconds
            write_atomically(folder.path / layout.REPORT_PAGE, to_markdown(report).encode())
            folder.finish(report.to_dict())
        finally:
            folder.abandon()
    stages.say("")
    (console or Console()).print(render_report(report))
    return report


class _Preparation:
    """One run, stage by stage; `report` grows on the way."""

    def __init__(
        self, config: PrepareConfig, path: Path, files: list[Path], report: PrepareReport, stages: Stages
    ) -> None:
        self._config = config
        self._path = path
        self._files = files
        self._report = report
        self._stages = stages

    def run(self) -> None:
        self._collect()
        tokenizer = self._make_tokenizer()
        self._report.vocab_size = tokenizer.vocab_size
        splits = self._tokenize(tokenizer)
        for name, split in splits.items():
            self._report.splits[name] = SplitReport(len(split), split.num_tokens, split.num_trained_tokens)
        self._report.check_sums()
        for name, split in splits.items():
            self._pack(name, split, tokenizer)

    def _collect(self) -> None:
        """Name the files to read, after writing them where the source is built in."""
        if self._config.source.kind == "pydoc":
            with self._stages.stage("source", "collecting Python's documentation") as stage:
                corpus = self._path / layout.SOURCE / "pydoc.jsonl"
                write_pydoc_corpus(corpus)
                self._files = [corpus]
                stage.said = (
                    f"the documentation of Python {sys.version_info.major}.{sys.version_info.minor} in {corpus}"
                )
        self._report.files = len(self._files)

    def _make_tokenizer(self) -> ChatTokenizer:
        config, folder = self._config.tokenizer, self._path / layout.TOKENIZER
        if config.name:
            with self._stages.stage("tokenizer", f"loading {config.name}") as stage:
                tokenizer = ChatTokenizer(config)
                tokenizer.save(folder)
                stage.said = f"{config.name}, {tokenizer.vocab_size:,} tokens"
            return tokenizer
        with self._stages.stage("tokenizer", "training a tokenizer", total=self._source_bytes()) as stage:
            train_bpe(self._texts(stage.advance), folder, vocab_size=config.vocab_size)
            tokenizer = ChatTokenizer(config, str(folder))
            if config.chat_template:
                tokenizer.save(folder)
            stage.said = f"byte-level BPE of {tokenizer.vocab_size:,} tokens, trained on the source"
        return tokenizer

    def _texts(self, advance: Callable[[float], None]) -> Iterator[str]:
        left = _TRAIN_CHARACTERS
        for chunk in read_chunks(self._files, limit=self._config.source.limit):
            bad = []
            for record in chunk.parse():
                if isinstance(record, BadRecord):
                    bad.append(record)
                    continue
                for message in record.messages:
                    left -= len(message.content)
                    yield message.content
            if self._config.source.on_bad == "refuse":
                refuse(bad)
            advance(chunk.num_bytes)
            if left < 0:
                return

    def _tokenize(self, tokenizer: ChatTokenizer) -> dict[str, Split]:
        """Make sequences of everything, and divide them among the splits."""
        config = self._config
        tokenize = TokenizeJob(
            folder=str(self._path / layout.TOKENIZER),
            content=f"{tokenizer.tokenizer_hash} {tokenizer.chat_template_hash}",
            mask=config.tokenizer.mask,
            control_tokens=config.tokenizer.control_tokens,
            pack_size=config.data.pack_size,
            over_long=config.data.over_long,
        )
        made_of = {**asdict(tokenize), "version": _VERSION, "on_bad": config.source.on_bad}
        del made_of["folder"]
        job = ShardJob(
            str(self._path / layout.SHARDS), tokenize, settings_hash(made_of), refuse=config.source.on_bad == "refuse"
        )
        source_bytes = self._source_bytes()
        with self._stages.stage("tokens", "tokenising", total=source_bytes) as stage:
            shard_bytes = max(config.source.shard_bytes, -(-source_bytes // _MAX_SHARDS))
            shards = cut_shards(self._files, shard_bytes=shard_bytes, limit=config.source.limit)
            folders = [shard_folder(job.folder, number) for number in range(len(shards))]
            _remove_others(Path(job.folder), keep=folders)
            receipts = []
            num_workers = count_workers(config.data.num_workers, source_bytes)
            for receipt, shard in zip(
                do_shards(job, shards, engine=config.engine, num_workers=num_workers), shards, strict=True
            ):
                receipts.append(receipt)
                stage.advance(shard.num_bytes)
            self._count(receipts, folders)
            spool = Spool((folder, one.sequences, one.tokens) for folder, one in zip(folders, receipts, strict=True))
            shares = {layout.VALIDATION: config.data.validation_fraction, layout.TEST: config.data.test_fraction}
            splits, again = divide(spool, shares, rest=layout.TRAIN, drop_duplicates=config.data.drop_duplicates)
            self._report.dropped += Counter({"duplicate": again})
            tokens = sum(split.num_tokens for split in splits.values())
            stage.said = f"{tokens:,} tokens of {sum(map(len, splits.values())):,} conversations"
            reused = sum(one.was_there for one in receipts)
            if reused:
                stage.said += f", {reused:,} of {len(shards):,} shards were there"
        self._check_not_empty(splits)
        return splits

    def _count(self, receipts: list[Receipt], folders: list[Path]) -> None:
        report = self._report
        with ExitStack() as stack:
            told = None
            for receipt, folder in zip(receipts, folders, strict=True):
                report.records += receipt.records
                report.bad.update(receipt.bad)
                report.dropped.update(receipt.dropped)
                report.truncated += receipt.truncated
                if receipt.bad:
                    told = told or stack.enter_context((self._path / layout.BAD_RECORDS).open("wb"))
                    told.write((folder / BAD_RECORDS).read_bytes())

    def _pack(self, name: str, split_of: Split, tokenizer: ChatTokenizer) -> None:
        config, split = self._config.data, self._report.splits[name]
        plan = plan_packs(split_of.lengths, pack_size=config.pack_size, algorithm=config.algorithm, seed=config.seed)
        provenance = Provenance(
            # Relative to the dataset, so that the folder can be moved.
            tokenizer=f"../{layout.TOKENIZER}",
            tokenizer_hash=tokenizer.tokenizer_hash,
            chat_template_hash=tokenizer.chat_template_hash,
            packer=config.algorithm,
            seed=config.seed,
            settings_hash=self._report.settings_hash,
            counts=self._report.provenance_counts(),
        )
        with self._stages.stage(name, f"writing {name}", total=plan.num_packs) as stage:
            split.fingerprint = write_packs(
                self._path / name,
                plan,
                split_of,
                format=PACKED_STORAGE[config.packed_storage],
                pack_size=config.pack_size,
                provenance=provenance,
                advance=stage.advance,
                store=self._path / layout.SEQUENCES / name,
            )
            stored = load_manifest(self._path / name)
            if stored is None or (stored.num_sequences, stored.num_tokens) != (split.conversations, split.tokens):
                raise PrepError(
                    f"{split.conversations:,} conversations of {split.tokens:,} tokens were to be stored, and "
                    f"{stored.num_sequences if stored else 0:,} of {stored.num_tokens if stored else 0:,} were",
                    where=str(self._path / name),
                    fix="remove the folder and prepare again",
                )
            split.describe_packs(split_of.lengths, plan, pack_size=config.pack_size)
            stage.said = f"{plan.num_packs:,} packs of {config.pack_size:,} tokens, {split.fill:.2%} full"

    def _check_not_empty(self, splits: dict[str, Split]) -> None:
        report = self._report
        for name, split in splits.items():
            if len(split):
                continue
            left_out = ", ".join(f"{number:,} {why}" for why, number in sorted((report.bad + report.dropped).items()))
            raise PrepError(
                f"no conversation is left for {name}: {report.records:,} records were read"
                + (f", left out were {left_out}" if left_out else ""),
                where=self._config.source.path or self._config.source.kind,
                fix=f"read more conversations, or set data.{name}_fraction=0"
                if name != layout.TRAIN
                else "read more conversations, or change data.pack_size or data.over_long",
            )

    def _source_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._files)


def _remove_others(folder: Path, *, keep: list[Path]) -> None:
    """Delete what other settings, or tries that were killed, left among the shards."""
    folder.mkdir(exist_ok=True)
    for entry in set(folder.iterdir()) - set(keep):
        shutil.rmtree(entry, ignore_errors=True)


def _settings(config: PrepareConfig, files: list[Path]) -> dict[str, Any]:
    """All that the result depends on, as plain values."""
    data = asdict(config.data)
    for name in ("path", "overwrite", "num_workers"):
        del data[name]
    settings = {
        "version": _VERSION,
        "source": {name: value for name, value in asdict(config.source).items() if name != "shard_bytes"},
        "tokenizer": asdict(config.tokenizer),
        "data": data,
    }
    if config.source.kind == "pydoc":
        settings["python"] = sys.version
    settings["source_files"] = files_digest(files)
    named = [Path(name) for name in (config.tokenizer.name, config.tokenizer.chat_template) if name]
    inner = [file for path in named for file in ([path] if path.is_file() else sorted(path.glob("*")))]
    settings["tokenizer_files"] = files_digest([file for file in inner if file.is_file()])
    return settings
