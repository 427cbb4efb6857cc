"""Text of other people's files on the terminal and the pages of real commands."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import parity_reports
import pytest
from small_packs import write_small_packs

from harness.formats import load_manifest
from harness.formats.manifest import MANIFEST_NAME
from harness.megatron.export.card import model_card
from harness.megatron.export.data import SpecialTokens, TrainedData
from harness.parity.pages import publish
from harness.plan import ModelConfig, OptimizerConfig, SftConfig
from harness.printing import open_console, printable
from harness.settings import to_plain
from harness.storage import open_folder

HOSTILE = "x\x1b]0;title\x07\x1b[2J\x9b1m [red]y[/red] `z` |\u202e\n  fix:   run it"
NAME = HOSTILE.replace("\n", " ").replace("/", "_")  # of a file
Command = Callable[..., tuple[int, str, str]]


def check(*printed: str) -> None:
    """Fail where a text controls a terminal, begins a line of ours, or lost its markup."""
    for text in printed:
        assert text == printable(text)
        assert not re.search(r"^ {0,8}fix: +run it", text, re.MULTILINE), text
    assert "title" in "".join(printed)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_small_packs(tmp_path) / "validation"


def change_manifest(dataset: Path, **changes: object) -> None:
    manifest = load_manifest(open_folder(str(dataset)))
    (dataset / MANIFEST_NAME).write_text(replace(manifest, **changes, checksum="").to_json())


def test_inspect_prints_a_manifest_and_a_folder_as_plain_lines(harness: Command, dataset: Path) -> None:
    manifest = load_manifest(open_folder(str(dataset)))
    origin = {"tokenizer": HOSTILE, "packer": HOSTILE, "counts": {HOSTILE: 1}, "mask": {"rule": HOSTILE}}
    change_manifest(dataset, provenance=replace(manifest.provenance, **origin))
    moved = shutil.move(dataset, dataset.with_name(NAME))
    code, printed, errors = harness("inspect", moved)
    assert (code, errors) == (0, "")
    check(printed)
    assert printed.count("[red]y[") == 5
    code, printed, errors = harness("inspect", moved, "--pack", "0")
    assert code == 2  # there is no such tokenizer
    check(errors)
    assert json.loads(harness("inspect", moved, "--json")[1])[0]["provenance"]["packer"] == HOSTILE


@pytest.mark.parametrize("is_there", [True, False])
def test_verify_names_a_file_on_one_line(harness: Command, dataset: Path, is_there: bool) -> None:
    manifest = load_manifest(open_folder(str(dataset)))
    shard = manifest.shards[0]
    if is_there:
        damaged = (dataset / shard.path).read_bytes()
        (dataset / NAME).write_bytes(damaged.replace(b"PAR1", b"PAR2"))
    name = NAME if is_there else HOSTILE
    change_manifest(dataset, shards=(replace(shard, path=name, files=(replace(shard.files[0], path=name),)),))
    code, printed, errors = harness("verify", dataset)
    assert code in (1, 2)
    check(printed, errors)
    check(*harness("verify", dataset.with_name(NAME))[1:])


def test_prepare_prints_and_reports_names_of_files_and_fields_as_code(harness: Command, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 50}]
    records = [{"messages": turns, HOSTILE: 1}] * 8 + [{"messages": [{"role": HOSTILE, "content": "a"}]}]
    source = tmp_path / NAME
    source.mkdir()
    (source / f"{NAME}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    settings = ["data.num_workers=0", "data.pack_size=256", "data.validation_fraction=0", "tokenizer.vocab_size=300"]
    command = ["prepare", f"source.path='{source}'", f"data.path={tmp_path / 'out'}", *settings]
    code, printed, errors = harness(*command)
    assert (code, "setting" in errors) == (2, False)
    check(errors)
    code, printed, errors = harness(*command, "source.on_bad=skip")
    assert code == 0, errors
    page, samples = ((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html"))
    check(printed, page)
    assert samples == printable(samples)
    (line,) = (line for line in page.splitlines() if line.startswith("| unused fields |"))
    assert line.count("`") == 2
    check(*harness("inspect", source, "--raw", "tokenizer.vocab_size=300")[1:])


def test_a_parity_report_of_others_is_rendered_as_text(tmp_path: Path) -> None:
    same = parity_reports.all_same()
    cells = [same.cells[0], replace(same.cells[1], name=HOSTILE, status="failed", reason=HOSTILE, command=HOSTILE)]
    hostile = replace(same, title=HOSTILE, cells=cells, environment={HOSTILE: HOSTILE})
    console = open_console(width=200, file=io.StringIO())
    publish(hostile, console, tmp_path)
    check(console.file.getvalue())


def test_status_and_logs_print_the_records_of_a_run_as_plain_lines(harness: Command, tmp_path: Path) -> None:
    attempt = {"step": 4, "reason": HOSTILE, "message": HOSTILE, "rank": None, "requeue": True, "job": "4"}
    (tmp_path / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    (tmp_path / "excluded_nodes").write_text(f"n1 {NAME}\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a-1.out").write_text(f"{NAME}\n")
    (tmp_path / "config.yaml").write_text("model: {}\n")
    check(*harness("status", tmp_path)[1:])
    check(*harness("logs", tmp_path)[1:])


def test_the_card_of_a_model_keeps_facts_of_data_and_tokens_in_their_cells(dataset: Path, tmp_path: Path) -> None:
    manifest = load_manifest(open_folder(str(dataset)))
    origin = replace(manifest.provenance, tokenizer_hash=HOSTILE, mask={"rule": HOSTILE, "why": "<img src=x>"})
    data = TrainedData([HOSTILE], {HOSTILE: replace(manifest, provenance=origin)}, missing=[HOSTILE])
    checkpoint = tmp_path / "run`" / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").write_text('{"step": 1}')
    tokens = SpecialTokens((1,), 2, None, {1: HOSTILE, 2: "`|"})
    config = SftConfig(model=ModelConfig(vocab_size=512), optimizer=OptimizerConfig(lr=1e-5))
    card = model_card(checkpoint, to_plain(config), data, tokens, is_adapter=False)
    check(card)
    assert not re.search(r"(?<!\\)[`<]", card.partition("## Data")[2])
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3}
