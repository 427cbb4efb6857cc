"""Prepare a dataset: source files, tokenizer, sequences, packs, report."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from harness.checks import CheckedSettings, bounded, one_of
from harness.errors import ConfigError, PrepError, os_errors_as
from harness.formats import Manifest, Provenance, open_dataset, open_writer
from harness.formats.layouts.virtual import open_store, write_plan
from harness.prep import folder as layout
from harness.prep.chat import BadRecord, RecordReader
from harness.prep.engines import ENGINES, check_engine, do_shards
from harness.prep.folder import PreparedFolder, settings_hash
from harness.prep.media import MediaLimits
from harness.prep.packing import PackingConfig, PackPlan, plan_packs
from harness.prep.pydoc import write_pydoc_corpus
from harness.prep.report import PrepareReport, Stage, Stages, choose_samples, render_page, render_report, to_markdown
from harness.prep.shards import PARTIAL, VERSION, Receipt, Sample, ShardJob, bytes_in_progress, refuse
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.finding import PreparedSource, find_schema, find_sources
from harness.prep.sources.reading import SourceFiles, SourceShard, is_compressed
from harness.prep.spool import Split, Spool, divide, repeat
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, texts_of, train_bpe
from harness.printing import count_of, open_console
from harness.storage import BucketFolder, LocalCache, LocalFolder, Place, open_folder, stamp_of, write_atomically
from harness.storage.checksums import digest_files
from harness.storage.files import Stamp

# More text does not improve a tokenizer, and the limit bounds memory.
_TRAIN_CHARACTERS = 256 << 20
# Larger sources get larger shards instead of more shards.
_MAX_SHARDS = 4096
# Approximate number of bytes of text per byte of a compressed file.
_EXPANSION = 8


@dataclass
class PrepareConfig(CheckedSettings):
    """Settings of a preparation.

    Attributes:
        source: chat records.
        tokenizer: tokenizer, chat template and mask rule.
        data: packing and storage.
        engine: `local` tokenizes in processes on this machine; `ray` uses the cluster at RAY_ADDRESS.
        preview: number of records to show as they will be trained, without writing anything (`--preview N`); 0 for
            none.
    """

    source: SourceConfig = field(default_factory=SourceConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: PackingConfig = field(default_factory=PackingConfig)
    engine: str = one_of("local", ENGINES)
    preview: int = bounded(0, highest=1_000_000)


def prepare(
    source: PrepareConfig | SourceConfig | str | os.PathLike[str],
    tokenizer: TokenizerConfig | str | os.PathLike[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    console: Console | None = None,
    **settings: Any,
) -> PrepareReport:
    """Turn chats into packed datasets in a folder.

    Writes `train`, `validation` and `test` (datasets), `tokenizer`, `report.md`, `report.html` (with samples),
    `report.json` (last) and `source` (the built-in corpus). If records were skipped, also writes `bad_records.jsonl`
    with their reasons and `bad_records_to_repair.jsonl`, the same records one per line, to repair and prepare again.
    Does nothing if the folder was prepared with the same settings; resumes an interrupted run with its finished shards.

    Args:
        source: chats, in any form that `SourceConfig.path` accepts, or a `SourceConfig`; or a `PrepareConfig`, in place
            of `tokenizer`, `path` and `settings`.
        tokenizer: a folder, a hub id or a `TokenizerConfig`; None trains a byte-level BPE tokenizer on the chats.
        path: output folder, on a disk or in a bucket; for a bucket, it is prepared in HARNESS_CACHE and then uploaded.
        progress: called with the stage (`source`, `tokenizer`, `tokens`, each split, `upload`), the amount done and the
            total (0 if unknown), in bytes (packs for a split); at least every second, from another thread, too.
        console: receives progress and the report; None means standard output, or no output if `progress` is given.
        settings: fields of `PackingConfig` and `engine`.

    Raises:
        HarnessError: the source, a setting or the destination is unusable; the folder then does not count as prepared.
    """
    config = _config_of(source, tokenizer, path, settings)
    check_engine(config.engine)
    target = open_folder(config.data.path)
    config = replace(config, source=config.source.resolve())
    console = console or open_console(width=80, quiet=progress is not None)
    stages = Stages(console, progress)
    if config.source.kind == "pydoc":
        stages.show("The source is the built-in corpus, Python's documentation; set source.path to use your own chats.")
    found = find_sources(config.source, stages.show)
    depends_on = _settings(config, found)
    earlier = layout.finished_report(target, depends_on, overwrite=config.data.overwrite)
    # A dataset for a bucket is first prepared on this machine, in a folder that is reused after an interruption.
    name = hashlib.sha256(str(target.place).encode()).hexdigest()[:16]
    copy = LocalCache().folder / "preparations" / name if isinstance(target, BucketFolder) else None
    if earlier is None and copy is not None:
        with suppress(ConfigError):
            earlier = layout.finished_report(LocalFolder(copy), depends_on, overwrite=config.data.overwrite)
    elif earlier is not None:
        copy = None
        hint = "; data.overwrite=true reads the files of media again" if earlier.get("media_by_kind") else ""
        stages.show(f"{target.where()} is already prepared with the same settings{hint}.")
    if earlier is not None:
        report = PrepareReport.from_dict(earlier, path=target.where())
    else:
        report = PrepareReport(path=target.where(), settings_hash=settings_hash(depends_on), settings=depends_on)
        _fill(PreparedFolder(Path(config.data.path) if copy is None else copy), config, found, report, stages)
    if copy is not None and isinstance(target, BucketFolder):
        _upload(copy, target, depends_on, stages, overwrite=config.data.overwrite)
    stages.show("")
    console.print(render_report(report))
    return report


def _upload(prepared: Path, target: BucketFolder, settings: dict[str, Any], stages: Stages, *, overwrite: bool) -> None:
    total = sum(path.stat().st_size for path in prepared.rglob("*") if path.is_file())
    fix = "start again: finished work is kept, and uploaded files are not sent again"
    with (
        os_errors_as(PrepError, "the preparation cannot be uploaded", where=prepared, fix=fix),
        stages.stage("upload", f"uploading to {target.where()}", total=total) as stage,
    ):
        sent = layout.upload(prepared, target, settings, stage.advance, overwrite=overwrite)
        stage.summary = f"{sent:,} of {total:,} bytes sent to {target.where()}"
    shutil.rmtree(prepared, ignore_errors=True)


def _config_of(
    source: PrepareConfig | SourceConfig | str | os.PathLike[str],
    tokenizer: TokenizerConfig | str | os.PathLike[str] | None,
    path: str | os.PathLike[str] | None,
    settings: dict[str, Any],
) -> PrepareConfig:
    """Return the settings given by the arguments of `prepare`."""
    if isinstance(source, PrepareConfig):
        given = [*(["tokenizer"] if tokenizer is not None else []), *(["path"] if path is not None else []), *settings]
        if given:
            what = f"{given[0]} was passed together with a PrepareConfig"
            raise ConfigError(what, where="prepare", fix="set it in the PrepareConfig, or pass the source instead")
        return source
    if path is None:
        raise ConfigError("no output folder is set", where="prepare, path", fix="specify the output folder")
    known = [field.name for field in fields(PackingConfig) if field.name != "path"]
    if unknown := [name for name in settings if name not in (*known, "engine")]:
        fix = f"fields of PackingConfig: {', '.join(known)}"
        raise ConfigError(f"there is no setting {unknown[0]!r}", where="prepare", fix=fix)
    engine = settings.pop("engine", "local")
    if not isinstance(source, SourceConfig):
        source = SourceConfig(kind="files", path=os.fspath(source))
    if tokenizer is None:
        tokenizer = TokenizerConfig()
    elif not isinstance(tokenizer, TokenizerConfig):
        tokenizer = TokenizerConfig(kind="huggingface", name=os.fspath(tokenizer))
    return PrepareConfig(source, tokenizer, PackingConfig(path=os.fspath(path), **settings), engine)


def _settings(config: PrepareConfig, found: list[PreparedSource]) -> dict[str, Any]:
    """Return everything that the result depends on, as plain values."""
    data, source = asdict(config.data), asdict(config.source)
    for name in ("path", "overwrite", "num_workers"):
        del data[name]
    del source["shard_bytes"]
    # Earlier versions lacked these settings; folders that they prepared equal those made with the defaults.
    for name, unset in (("drop_media", False), ("media", asdict(MediaLimits())), ("mix", []), ("tool_calls", "given")):
        if source[name] == unset:
            del source[name]
    settings = {"version": VERSION, "source": source, "tokenizer": asdict(config.tokenizer), "data": data}
    if config.source.kind == "pydoc":
        settings["python"] = sys.version
    # The facts of a dataset from the hub include the commit that was read.
    for one, of_one in zip(found, source.get("mix", [source]), strict=True):
        of_one.update(one.found.facts)
        if digest := RecordReader(one.config.schema).function_digest:
            of_one["schema_digest"] = digest
    settings["source_files"] = " ".join(one.found.digest for one in found)
    named = [Path(name).expanduser() for name in (config.tokenizer.name, config.tokenizer.chat_template) if name]
    inner = [file for path in named for file in ([path] if path.is_file() else sorted(path.glob("*")))]
    stats = {str(file): file.stat() for file in inner if file.is_file()}
    settings["tokenizer_files"] = settings_hash({name: [one.st_size, one.st_mtime_ns] for name, one in stats.items()})
    return settings


def _fill(
    folder: PreparedFolder, config: PrepareConfig, found: list[PreparedSource], report: PrepareReport, stages: Stages
) -> None:
    fix = "free disk space or check the disk, then start again: finished shards are kept"
    with os_errors_as(PrepError, "the preparation cannot be written", where=folder.path, fix=fix):
        try:
            folder.begin()
            preparation = Preparation(config, folder.path, found, report, stages, folder.first_day(date.today()))
            preparation.run()
            report.seconds = stages.seconds
            write_atomically(folder.path / layout.REPORT_PAGE, to_markdown(report).encode())
            page = render_page(report, preparation.samples)
            # A record can contain half a surrogate pair, which UTF-8 cannot encode.
            write_atomically(folder.path / layout.SAMPLES_PAGE, page.encode(errors="replace"))
            folder.finish(report.to_dict())
        finally:
            folder.abandon()


def _stamp(file: Place) -> Stamp | None:
    with suppress(OSError):  # the file does not exist
        return stamp_of(file)
    return None


@dataclass
class Preparation:
    """One preparation, stage by stage; fills in `report`."""

    config: PrepareConfig
    path: Path
    sources: list[PreparedSource]
    report: PrepareReport
    stages: Stages
    today: date
    samples: list[Sample] = field(default_factory=list)

    @property
    def files(self) -> list[Place]:
        return [file for source in self.sources for file in source.found.files]

    @property
    def num_bytes(self) -> int:
        return sum(source.found.num_bytes for source in self.sources)

    def begin(self) -> ChatTokenizer:
        """Write the built-in corpus if it is the source, find the schema, and load or train the tokenizer."""
        if self.config.source.kind == "pydoc":
            with self.stages.stage("source", "collecting Python's documentation") as stage:
                corpus = self.path / layout.SOURCE / "pydoc.jsonl"
                write_pydoc_corpus(corpus)
                self.sources[0].found = SourceFiles((corpus,), (stamp_of(corpus),))
                stage.summary = f"documentation of Python {sys.version_info.major}.{sys.version_info.minor} in {corpus}"
        self.report.files = len(self.files)
        schemas: dict[str, None] = {}
        unused: dict[str, None] = {}
        for source in self.sources:
            source.reader, fields = find_schema(source.found.files, source.config)
            unused |= dict.fromkeys(fields)
            schemas |= dict.fromkeys([source.reader.schema])
            if source.reader.schema and not source.config.schema:
                of = f" of {source.name}" if source.name else ""
                self.stages.show(f"The records{of} use the `{source.reader.schema}` schema.")
        self.report.schema, self.report.unused = ", ".join(filter(None, schemas)), list(unused)
        if unused:
            self.stages.show(f"Ignored fields: {', '.join(unused)}")
        tokenizer = self._make_tokenizer()
        for source in self.sources:
            if tokenizer.media_rules is not None and not source.config.drop_media:
                source.reader = replace(source.reader, media=source.config.media)
        self.report.vocab_size = tokenizer.vocab_size
        self.report.mask = tokenizer.mask_facts(self.report.schema)
        if digests := [one.reader.function_digest for one in self.sources if one.reader.function_digest]:
            self.report.mask["schema_digest"] = ", ".join(digests)
        return tokenizer

    def run(self) -> None:
        tokenizer = self.begin()
        self.stages.show(f"Mask: {self.report.mask['rule']}, because {self.report.mask['why']}.")
        if tokenizer.uses_date:
            self.report.settings["date"] = self.today.isoformat()
            self.report.settings_hash = settings_hash(self.report.settings)
        splits = self._tokenize(tokenizer)
        for name, split in splits.items():
            self._pack(name, split, tokenizer)

    def _make_tokenizer(self) -> ChatTokenizer:
        config, folder = self.config.tokenizer, self.path / layout.TOKENIZER
        if config.name:
            with self.stages.stage("tokenizer", f"loading {config.name}") as stage:
                tokenizer = ChatTokenizer(config, today=self.today)
                tokenizer.save(folder)
                stage.summary = f"{config.name}, {tokenizer.vocab_size:,} tokens"
            return tokenizer
        with self.stages.stage("tokenizer", "reading texts for a tokenizer", total=self.num_bytes) as stage:
            template = config.chat_template or "chatml"

            def texts() -> Iterator[str]:
                yield from self._texts(stage.advance)
                stage.next_part("training the tokenizer")

            train_bpe(texts(), folder, vocab_size=config.vocab_size, chat_template=template)
            tokenizer = ChatTokenizer(config, str(folder), today=self.today)
            if config.chat_template:
                tokenizer.save(folder)
            stage.summary = f"byte-level BPE of {tokenizer.vocab_size:,} tokens, trained on the source"
        return tokenizer

    def _texts(self, advance: Callable[[float], None]) -> Iterator[str]:
        left = _TRAIN_CHARACTERS
        num_read, refused = 0, Counter[str]()
        first = ""
        for chunk in (chunk for source in self.sources for chunk in source.chunks(0)):
            bad = []
            for record in chunk.parse():
                num_read += 1
                if isinstance(record, BadRecord):
                    bad.append(record)
                    refused[record.reason.value] += 1
                    first = first or f"{record.where}: {record.detail}"
                    continue
                for _, text in texts_of(record):
                    left -= len(text)
                    yield text
            if self.config.source.on_bad == "refuse":
                refuse(bad)
            advance(chunk.num_bytes)
            if left < 0:
                return
        if num_read == refused.total():
            self._refuse_source(refused, first)

    def _refuse_source(self, refused: Counter[str], first: str) -> None:
        """Raise PrepError for a source without records, or with every record refused."""
        if not refused:
            files = self.files
            what = "there are no records in " + ("the file" if len(files) == 1 else f"the {len(files):,} files")
            where = str(files[0]) if len(files) == 1 else self.config.source.name
            raise PrepError(what, where=where, fix="set source.path to files with records")
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in refused.items())
        what = f"no record can be trained on, {refused.total():,} were refused: {reasons}"
        fix = "repair the records, or change the settings of source that the reason names"
        raise PrepError(what, where=f"first {first}", fix=fix)

    def _tokenize(self, tokenizer: ChatTokenizer) -> dict[str, Split]:
        """Tokenize the sources and divide the sequences among the splits."""
        source, data, report = self.config.source, self.config.data, self.report
        saved = self.path / layout.TOKENIZER
        job = ShardJob(
            folder=str(self.path / layout.SHARDS),
            tokenizer=replace(self.config.tokenizer, name=str(saved), chat_template=""),
            content=_digest_tokenizer(saved),
            today=self.today.isoformat() if tokenizer.uses_date else "",
            pack_size=data.pack_size,
            over_long=data.over_long,
            on_bad=source.on_bad,
        )
        with self.stages.stage("tokens", "tokenizing", total=self.num_bytes) as stage:
            done = self._do_shards(job, stage)
            for shard, folder, receipt, of in done:
                report.add_shard(of.name or shard.path, receipt)
                for name in (layout.BAD_RECORDS, layout.TO_REPAIR) if receipt.counts.bad else ():
                    with (self.path / name).open("ab") as file:
                        file.write((folder / name).read_bytes())
            self.samples = choose_samples((shard.path, folder) for shard, folder, _, _ in done)
            spool = Spool((folder, receipt.sequences, receipt.tokens) for _, folder, receipt, _ in done)
            shares = {layout.VALIDATION: data.validation_fraction, layout.TEST: data.test_fraction}
            splits, num_duplicates = divide(spool, shares, rest=layout.TRAIN, drop_duplicates=data.drop_duplicates)
            report.dropped += Counter({"duplicate": num_duplicates})
            tokens = sum(split.num_tokens for split in splits.values())
            conversations = sum(split.num_conversations for split in splits.values())
            for name, share in shares.items():
                if 0 < share * conversations < 1 < conversations:
                    got = count_of(splits[name].num_conversations, "conversation")
                    self.stages.show(f"{name}: {got}, more than data.{name}_fraction={share} of {conversations:,}.")
            stage.summary = f"{tokens:,} tokens of {count_of(conversations, 'conversation')}"
            if reused := sum(receipt.was_there for _, _, receipt, _ in done):
                stage.summary += f"; {reused:,} of {len(done):,} shards were already finished"
        if report.bad.total() == report.records:
            self._refuse_source(report.bad, report.examples[f"bad {next(iter(report.bad))}"][0] if report.bad else "")
        assert report.records == conversations + report.bad.total() + report.dropped.total()
        if any(source.epochs != 1 for source in self.sources):
            epochs = np.concatenate([np.full(receipt.sequences, of.epochs) for _, _, receipt, of in done])
            splits[layout.TRAIN] = repeat(splits[layout.TRAIN], epochs, seed=data.seed)
        for name, split in splits.items():
            if not len(split):
                what = f"no conversations remain for {name}: read {count_of(report.records, 'record')}"
                what += f"; left out: {left_out}" if (left_out := report.left_out()) else ""
                fix = "read more conversations, or change data.pack_size, data.over_long and the fractions of the "
                fix += "splits: data.validation_fraction=0 omits this split"
                raise PrepError(what, where=source.name, fix=fix)
            report.add_split(name, split)
        return splits

    def _do_shards(self, job: ShardJob, stage: Stage) -> list[tuple[SourceShard, Path, Receipt, PreparedSource]]:
        """Tokenize the sources; return each shard with its folder, receipt and source. PrepError if a file changes."""
        stamps = list(map(_stamp, self.files))
        text_bytes = sum(
            stamp.num_bytes * (_EXPANSION if is_compressed(file) else 1)
            for source in self.sources
            for file, stamp in zip(source.found.files, source.found.stamps, strict=True)
        )
        shard_bytes = max(self.config.source.shard_bytes, -(-text_bytes // _MAX_SHARDS))
        cut: list[tuple[SourceShard, PreparedSource]] = []

        def shards() -> Iterator[SourceShard]:
            for source in self.sources:
                for shard in source.shards(shard_bytes):
                    cut.append((shard, source))
                    yield shard

        folder = Path(job.folder)
        folder.mkdir(exist_ok=True)
        for entry in folder.iterdir():
            if "." in entry.name and not (entry / PARTIAL).exists():
                shutil.rmtree(entry, ignore_errors=True)
        stage.watch(lambda: bytes_in_progress(folder))
        engine, num_workers, done = self.config.engine, self.config.data.num_workers, []
        made = do_shards(job, shards(), engine=engine, num_workers=num_workers, source_bytes=text_bytes)
        for number, receipt in enumerate(made):
            shard, of = cut[number]
            done.append((shard, job.shard_folder(number), receipt, of))
            stage.advance(shard.num_bytes, is_earlier=receipt.was_there)
        for entry in set(folder.iterdir()) - {of_shard for _, of_shard, _, _ in done}:  # made with other settings
            shutil.rmtree(entry, ignore_errors=True)
        # Also detects a file that changed between cutting and reading a shard.
        for place, before, after in zip(self.files, stamps, map(_stamp, self.files), strict=True):
            if before != after:
                fix = "prepare it when no program writes to it"
                raise PrepError("the file changed while it was read", where=str(place), fix=fix)
        return done

    def _pack(self, name: str, sequences: Split, tokenizer: ChatTokenizer) -> None:
        config, split, path = self.config.data, self.report.splits[name], self.path / name
        planned: dict[str, Any] = {name: getattr(config, name) for name in ("pack_size", "algorithm", "seed")}
        plan = packs = plan_packs(sequences.lengths, **planned)
        provenance = Provenance(
            # Relative to the dataset, so that the folder can be moved.
            tokenizer=f"../{layout.TOKENIZER}",
            tokenizer_hash=tokenizer.tokenizer_hash,
            chat_template_hash=tokenizer.chat_template_hash,
            packer=config.algorithm,
            seed=config.seed,
            settings_hash=self.report.settings_hash,
            counts=self.report.provenance_counts(),
            mask=self.report.mask,
        )
        written, format = path, config.packed_storage
        if format == "virtual":  # sequences in source order, one per pack; the plan is stored separately
            written, numbers = self.path / layout.SEQUENCES / name, np.arange(len(sequences) + 1)
            packs = PackPlan(numbers, numbers[:-1])
            saved = Path(os.path.relpath(path / provenance.tokenizer, written)).as_posix()
            provenance = replace(provenance, packer="", seed=None, tokenizer=saved)
        with self.stages.stage(name, f"writing {name}", total=plan.num_packs) as stage:
            with open_writer(written, format=format, pack_size=config.pack_size, provenance=provenance) as writer:
                for index in range(packs.num_packs):
                    writer.append(sequences.spool.pack(sequences.ids[packs.pack(index)]))
                    if index % 64 == 63:
                        stage.advance(64 * plan.num_packs / packs.num_packs)
                stage.advance(packs.num_packs % 64 * plan.num_packs / packs.num_packs)
            if packs is not plan:
                repack_store(str(written), str(path), **planned)
            with closing(open_dataset(path)) as reader:
                split.fingerprint, manifest = reader.fingerprint, reader.manifest
            assert manifest is not None
            assert (manifest.num_sequences, manifest.num_tokens) == (split.sequences, split.tokens)
            split.describe_packs(sequences.lengths, plan, pack_size=config.pack_size)
            stage.summary = f"{count_of(plan.num_packs, 'pack')} of {config.pack_size:,} tokens, {split.fill:.2%} full"


def repack_store(
    store: str,
    destination: str,
    *,
    pack_size: int,
    algorithm: str = "best_fit_decreasing",
    seed: int = 0,
    overwrite: bool = False,
) -> Manifest:
    """Write a dataset with new packs over the sequences of a store or of another plan; no tokens are copied.

    The store is a dataset in the `virtual` format. The destination, a new or empty folder, refers to it by relative
    path, or by URI if the store is in a bucket and the destination on a disk or in another bucket. For packs, see
    `plan_packs`. Returns the manifest, without a fingerprint: `open_dataset(destination).fingerprint` reads all packs.

    Raises:
        FormatError: the store does not exist, or the destination cannot be written.
        PrepError: a sequence is longer than a pack.
        ConfigError: a setting is invalid, or the destination cannot refer to the store.
    """
    sequences = open_store(store)
    plan = plan_packs(sequences.lengths, pack_size=pack_size, algorithm=algorithm, seed=seed)
    return write_plan(
        destination,
        sequences,
        pack_offsets=plan.pack_offsets,
        sequence_ids=plan.sequence_ids,
        pack_size=pack_size,
        packer=algorithm,
        seed=seed,
        overwrite=overwrite,
    )


def _digest_tokenizer(saved: Path) -> str:
    """Return a digest of a saved tokenizer's files, ignoring entries that only record where it was loaded from."""
    names = sorted(file.name for file in saved.iterdir() if file.is_file())
    digests = {file.path: file.xxh3 for file in digest_files(saved, names)}
    if (name := "tokenizer_config.json") in digests:
        values = json.loads((saved / name).read_bytes())
        of_loading = ("is_local", "local_files_only")
        digests[name] = settings_hash({key: value for key, value in values.items() if key not in of_loading})
    return settings_hash(digests)
