"""`harness bench`: what this machine does, as tables and JSON. Everything heavy is imported by the bench that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from harness.bench.output import Bench, Outcome, Output, Say
from harness.errors import HarnessError

bench_app = typer.Typer(
    name="bench",
    help="Measure this machine: ratios within one run, as tables and as JSON.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

T = TypeVar("T")

Quick = Annotated[bool, typer.Option("--quick", help="small sizes, a few seconds: shows that it works, not how fast")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs instead of tables")]
Save = Annotated[Path | None, typer.Option("--save", metavar="FILE", help="write the JSON to this file too")]
Check = Annotated[bool, typer.Option("--check", help="exit code 1 where a target is missed")]
Folder = Annotated[Path | None, typer.Option("--dir", help="where the data is made (default: the temporary folder)")]
Keep = Annotated[bool, typer.Option("--keep", help="leave the data in --dir and use what is there")]
Rounds = Annotated[int | None, typer.Option(min=1, help="turns of each side; figures are medians over them")]
Packs = Annotated[int | None, typer.Option(min=1, help="packs of the dataset that is read")]
PackSize = Annotated[int | None, typer.Option(min=2, help="tokens of a pack")]


def _with(settings: T, given: Mapping[str, Any]) -> T:
    """Settings with those of the given values that are not None."""
    return replace(settings, **{name: value for name, value in given.items() if value is not None})  # type: ignore[type-var]


def _formats(given: Mapping[str, Any], *, quick: bool, folder: Path | None, keep: bool) -> Bench:
    def bench(say: Say) -> Outcome:
        from harness.bench.formats import QUICK, bench_formats
        from harness.bench.formats_settings import FormatsSettings
        from harness.bench.workspace import Workspace

        settings = _with(QUICK if quick else FormatsSettings(), given)
        with Workspace(folder, keep=keep) as workspace:
            return bench_formats(settings, workspace, say), None

    return bench


def _loader(given: Mapping[str, Any], *, quick: bool, folder: Path | None, keep: bool) -> Bench:
    def bench(say: Say) -> Outcome:
        from harness.bench.loading import QUICK, LoaderSettings, bench_loader
        from harness.bench.workspace import Workspace

        settings = _with(QUICK if quick else LoaderSettings(), given)
        with Workspace(folder, keep=keep) as workspace:
            return bench_loader(settings, workspace, say), None

    return bench


def _pack(given: Mapping[str, Any], *, quick: bool) -> Bench:
    def bench(say: Say) -> Outcome:
        from harness.bench.packing import QUICK, PackSettings, bench_packing

        return bench_packing(_with(QUICK if quick else PackSettings(), given), say), None

    return bench


def _schedule(given: Mapping[str, Any], *, quick: bool, picture: Path | None = None) -> Bench:
    def bench(say: Say) -> Outcome:
        from harness.bench.drawing import render_bars, save_picture
        from harness.bench.scheduling import QUICK, ScheduleSettings, bench_schedule

        report, drawing = bench_schedule(_with(QUICK if quick else ScheduleSettings(), given), say)
        if picture is not None:
            save_picture(drawing, picture)
        return report, render_bars(drawing)

    return bench


def _tokens(given: Mapping[str, Any], *, quick: bool, folder: Path | None) -> Bench:
    def bench(say: Say) -> Outcome:
        from harness.bench.tokens import QUICK, TokensSettings, bench_tokens
        from harness.bench.workspace import Workspace

        with Workspace(folder) as workspace:
            return bench_tokens(_with(QUICK if quick else TokensSettings(), given), workspace, say), None

    return bench


def _prepare(given: Mapping[str, Any], *, quick: bool, folder: Path | None) -> Bench:
    def bench(say: Say) -> Outcome:
        from harness.bench.preparing import QUICK, PrepareSettings, bench_preparing
        from harness.bench.workspace import Workspace

        with Workspace(folder) as workspace:
            return bench_preparing(_with(QUICK if quick else PrepareSettings(), given), workspace, say), None

    return bench


def _repack(given: Mapping[str, Any], *, quick: bool, folder: Path | None, keep: bool) -> Bench:
    def bench(say: Say) -> Outcome:
        from harness.bench.repacking import QUICK, RepackSettings, bench_repacking
        from harness.bench.workspace import Workspace

        with Workspace(folder, keep=keep) as workspace:
            return bench_repacking(_with(QUICK if quick else RepackSettings(), given), workspace, say), None

    return bench


@bench_app.command(name="all")
def bench_all(
    page: Annotated[Path, typer.Option("--page", metavar="FILE", help="the page to write")] = Path("BENCHMARKS.md"),
    quick: Quick = False,
    as_json: AsJson = False,
    save: Save = None,
    check: Check = False,
    folder: Folder = None,
    keep: Keep = False,
) -> None:
    """All benches, each in a process of its own, and BENCHMARKS.md from them. Takes about half an hour."""
    from harness.bench.everything import bench_everything
    from harness.bench.workspace import Workspace

    failed: list[str] = []
    with Workspace(folder, keep=keep) as workspace:
        Output(as_json, save, check, page).show(bench_everything(workspace.folder, quick=quick, failed=failed))
    if failed:
        raise HarnessError(
            f"{len(failed)} benches could not be measured: {', '.join(failed)}",
            where=str(page),
            fix="the page has what each of them said",
        )


@bench_app.command(name="formats")
def bench_formats_command(
    part: Annotated[
        list[str] | None, typer.Option(help="random, order, peer, checks, open, write, legacy; default: all of them")
    ] = None,
    packs: Packs = None,
    pack_size: PackSize = None,
    rounds: Rounds = None,
    open_packs: Annotated[int | None, typer.Option(min=1, help="packs of the dataset that is opened")] = None,
    write_packs: Annotated[int | None, typer.Option(min=1, help="packs that are written")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    save: Save = None,
    check: Check = False,
    folder: Folder = None,
    keep: Keep = False,
) -> None:
    """Reading, opening and writing of each format, against plain numpy arrays and a row-group reader."""
    given = {
        "parts": tuple(part) if part else None,
        "packs": packs,
        "pack_size": pack_size,
        "rounds": rounds,
        "open_packs": open_packs,
        "write_packs": write_packs,
    }
    Output(as_json, save, check).show([_formats(given, quick=quick, folder=folder, keep=keep)])


@bench_app.command(name="pack")
def bench_pack_command(
    sequences: Annotated[int | None, typer.Option(min=1, help="lengths to pack")] = None,
    pack_size: Annotated[list[int] | None, typer.Option(min=2, help="tokens of a pack; may be given again")] = None,
    compared: Annotated[int | None, typer.Option(min=1, help="lengths that the slower packers get")] = None,
    rounds: Rounds = None,
    quick: Quick = False,
    as_json: AsJson = False,
    save: Save = None,
    check: Check = False,
) -> None:
    """Planning packs of 13 million sequences, against a plain best-fit decreasing and, where installed, trl."""
    given = {
        "sequences": sequences,
        "pack_sizes": tuple(pack_size) if pack_size else None,
        "compared": compared,
        "rounds": rounds,
    }
    Output(as_json, save, check).show([_pack(given, quick=quick)])


@bench_app.command(name="tokens")
def bench_tokens_command(
    tokens: Annotated[int | None, typer.Option(min=1000, help="of the shards, about")] = None,
    median: Annotated[list[float] | None, typer.Option(min=2, help="of document lengths; may be given again")] = None,
    rounds: Rounds = None,
    quick: Quick = False,
    as_json: AsJson = False,
    save: Save = None,
    check: Check = False,
    folder: Folder = None,
) -> None:
    """Token shards to Megatron's .bin and .idx, against Megatron-Core's own builder."""
    given = {"tokens": tokens, "medians": tuple(median) if median else None, "rounds": rounds}
    Output(as_json, save, check).show([_tokens(given, quick=quick, folder=folder)])


@bench_app.command(name="prepare")
def bench_prepare_command(
    conversations: Annotated[int | None, typer.Option(min=10, help="that are tokenised")] = None,
    memory_conversations: Annotated[int | None, typer.Option(min=10, help="prepared once, 4 and 16 times")] = None,
    rounds: Rounds = None,
    quick: Quick = False,
    as_json: AsJson = False,
    save: Save = None,
    check: Check = False,
    folder: Folder = None,
) -> None:
    """Tokenising, against the tokenizers library alone; and memory as the input grows."""
    given = {"conversations": conversations, "memory_conversations": memory_conversations, "rounds": rounds}
    Output(as_json, save, check).show([_prepare(given, quick=quick, folder=folder)])


@bench_app.command(name="repack")
def bench_repack_command(
    packs: Packs = None,
    pack_size: Annotated[list[int] | None, typer.Option(min=2, help="to plan for; may be given again")] = None,
    rounds: Rounds = None,
    quick: Quick = False,
    as_json: AsJson = False,
    save: Save = None,
    check: Check = False,
    folder: Folder = None,
    keep: Keep = False,
) -> None:
    """Planning packs again over 13 million stored sequences, and reading through a plan."""
    given = {"packs": packs, "pack_sizes": tuple(pack_size) if pack_size else None, "rounds": rounds}
    Output(as_json, save, check).show([_repack(given, quick=quick, folder=folder, keep=keep)])


@bench_app.command(name="loader")
def bench_loader_command(
    formats: Annotated[list[str] | None, typer.Option("--format", help="may be given again; default: all")] = None,
    workers: Annotated[list[int] | None, typer.Option(min=0, help="worker processes; may be given again")] = None,
    packs: Packs = None,
    pack_size: PackSize = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="packs of a global batch")] = None,
    max_tokens_per_rank: Annotated[int | None, typer.Option(min=1, help="tokens of a row")] = None,
    scheduler: Annotated[str | None, typer.Option(help="as schedule.name in a recipe")] = None,
    first_batch_packs: Annotated[
        int | None, typer.Option(min=0, help="packs of the dataset whose first batch is waited for; 0: not measured")
    ] = None,
    rounds: Rounds = None,
    quick: Quick = False,
    as_json: AsJson = False,
    save: Save = None,
    check: Check = False,
    folder: Folder = None,
    keep: Keep = False,
) -> None:
    """Finished THD batches a second from each format, where the time goes, and the wait for the first batch."""
    given = {
        "formats": tuple(formats) if formats else None,
        "workers": tuple(workers) if workers else None,
        "packs": packs,
        "pack_size": pack_size,
        "global_batch": global_batch,
        "max_tokens_per_rank": max_tokens_per_rank,
        "scheduler": scheduler,
        "first_batch_packs": first_batch_packs,
        "rounds": rounds,
    }
    Output(as_json, save, check).show([_loader(given, quick=quick, folder=folder, keep=keep)])


@bench_app.command(name="schedule")
def bench_schedule_command(
    path: Annotated[
        str | None, typer.Argument(metavar="[PATH]", help="a dataset; without one, simulated lognormal lengths")
    ] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="data-parallel ranks")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="context-parallel ranks that share a row")] = None,
    max_tokens_per_rank: Annotated[int | None, typer.Option(min=1, help="tokens of a rank in a microbatch")] = None,
    group: Annotated[int | None, typer.Option(min=1, help="microbatches come in multiples of this")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="packs of a dataset's batch, sequences of a simulated one")
    ] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="global batches")] = None,
    median: Annotated[float | None, typer.Option(min=2, help="of simulated lengths")] = None,
    sigma: Annotated[float | None, typer.Option(min=0, help="of the logarithm of simulated lengths")] = None,
    attention_at: Annotated[
        int | None, typer.Option(min=1, help="length at which attention costs as much as the rest of a sequence")
    ] = None,
    scheduler: Annotated[list[str] | None, typer.Option(help="may be given again; default: all of them")] = None,
    seed: Annotated[int | None, typer.Option(help="of simulated lengths, or of the dataset's order")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="draw it as a picture too")] = None,
    rounds: Rounds = None,
    quick: Quick = False,
    as_json: AsJson = False,
    save: Save = None,
    check: Check = False,
) -> None:
    """How evenly schedulers place a dataset on the ranks of a layout, without training."""
    given = {
        "path": path,
        "dp_size": dp,
        "cp_size": cp,
        "max_tokens_per_rank": max_tokens_per_rank,
        "group_size": group,
        "global_batch": global_batch,
        "batches": batches,
        "median": median,
        "sigma": sigma,
        "attention_at": attention_at,
        "schedulers": tuple(scheduler) if scheduler else None,
        "seed": seed,
        "rounds": rounds,
    }
    Output(as_json, save, check).show([_schedule(given, quick=quick, picture=png)])
