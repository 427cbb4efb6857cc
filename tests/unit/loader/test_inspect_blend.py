"""`harness inspect` of settings shows what their blend will train."""

from __future__ import annotations

import json

import pytest
import yaml

from harness.cli import main
from harness.errors import ConfigError
from harness.formats import open_writer
from harness.loader.inspect_blend import summarize_blend
from harness.records import Pack


@pytest.fixture
def sources(tmp_path):
    """Eight packs of 3 tokens and two of 6."""
    paths = []
    for name, format, count, length in (("one", "memmap", 8, 3), ("two", "jsonl", 2, 6)):
        with open_writer(tmp_path / name, format=format, pack_size=8) as writer:
            for _ in range(count):
                writer.append(Pack(range(length), [1] * (length - 1) + [0], [0]))
        paths.append(str(tmp_path / name))
    return paths


def inspect(monkeypatch, capsys, tmp_path, settings, *arguments):
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    monkeypatch.setattr("sys.argv", ["harness", "inspect", str(path), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_shares_draws_and_the_end_of_a_run(monkeypatch, capsys, tmp_path, sources):
    blend = [{"path": sources[0], "weight": 3.0}, {"path": sources[1], "weight": 1.0, "epochs": 2}]
    settings = {"data": {"blend": blend}, "trainer": {"steps": 4}, "loader": {"global_batch_size": 3}}
    _, out, _ = inspect(monkeypatch, capsys, tmp_path, settings, "--json")
    summary = json.loads(out)
    assert (summary["packs"], summary["of_run"], summary["ends_after"]) == (12, True, 17)
    assert [
        (source["format"], source["drawn"], source["passes"], source["pack_share"]) for source in summary["sources"]
    ] == [
        ("memmap", 9, 1.125, 0.75),
        ("jsonl", 3, 1.5, 0.25),
    ]
    assert [source["token_share"] for source in summary["sources"]] == pytest.approx([0.6, 0.4])
    _, out, _ = inspect(monkeypatch, capsys, tmp_path, {**settings, "trainer": {"steps": 6}})
    assert "exhausted after 17 packs: too few for the run" in out
    assert all(path in out for path in sources)


def test_without_weights_an_epoch_is_shown(monkeypatch, capsys, tmp_path, sources):
    settings = {"blend": [{"path": sources[0]}, {"path": sources[1], "epochs": 3}]}
    _, out, _ = inspect(monkeypatch, capsys, tmp_path, settings, "--json")
    summary = json.loads(out)
    assert (summary["packs"], summary["ends_after"]) == (14, None)
    assert [source["drawn"] for source in summary["sources"]] == [8, 6]
    # Two epochs of four batches, of which the last has two packs, and one batch.
    settings |= {"trainer": {"steps": 9}, "loader": {"global_batch_size": 4}}
    _, out, _ = inspect(monkeypatch, capsys, tmp_path, settings)
    assert "in the first 32 packs trained by the run" in out
    _, out, _ = inspect(monkeypatch, capsys, tmp_path, settings, "--json")
    assert [source["drawn"] for source in json.loads(out)["sources"]] == [18, 14]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"path": "x"}}, "configures no blend"),
        ({"blend": [{"wieght": 1}]}, "there is no setting 'wieght'"),
        ({"blend": [{"path": "x", "weight": -1.0}]}, "weight is -1.0"),
        (["a"], "configures no blend"),
        ({"blend": [{"path": "x", "weight": "abc"}]}, "weight is 'abc'"),
        ({"blend": [{"path": "x", "epochs": 1.5}]}, "epochs is '1.5'"),
        ({"blend": [{"path": 3}]}, "path is '3'"),
    ],
)
def test_settings_without_a_blend_are_refused(monkeypatch, capsys, tmp_path, settings, message):
    code, _, out = inspect(monkeypatch, capsys, tmp_path, settings)
    assert code == 2
    assert message in out


@pytest.mark.parametrize("content", [b"[" * 100_000, b"a: \xff", b"a: ["])
def test_a_file_that_is_no_yaml_is_refused(tmp_path, content):
    (tmp_path / "blend.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match="the settings cannot be read"):
        summarize_blend(str(tmp_path / "blend.yaml"))
