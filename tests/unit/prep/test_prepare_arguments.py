"""Preparing from Python: the short form, its progress, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import open_dataset, prepare
from harness.errors import ConfigError, PrepError
from harness.prep import PrepareConfig, TokenizerConfig
from harness.prep.packing import PackingConfig
from harness.prep.sources.config import SourceConfig

CHATS = [
    {"messages": [{"role": "user", "content": f"What is {n} + 1?"}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(80)
]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    return path


def test_the_short_form_prepares_what_the_settings_do_and_reports_progress(chats: Path, tmp_path: Path, capsys) -> None:
    calls: list[tuple[str, int, int]] = []
    settings = {"pack_size": 128, "validation_fraction": 0.2, "num_workers": 0}
    tokenizer = TokenizerConfig(vocab_size=400)
    report = prepare(
        chats,
        tokenizer,
        tmp_path / "short",
        **settings,
        progress=lambda *made: calls.append(made),  # type: ignore[arg-type]
    )
    assert capsys.readouterr().out == ""
    full = PrepareConfig(
        SourceConfig(path=str(chats)), tokenizer, PackingConfig(path=str(tmp_path / "full"), **settings)
    )
    prepare(full)
    short, long = (open_dataset(str(tmp_path / name / "train")) for name in ("short", "full"))
    assert short.fingerprint == long.fingerprint
    assert "train" in capsys.readouterr().out
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == ["tokenizer", "tokens", "train", "validation"]
    packs = [(done, total) for stage, done, total in calls if stage == "train"]
    assert packs[0] == (0, report.splits["train"].packs)
    assert packs[-1] == (report.splits["train"].packs, report.splits["train"].packs)
    assert [done for done, _ in packs] == sorted(done for done, _ in packs)
    read = [(done, total) for stage, done, total in calls if stage == "tokens"]
    assert read[-1] == (chats.stat().st_size, chats.stat().st_size)
    # A tokenizer is named by its folder.
    named = prepare(chats, tmp_path / "short" / "tokenizer", tmp_path / "named", **settings)
    assert (named.vocab_size, named.splits["train"].fingerprint) == (400, short.fingerprint)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("chats", None), {}, "no output folder is set"),
        (("chats", None, "out"), {"pack_sise": 8}, "there is no setting 'pack_sise'"),
        (("chats", None, "out"), {"path": "other"}, "multiple values|there is no setting"),
        (("", None, "out"), {}, "the path is empty|no path is set"),
        (("chats", "", "out"), {}, "no tokenizer is set"),
        ((PrepareConfig(), None, "out"), {}, "path was passed together with a PrepareConfig"),
        ((PrepareConfig(),), {"pack_size": 64}, "pack_size was passed together with a PrepareConfig"),
    ],
)
def test_arguments_that_make_no_preparation_are_refused(arguments, settings, message) -> None:
    with pytest.raises((ConfigError, TypeError), match=message):
        prepare(*arguments, **settings)


@pytest.mark.nightly
def test_preparing_and_converting_need_no_torch(chats: Path, tmp_path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = None  # as on a machine without it; transformers imports it where it can
from harness import Loader, LoaderConfig, Pack, convert_dataset, open_dataset, open_writer, plan_packs, prepare
from harness.prep import TokenizerConfig
from harness.schedule import schedule
chats, out = sys.argv[1:]
prepare(chats, TokenizerConfig(vocab_size=400), out, num_workers=0, progress=lambda *made: None)
stages = []
convert_dataset(out + "/train", out + "/memmap", format="memmap", progress=lambda *made: stages.append(made[0]))
print(sorted(set(stages)), len(open_dataset(out + "/memmap")) > 0, "megatron" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(chats), str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "['compare', 'convert'] True False", done.stderr


def test_ray_is_refused_before_anything_is_written_where_it_is_not_installed(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    config = PrepareConfig(engine="ray")
    config.data.path = str(tmp_path / "out")
    with pytest.raises(ConfigError, match="Ray is not installed") as raised:
        prepare(config)
    assert "engine=local" in raised.value.fix
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_or_a_plan_imports_no_pyarrow_and_no_tokenizer_library():
    script = (
        "import sys; from harness.prep import ChatTokenizer, plan_packs; from harness.prep.chat import parse_record"
    )
    script += "; print(*{'pyarrow', 'rich', 'tokenizers', 'transformers', 'torch', 'hydra'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"\n"


def test_equal_bad_records_are_one_line_with_a_count(tmp_path, chats):
    no_user, no_text = {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": 7}]}
    bad = [no_user] * 12 + [no_text]
    chats.write_text("".join(json.dumps(chat) + "\n" for chat in (*CHATS, *bad)))
    with pytest.raises(PrepError) as caught:
        prepare(chats, TokenizerConfig(vocab_size=400), tmp_path / "data", num_workers=0)
    lines = [line.strip() for line in caught.value.where.splitlines()]
    assert lines[0] == f"{chats}, line 81: empty_turn: turn 1 (user) has no content (and 11 more records)"
    assert len(lines) == 2
    assert lines[1].startswith(f"{chats}, line 93: ")


def test_a_tokenizer_of_the_home_folder_that_changed_makes_another_dataset(chats, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = {"pack_size": 128, "num_workers": 0, "progress": lambda *made: None}
    prepare(chats, TokenizerConfig(vocab_size=400), tmp_path / "made", **settings)
    named = "~/made/tokenizer"
    prepare(chats, named, tmp_path / "data", **settings)
    assert prepare(chats, named, tmp_path / "data", **settings).reused
    file = tmp_path / "made" / "tokenizer" / "tokenizer_config.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(ConfigError, match="tokenizer_files was"):
        prepare(chats, named, tmp_path / "data", **settings)
