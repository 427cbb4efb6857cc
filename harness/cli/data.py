"""Commands on datasets: inspect, verify, convert, diff, import, repack."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.checks import KEY, CheckedSettings, bounded
from harness.cli.indexed import find_checks
from harness.cli.settings import AsJson, Overwrite, argument, class_of, option, print_json, progress_bar
from harness.errors import ConfigError, FormatError, Problem
from harness.formats import FORMATS, convert_dataset, load_manifest, open_dataset, repair_manifest, verify_dataset
from harness.formats.foreign import (
    BRIDGE,
    CONVENTIONS,
    SWIFT,
    BridgeExport,
    BridgeFiles,
    SwiftExport,
    export_to_bridge,
    export_to_swift,
    import_dataset,
)
from harness.formats.inspect import find_datasets
from harness.formats.verify import describe_checks, diff_datasets
from harness.indexed.index import verify_indexed
from harness.prep import TokenizerConfig
from harness.prep.packing import PackingConfig
from harness.prep.sources.config import SourceConfig
from harness.printing import count_of, open_console, print_line, print_text
from harness.storage import is_uri, open_folder

data_app = typer.Typer()
Verified = Annotated[str, argument("PATH", "dataset folder, file, glob, prefix or URI; a run, checkpoint or export")]
DatasetPath = Annotated[str, argument("PATH", "dataset folder, file, glob, prefix or URI")]
Source = Annotated[str, argument("SRC", "dataset folder, file, glob, prefix or URI")]
Destination = Annotated[str, argument("DST", "folder to write, or a .parquet or .npy file")]
Format = Annotated[str, argument("FORMAT", f"one of {', '.join(FORMATS)}")]


@dataclass
class StoredPacks(CheckedSettings, section="data"):
    """Settings of the packs that are written.

    Attributes:
        pack_size: pack size of the result, if the source does not specify one.
        packs_per_shard: number of packs per shard; null uses the default of the format.
    """

    pack_size: int | None = bounded(None, lowest=2)
    packs_per_shard: int | None = bounded(None, lowest=1)


@dataclass
class ConvertSettings:
    """Settings of `harness convert`; those of `bridge` belong to the format megatron_bridge alone."""

    data: StoredPacks = field(default_factory=StoredPacks)
    bridge: BridgeFiles = field(default_factory=BridgeFiles)


@dataclass
class ImportSettings:
    """Settings of `harness import`.

    Attributes:
        split: split to import, if the source has several.
    """

    split: str = "train"
    data: StoredPacks = field(default_factory=StoredPacks)


@dataclass
class PlannedPacks(CheckedSettings):
    """Settings that turn sequences into packs.

    Attributes:
        pack_size: maximum number of tokens in a pack.
        algorithm: as in `harness prepare`.
        seed: seed of the order of packs, and of the choice between sequences of equal length.
    """

    pack_size: int = bounded(lowest=2, key="data.pack_size")
    algorithm: str = field(default="best_fit_decreasing", metadata={KEY: "data.algorithm"})
    seed: int = bounded(0, highest=2**63 - 1, key="data.seed")


@dataclass
class InspectSettings(CheckedSettings):
    """Settings of `harness inspect`: the tokenizer of a dataset, if it names none; with --raw, those of a preparation.

    Attributes:
        preview: number of raw records to show.
    """

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    source: SourceConfig = field(default_factory=SourceConfig)
    data: PackingConfig = field(default_factory=PackingConfig)
    preview: int = bounded(3, lowest=1, highest=1_000_000)


@data_app.command(cls=class_of(InspectSettings))
def inspect(
    context: typer.Context,
    path: DatasetPath,
    pack: Annotated[int | None, typer.Option(min=0, help="print a pack's text, with trained tokens in color")] = None,
    raw: Annotated[bool, option("--raw", "PATH contains chats: show their trained tokens")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a dataset's counts, the text of one pack, or chats with --raw."""
    from harness.formats.inspect import find_pack, find_tokenizer, inspect_dataset, render_pack, render_summary

    settings: InspectSettings = context.obj
    if raw:
        if as_json or pack is not None:
            raise ConfigError("chats have no packs, and are shown as text", where=path, fix="omit --json and --pack")
        from harness.prep import PrepareConfig, show_preview

        show_preview(PrepareConfig(**{**vars(settings), "source": replace(settings.source, kind="files", path=path)}))
        return
    if settings != InspectSettings(TokenizerConfig(name=settings.tokenizer.name)):
        what = "of these settings, only tokenizer.name applies to a dataset"
        raise ConfigError(what, where=path, fix="add --raw to show chats as `harness prepare` would train them")
    console = open_console()
    if pack is not None:
        reader = open_dataset(find_datasets(path)[0])
        if as_json:
            fields = ("input_ids", "loss_mask", "seq_start_id")
            shown = find_pack(reader, pack)
            print_json({"pack": pack, **{name: getattr(shown, name).tolist() for name in fields}})
            return
        console.print(render_pack(reader, pack, find_tokenizer(reader, settings.tokenizer.name)))
        return
    summaries = [inspect_dataset(dataset) for dataset in find_datasets(path)]
    if as_json:
        print_json(summaries)
        return
    for summary in summaries:
        console.print(render_summary(summary))


@data_app.command()
def verify(
    path: Verified,
    repair: Annotated[
        bool, option("--repair-manifest", "rebuild a lost or damaged manifest and index from intact shards")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check every byte and every invariant of a dataset or a run; exit code 1 if there is a fault.

    For a dataset without a complete manifest, all faults are listed. --repair-manifest restores the manifest if every
    shard exists and matches its checksums, and prints what is lost. PATH may also be one of Megatron's indexed datasets
    (X.idx, the NAME.json of a family, or a folder of these), a run's folder (its settings, metrics, checkpoints and
    exports are checked), one checkpoint, or one exported model.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    checks = [] if is_uri(path) else _own_checks(path, notes)
    if repair and checks:
        raise ConfigError("only datasets have a manifest", where=path, fix="omit --repair-manifest")
    for one, check in checks:
        with progress_bar(f"verifying {one}", quiet=as_json) as advance:
            problems += check(one, progress=advance)
    num_packs = 0
    for dataset in () if checks else find_datasets(path):
        if repair and (failed := _repair(dataset, notes, quiet=as_json)):
            problems += failed
            continue
        with progress_bar(f"verifying {dataset}", quiet=as_json) as advance:
            problems += verify_dataset(dataset, progress=advance)
        if not problems:
            with closing(open_dataset(dataset)) as reader:
                num_packs += len(reader)
                notes += [f"{dataset}: {note}" for note in describe_checks(reader.manifest)]
    if as_json:
        print_json({"path": path, "problems": [asdict(problem) for problem in problems], "notes": notes})
    else:
        for note in notes:
            print_line(f"note: {note}")
        for problem in problems:
            print_text(problem)
        counted = "" if checks else f"{count_of(num_packs, 'pack')}, "
        print_line(f"{count_of(len(problems), 'problem')} in {path}" if problems else f"{path}: {counted}nothing wrong")
    raise typer.Exit(1 if problems else 0)


def _own_checks(path: str, notes: list[str]) -> list[tuple[str, Callable[..., list[Problem]]]]:
    """Return the checks of a run or of indexed datasets; none for what is verified as a packed dataset."""
    from harness.train.verify import find_run_check

    run_check = find_run_check(path)
    checks = [(path, run_check)] if run_check is not None else find_checks(path)
    if any(check is verify_indexed for _, check in checks):
        notes.append(
            "a pair contains no checksums, so a changed token or a moved document bound is not detected; `harness "
            "indexed family` writes a record with hashes, which `harness verify NAME.json` compares"
        )
    if not checks and not Path(path).exists():
        # A path that names nothing is not a damaged dataset; a prefix or a pattern opens.
        open_dataset(path).close()
    return checks


def _repair(path: str, notes: list[str], *, quiet: bool) -> list[Problem]:
    """Restore a lost or damaged manifest; return the problems that prevent it. Whole manifests are left alone."""
    try:
        if load_manifest(open_folder(path)) is not None:
            notes.append(f"{path}: the manifest is intact; there is nothing to repair")
            return []
    except FormatError:
        pass  # Damaged.
    with progress_bar(f"reading {path}", quiet=quiet) as advance:
        manifest, problems, lost = repair_manifest(path, progress=advance)
    if manifest is not None:
        found = f"{count_of(manifest.num_packs, 'pack')}, fingerprint {manifest.fingerprint}"
        notes.append(f"{path}: manifest and index rebuilt from {count_of(len(manifest.shards), 'shard')}: {found}")
        notes.extend(f"{path}: {one}" for one in lost)
    return problems


@data_app.command(cls=class_of(ConvertSettings))
def convert(
    context: typer.Context,
    source: Source,
    destination: Destination,
    format: Annotated[
        str,
        argument("FORMAT", f"one of {', '.join(FORMATS)}, or {BRIDGE} or {SWIFT} for the readers of these trainers"),
    ],
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a dataset in another format and compare both. To continue after an interruption, run the command again.

    Memory does not grow with the dataset, except for npy, whose pickled files are loaded completely.
    """
    settings: ConvertSettings = context.obj
    if format != BRIDGE and settings.bridge != BridgeFiles():
        what = f"the settings of bridge do not apply to the format {format}"
        raise ConfigError(what, where="bridge", fix=f"convert to {BRIDGE}")
    options: dict[str, Any] = {**vars(settings.data), "overwrite": overwrite}
    if format in (BRIDGE, SWIFT) and options.pop("packs_per_shard") is not None:
        what = f"the format {format} is one file, without shards"
        raise ConfigError(what, where="data.packs_per_shard", fix="leave it out")
    with progress_bar("", quiet=as_json) as advance:
        options["progress"] = lambda stage, done, total: advance(done, total, stage)
        written: Any
        if format == BRIDGE:
            written = export_to_bridge(source, destination, files=settings.bridge, **options)
        elif format == SWIFT:
            written = export_to_swift(source, destination, **options)
        else:
            written = convert_dataset(source, destination, format=format, **options)
    if format in (BRIDGE, SWIFT):
        _print_export(written, as_json=as_json)
    else:
        _print_written(destination, written, {}, as_json=as_json)


def _print_export(written: BridgeExport | SwiftExport, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(written))
    elif isinstance(written, SwiftExport):
        print_line(f"{written.path}: {written.num_sequences:,} sequences in {written.num_packs:,} packs")
        print_text(f"arguments of swift sft or megatron sft:\n  {written.arguments}")
    else:
        _print_written(written.path, written.manifest, {}, as_json=False)
        if written.num_untrained:
            trained = written.manifest.num_trained_tokens
            print_line(
                f"  Megatron-Bridge does not train {written.num_untrained:,} of {trained:,} trained labels: those "
                f"after token {written.end_token}, which ends a sequence; harness.integrations.megatron_bridge trains "
                "all"
            )
        print_text(f"in a recipe of Megatron-Bridge:\n  cfg.dataset = {written.settings}")


@data_app.command(name="import", cls=class_of(ImportSettings))
def import_(
    context: typer.Context,
    source: Annotated[str, argument("SRC", "output of the other tool")],
    destination: Destination,
    convention: Annotated[str, argument("CONVENTION", f"one of {', '.join(CONVENTIONS)}")],
    format: Format = "parquet",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Import packed data of Megatron-Bridge, Nemotron, ms-swift or Megatron-LM; changes are counted and printed."""
    settings: ImportSettings = context.obj
    with progress_bar(f"importing {source}", quiet=as_json) as advance:
        options: dict[str, Any] = {"convention": convention, "format": format, "split": settings.split}
        options |= {**vars(settings.data), "overwrite": overwrite}
        manifest = import_dataset(source, destination, **options, progress=advance)
    _print_written(destination, manifest, dict(manifest.provenance.counts), as_json=as_json)


@data_app.command(cls=class_of(PlannedPacks))
def repack(
    context: typer.Context,
    store: Annotated[str, argument("STORE", "a dataset in the format virtual, or a plan over one")],
    destination: Annotated[str, argument("DST", "folder to write")],
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Plan new packs over stored sequences, in seconds and without copying tokens."""
    from harness.prep.pipeline import repack_store

    manifest = repack_store(store, destination, **vars(context.obj), overwrite=overwrite)
    _print_written(destination, manifest, {}, as_json=as_json)


@data_app.command()
def diff(
    a: Annotated[str, argument("A", "a dataset")],
    b: Annotated[str, argument("B", "another dataset")],
    as_json: AsJson = False,
) -> None:
    """Compare two datasets pack by pack and print the first difference; exit code 1 if there is one."""
    difference = diff_datasets(a, b)
    if as_json:
        print_json({"a": a, "b": b, "difference": None if difference is None else asdict(difference)})
    else:
        print_line(f"{a} and {b} contain the same packs" if difference is None else f"first difference: {difference}")
    raise typer.Exit(0 if difference is None else 1)


def _print_written(destination: str, manifest: Any, changes: dict[str, int], *, as_json: bool) -> None:
    if as_json:
        print_json({"path": destination, "manifest": asdict(manifest), "changes": changes})
        return
    print_line(
        f"{destination}: {count_of(manifest.num_packs, 'pack')}, {count_of(manifest.num_sequences, 'sequence')}, "
        f"{count_of(manifest.num_tokens, 'token')} as {manifest.format}"
        + (f", fingerprint {manifest.fingerprint}" if manifest.fingerprint else "")
    )
    for name, count in changes.items():
        print_line(f"  {name.replace('_', ' ')}: {count:,}")
