"""The whole preparation: source, tokenizer, tokens, packs, report."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from harness.errors import ConfigError, PrepError
from harness.formats import FORMATS, Provenance
from harness.prep import prepared_folder as layout
from harness.prep.bpe import train_bpe
from harness.prep.chat import BadReason, BadRecord
from harness.prep.packing import PACKED_STORAGE, PackingConfig, plan_packs
from harness.prep.prepare_report import PrepareReport, SplitReport, render_report
from harness.prep.prepared_folder import PreparedFolder, settings_hash
from harness.prep.pydoc_source import write_pydoc_corpus
from harness.prep.sources import SourceConfig, files_left_out, list_files, read_chunks
from harness.prep.spool import Spool, SpoolWriter
from harness.prep.stages import Stages
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig
from harness.prep.workers import TokenizeJob, count_workers, tokenize_chunks
from harness.prep.write import write_packs

# Raised when the same settings begin to give other data.
_VERSION = 1
# A tokenizer learns no more from more text than this, and memory stays bounded.
_TRAIN_CHARACTERS = 256 << 20
_SHOWN_BAD = 10


@dataclass
class PrepareConfig:
    """Settings of `python -m recipes.prepare`: where chats come from, the tokenizer, and how they are packed."""

    source: SourceConfig = field(default_factory=SourceConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: PackingConfig = field(default_factory=PackingConfig)


def prepare(config: PrepareConfig, *, console: Console | None = None) -> PrepareReport:
    """Turn chats into packed datasets in `config.data.path`.

    Writes `train` and `validation` (datasets), `tokenizer`, `report.json` (last), `source` (the built-in corpus), and
    `bad_records.jsonl` where records were skipped. Does nothing where the same settings are done already.

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
        with ExitStack() as cleanup:
            spools = self._tokenize(cleanup)
            for name, spool in spools.items():
                self._report.splits[name] = SplitReport(len(spool), spool.num_tokens, spool.num_trained_tokens)
            self._report.check_sums()
            for name, spool in spools.items():
                self._pack(name, spool, tokenizer)

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
            self._refuse(bad)
            advance(chunk.num_bytes)
            if left < 0:
                return

    def _tokenize(self, cleanup: ExitStack) -> dict[str, Spool]:
        """Tokenise everything into one spool per split, removed again by `cleanup`."""
        config, report = self._config, self._report
        fraction = config.data.validation_fraction
        spool_folder = self._path / layout.SPOOL
        cleanup.callback(shutil.rmtree, spool_folder, ignore_errors=True)
        writers = {name: SpoolWriter(spool_folder / name) for name in _split_names(fraction)}
        for writer in writers.values():
            cleanup.callback(writer.close)
        job = TokenizeJob(
            folder=str(self._path / layout.TOKENIZER),
            mask=config.tokenizer.mask,
            control_tokens=config.tokenizer.control_tokens,
            pack_size=config.data.pack_size,
            over_long=config.data.over_long,
        )
        num_workers = count_workers(config.data.num_workers, self._source_bytes())
        chunks = read_chunks(self._files, limit=config.source.limit)
        with self._stages.stage("tokens", "tokenising", total=self._source_bytes()) as stage:
            for chunk in tokenize_chunks(chunks, job, num_workers=num_workers):
                self._refuse(chunk.bad)
                self._note_bad(chunk.bad)
                # The hash as a number from 0 to 1: a conversation stays in its split when others come or go.
                validation = chunk.hashes.astype(np.float64) / 2.0**64 < fraction
                writers[layout.TRAIN].append(*chunk.select(~validation))
                if layout.VALIDATION in writers:
                    writers[layout.VALIDATION].append(*chunk.select(validation))
                report.records += len(chunk.lengths) + len(chunk.bad) + chunk.dropped.total()
                report.dropped += chunk.dropped
                report.truncated += chunk.num_truncated
                stage.advance(chunk.num_bytes)
            spools = {name: writer.finish() for name, writer in writers.items()}
            tokens = sum(spool.num_tokens for spool in spools.values())
            stage.said = f"{tokens:,} tokens of {sum(map(len, spools.values())):,} conversations"
        self._check_not_empty(spools)
        return spools

    def _pack(self, name: str, spool: Spool, tokenizer: ChatTokenizer) -> None:
        config, split = self._config.data, self._report.splits[name]
        plan = plan_packs(spool.lengths, pack_size=config.pack_size, algorithm=config.algorithm, seed=config.seed)
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
                spool,
                format=PACKED_STORAGE[config.packed_storage],
                pack_size=config.pack_size,
                provenance=provenance,
                advance=stage.advance,
                store=self._path / layout.SEQUENCES / name,
            )
            split.packs = plan.num_packs
            split.fill = split.tokens / (plan.num_packs * config.pack_size)
            stage.said = f"{plan.num_packs:,} packs of {config.pack_size:,} tokens, {split.fill:.2%} full"

    def _refuse(self, bad: list[BadRecord]) -> None:
        if not bad or self._config.source.on_bad != "refuse":
            return
        shown = [f"{one.where}: {one.reason}: {one.detail}" for one in bad[:_SHOWN_BAD]]
        if len(bad) > _SHOWN_BAD:
            shown.append(f"and {len(bad) - _SHOWN_BAD:,} more close by")
        fix = "mend the records, or leave bad ones out with source.on_bad=skip"
        if any(one.reason == BadReason.CONTROL_TOKEN for one in bad):
            fix += "; tokenizer.control_tokens=allow lets such text become the token itself"
        counts = Counter(one.reason.value for one in bad)
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in counts.items())
        raise PrepError(f"there are bad records: {reasons}", where="\n         ".join(shown), fix=fix)

    def _note_bad(self, bad: list[BadRecord]) -> None:
        if not bad:
            return
        self._report.bad.update(one.reason.value for one in bad)
        with (self._path / layout.BAD_RECORDS).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(one)) + "\n" for one in bad)

    def _check_not_empty(self, spools: dict[str, Spool]) -> None:
        report = self._report
        for name, spool in spools.items():
            if len(spool):
                continue
            left_out = ", ".join(f"{number:,} {why}" for why, number in sorted((report.bad + report.dropped).items()))
            raise PrepError(
                f"no conversation is left for {name}: {report.records:,} records were read"
                + (f", left out were {left_out}" if left_out else ""),
                where=self._config.source.path or self._config.source.kind,
                fix="read more conversations, or set data.validation_fraction=0"
                if name == layout.VALIDATION
                else "read more conversations, or change data.pack_size or data.over_long",
            )

    def _source_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._files)


def _split_names(validation_fraction: float) -> list[str]:
    return [layout.TRAIN, layout.VALIDATION] if validation_fraction > 0 else [layout.TRAIN]


def _settings(config: PrepareConfig, files: list[Path]) -> dict[str, Any]:
    """All that the result depends on, as plain values."""
    data = asdict(config.data)
    for name in ("path", "overwrite", "num_workers"):
        del data[name]
    settings = {
        "version": _VERSION,
        "source": asdict(config.source),
        "tokenizer": asdict(config.tokenizer),
        "data": data,
    }
    if config.source.kind == "pydoc":
        settings["python"] = sys.version
    settings["source_files"] = _files_digest(files)
    named = [Path(name) for name in (config.tokenizer.name, config.tokenizer.chat_template) if name]
    inner = [file for path in named for file in ([path] if path.is_file() else sorted(path.glob("*")))]
    settings["tokenizer_files"] = _files_digest([file for file in inner if file.is_file()])
    return settings


def _files_digest(files: list[Path]) -> str:
    """Changes when a file's name, size or time of change does."""
    stats = [(str(file), file.stat()) for file in files]
    return settings_hash({name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats})
