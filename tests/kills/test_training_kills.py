"""A run or an export that SIGKILL ends at any call is finished by the same command: same losses, same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from counted_calls import KILLED, Commands, environments_of, points_of
from live_streams import some_chats, write_stream
from small_packs import TINY

from harness.formats import Provenance, open_writer
from harness.prep.tokenize.bpe import train_bpe
from harness.records import Pack
from harness.train.verify import find_run_check

from .cases import HELD, contents

SETTINGS = (
    *TINY,
    *("loader.global_batch_size=4", "loader.num_workers=0", "schedule=as_packed", "schedule.max_tokens_per_rank=256"),
    *("optimizer.decay_steps=100", "trainer.device=cpu", "trainer.trackers=[]", "trainer.checkpoint_interval=2"),
)
# Of each command, and the tests that they are spread over: two minutes each.
KILLS, PARTS = 50, 5
RESUMED = "finished by the same command after each kill, with the same losses or bytes"
in_parts = pytest.mark.parametrize("part", range(PARTS))
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("commands"), "training") as server:
        yield server


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    provenance = Provenance(tokenizer="none", tokenizer_hash="0" * 16, counts={"vocab_size": 300})
    with open_writer(folder / "train", format="memmap", pack_size=64, provenance=provenance) as writer:
        for number in range(24):
            length = 20 + number
            writer.append(Pack([(number + n) % 290 for n in range(length)], [1] * (length - 1) + [0], [0]))
    train_bpe(["question alpha beta gamma delta 0123456789 "] * 20, folder / "tokenizer", vocab_size=300)
    write_stream(folder / "live", some_chats(48), [6] * 8)
    return folder


def trained(run: Path) -> list[tuple[Any, ...]]:
    """Return step, loss and gradient norm of each step of a run, bit by bit."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


@in_parts
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_on_live_chunks_trains_each_row_once(commands, data, tmp_path, ranks, part, report_points) -> None:
    out = tmp_path / "out"
    run, live = out / "run", out / "live"
    command = [
        *(
            *("harness.recipes.sft", "data=live", f"data.live.path={live}", "data.live.pack_size=128"),
            "data.live.timeout_s=60",
        ),
        *(f"data.live.tokenizer.name={data / 'tokenizer'}", "data.live.open_packs=3"),
        *(f"run_dir={run}", "resume=auto", *SETTINGS),
    ]

    def begin() -> None:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(data / "live", live)

    def attempt(**options: Any) -> Any:
        return commands.run(*[command] * ranks, root=out, environments=environments_of(ranks), **options)

    begin()
    whole = attempt()
    assert whole.codes == [0] * ranks, whole.output
    expected, marks = trained(run), sorted(path.name for path in live.glob("*.completed"))
    assert (len(expected) >= 5, len(marks)) == (True, 8)
    points = points_of(whole.count, KILLS, seed=f"live consume {ranks}")[part::PARTS]
    for point in points:
        begin()
        # Half of the times the whole node dies, half of the times one process, which the others must notice.
        killed = attempt(at=point, everyone=point % 2 == 0, grace_s=20)
        assert killed.died_in, f"call {point} of {whole.count} was not reached: {killed.output}"
        again = attempt()
        where = f"killed in call {point} of {whole.count}, {killed.died_in}"
        assert again.codes == [0] * ranks, f"{where}: {again.output}"
        assert trained(run) == expected, where
        assert sorted(path.name for path in live.glob("*.completed")) == marks, where
    report_points(
        "kills", f"live consume on {ranks}, part {part + 1}", len(points), of=f"of {whole.count} calls", outcome=RESUMED
    )


@in_parts
def test_a_run_killed_while_it_loads_a_checkpoint_resumes_with_the_same_losses(
    commands: Commands, data: Path, tmp_path: Path, part: int, report_points: Callable[..., None]
) -> None:
    out = tmp_path / "run"
    command = ["harness.recipes.sft", f"data.path={data / 'train'}", f"run_dir={out}", *SETTINGS]
    assert commands.run([*command, "trainer.steps=2"], root=out).code == 0
    shutil.copytree(out, tmp_path / "kept")

    def begin() -> None:
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "kept", out)

    resume = [*command, "trainer.steps=4", "resume=true"]
    loading = out / "checkpoints" / "step-00000002"
    whole = commands.run(resume, root=loading, reads=True)
    assert whole.code == 0, whole.output
    expected = trained(out)
    assert [step for step, *_ in expected] == [1, 2, 3, 4]
    points = points_of(whole.count, KILLS, seed="resume")[part::PARTS]
    for point in points:
        begin()
        killed = commands.run(resume, root=loading, reads=True, at=point)
        where = f"killed in call {point} of {whole.count}, {killed.died_in}"
        assert killed.code == KILLED, f"{where}: {killed.output}"
        again = commands.run(resume, root=out)
        assert again.code == 0, f"{where}: {again.output}"
        assert trained(out) == expected, where
    report_points(
        "kills", f"resume while loading, part {part + 1}", len(points), of=f"of {whole.count} calls", outcome=RESUMED
    )


@in_parts
def test_a_run_killed_at_any_write_resumes_with_the_same_losses(commands, data, tmp_path, part, report_points) -> None:
    out = tmp_path / "run"
    command = [
        *("harness.recipes.sft", f"data.path={data / 'train'}", f"run_dir={out}"),
        *SETTINGS,
        *("trainer.steps=6", "resume=auto"),
    ]
    whole = commands.run(command, root=out)
    assert whole.code == 0, whole.output
    expected = trained(out)
    points = points_of(whole.count, KILLS, seed="sft")[part::PARTS]
    for point in points:
        shutil.rmtree(out)
        killed = commands.run(command, root=out, at=point)
        where = f"killed in call {point} of {whole.count}, {killed.died_in}"
        assert killed.died_in, f"{where}: {killed.output}"
        again = commands.run(command, root=out)
        assert again.code == 0, f"{where}: {again.output}"
        assert trained(out) == expected, where
    report_points("kills", f"sft, part {part + 1}", len(points), of=f"of {whole.count} calls", outcome=RESUMED)


@in_parts
def test_a_killed_export_is_written_again(commands, data, tmp_path, part, report_points) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    trains = ["harness.recipes.sft", f"data.path={data / 'train'}", f"run_dir={run}", *SETTINGS, "trainer.steps=2"]
    assert commands.run(trains, root=run).code == 0
    export = ["harness", "export", run, out / "model"]
    out.mkdir()
    whole = commands.run(export, root=out)
    assert whole.code == 0, whole.output
    expected = contents(out)
    assert expected
    points = points_of(whole.count, KILLS, seed="export")[part::PARTS]
    for point in points:
        shutil.rmtree(out)
        out.mkdir()
        killed = commands.run(export, root=out, at=point)
        where = f"killed in call {point} of {whole.count}, {killed.died_in}"
        assert killed.code == KILLED, f"{where}: {killed.output}"
        again = commands.run(export, root=out)
        assert again.code == 0, f"{where}: {again.output}"
        assert contents(out) == expected, where
    report_points("kills", f"export, part {part + 1}", len(points), of=f"of {whole.count} calls", outcome=RESUMED)


def test_a_second_run_or_export_in_a_folder_is_refused_and_the_first_finishes(commands, data, tmp_path) -> None:
    run, live, out = tmp_path / "run", tmp_path / "live", tmp_path / "out"
    # Without checkpoints before the last step it is the run itself that stops, and not one of their writers.
    late = ("trainer.steps=4", "trainer.checkpoint_interval=0")
    stored = ["harness.recipes.sft", f"data.path={data / 'train'}", *SETTINGS, *late]
    assert commands.run([*stored, f"run_dir={tmp_path / 'alone'}"], root=run).code == 0
    train = [*stored, f"run_dir={run}", "resume=auto"]
    both = commands.run(train, train, root=run, at=8, stops=True)
    assert both.codes == [0, 2], both.output
    assert HELD.search(both.output), both.output
    assert "another run is still writing to this folder" in both.output
    assert trained(run) == trained(tmp_path / "alone")

    export = ["harness", "export", run, out / "model"]
    both = commands.run(export, export, root=out, at=8, stops=True)
    assert both.codes == [0, 2], both.output
    assert HELD.search(both.output), both.output
    check = find_run_check(str(out / "model"))
    assert check(str(out / "model")) == []

    shutil.copytree(data / "live", live)
    settings = ("data=live", f"data.live.path={live}", "data.live.pack_size=128", *SETTINGS, *late)
    runs = [
        [
            "harness.recipes.sft",
            *settings,
            f"data.live.tokenizer.name={data / 'tokenizer'}",
            f"run_dir={tmp_path / name}",
        ]
        for name in ("first", "second")
    ]
    both = commands.run(*runs, root=tmp_path / "first", at=8, stops=True)
    assert both.codes == [0, 2], both.output
    assert "another run trains on these chunks" in both.output
    assert HELD.search(both.output), both.output
