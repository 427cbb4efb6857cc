"""The checkpoint from which a run resumes."""

from __future__ import annotations

import errno
import importlib
import json
import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from harness.errors import CheckpointError, ConfigError, FormatError, LoaderError, how_to_install
from harness.loader import LoaderState
from harness.megatron import compat
from harness.megatron.export.folder import _copied_tensors, _find_checkpoint, export_checkpoint
from harness.megatron.run.resuming import check_resumed
from harness.megatron.state import checkpoint as checkpoints
from harness.megatron.state.checkpoint import find_newest, load_checkpoint
from harness.plan import ModelConfig, SftConfig
from harness.records import SequenceView
from harness.settings import to_plain, to_yaml
from harness.storage import checksums, file_digest
from harness.storage.checksums import digest_files, write_checksums
from harness.thd import build_thd_batch
from harness.train import Progress
from harness.train.checkpoints import read_progress
from tests.distributed.checkpoint_ranks import save

from .conftest import one_rank

STATE = LoaderState(3, packs_consumed=12, fingerprint="f")


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"x" * 100)
    (path / "run.json").write_text(json.dumps({"step": step, "loader": STATE.to_json()}))
    write_checksums(path, digest_files(path, ["run.json", "weights"]))
    return path


def rewrite(path: Path, text: str) -> None:
    """Write another `run.json`, with its hash."""
    (path / "run.json").write_text(text)
    write_checksums(path, digest_files(path, ["run.json", "weights"]))


def test_the_newest_whole_checkpoint_is_chosen_and_unfinished_ones_do_not_count(tmp_path: Path) -> None:
    assert find_newest(tmp_path) == (None, [])
    checkpoint(tmp_path, 5)
    newest = checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 15).rename(tmp_path / "step-00000015.unfinished-host-17")
    assert find_newest(tmp_path) == (newest, [])
    assert read_progress(newest) == Progress(10, STATE)


@pytest.mark.parametrize("settings", ["{}", "model: {}", "[", "- 1", None])
def test_an_older_checkpoint_is_not_exported_with_damaged_settings(tmp_path: Path, settings: str | None) -> None:
    checkpoint(tmp_path / "checkpoints", 5)
    text = to_yaml(SftConfig()).replace("num_layers", "num_layerr") if settings is None else settings
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(FormatError, match=r"the run's settings (lack|cannot be read|are damaged)"):
        export_checkpoint(tmp_path, tmp_path / "model")


def test_a_package_that_only_the_writer_needs_is_missed_before_training_begins(monkeypatch) -> None:
    name = checkpoints.__name__
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ModuleNotFoundError, match="psutil") as raised:
        importlib.import_module(name)
    assert "[train]" in how_to_install(raised.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "weights").unlink(), "the checkpoint's file weights is missing, expected 100 bytes"),
        (lambda path: (path / "weights").write_bytes(b"x"), "file weights has 1 bytes, expected 100 bytes"),
        (lambda path: (path / "checksums.json").unlink(), "the checkpoint's checksums.json is missing"),
        (lambda path: (path / "run.json").unlink(), "run.json cannot be read"),
        (lambda path: (path / "run.json").write_bytes(b"\xff"), "run.json cannot be read"),
        *(
            (lambda path, text=text: rewrite(path, text), "run.json cannot be read")
            for text in ("{", "[]", "[" * 100_000, '{"step": 1e999, "loader": "{}"}', '{"format": "x"}', '{"step": 5}')
        ),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_by_name_and_never_loaded(tmp_path: Path, damage, message: str) -> None:
    older, newest = checkpoint(tmp_path, 5), checkpoint(tmp_path, 10)
    damage(newest)
    chosen, passed_over = find_newest(tmp_path)
    assert chosen == older
    assert [error.where for error in passed_over] == [str(newest)]
    assert message in passed_over[0].what
    damage(older)
    with pytest.raises(CheckpointError) as error:
        find_newest(tmp_path)
    assert message in error.value.what


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"), RuntimeError, "closed by peer"),
        (CheckpointException("read", {3: (OSError(5, "Input/output error"), None)}), LoaderError, "cannot be read"),
        (CheckpointException("load", {0: (KeyError("w"), None)}), CheckpointError, "does not fit this run"),
    ],
)
def test_a_failed_load_is_a_lost_rank_an_unreadable_file_or_another_model(
    tmp_path: Path, monkeypatch, error, kind, message: str
) -> None:
    """A lost rank or file system may be back at the next attempt; another model will not fit then either."""

    def fail(*arguments: object) -> None:
        raise error

    (tmp_path / checkpoints.loading.COMMON_FILE).touch()
    monkeypatch.setattr(checkpoints.loading, "_load", fail)
    monkeypatch.setattr(checkpoints, "_run_state", lambda step, is_loading: ({}, {}))
    with pytest.raises(kind, match=message):
        checkpoints.load_checkpoint(tmp_path, SimpleNamespace())


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_checkpoint_of_a_newer_version_is_refused_and_no_older_one_used(tmp_path: Path, has_checksums: bool) -> None:
    checkpoint(tmp_path, 5)
    rewrite(checkpoint(tmp_path, 10), '{"format": 2, "step": {"of": 10}}')
    if not has_checksums:  # those of a newer version may be different ones
        (tmp_path / "step-00000010" / "checksums.json").write_text('{"algorithm": "new"}')
    with pytest.raises(ConfigError, match=r"run\.json has format 2, but this version supports formats up to 1"):
        find_newest(tmp_path)


def test_the_progress_of_a_checkpoint_is_read_only_if_its_run_file_is_listed_and_whole(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5)
    write_checksums(path, digest_files(path, ["weights"]))
    with pytest.raises(CheckpointError, match=r"checksums\.json does not list run\.json"):
        read_progress(path)
    write_checksums(path, digest_files(path, ["run.json", "weights"]))
    assert read_progress(path) == Progress(5, STATE)
    text = (path / "run.json").read_text()
    (path / "run.json").write_text(text.replace('"step": 5', '"step": 7'))
    with pytest.raises(CheckpointError, match=r"the checkpoint's file run\.json has the hash"):
        read_progress(path)


def test_a_checkpoint_with_a_file_that_cannot_be_read_is_passed_over_by_name(tmp_path: Path, monkeypatch) -> None:
    older, newest = checkpoint(tmp_path, 5), checkpoint(tmp_path, 10)
    unreadable = [newest / "weights"]

    def refuse(path: Path) -> str:
        if path in unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return file_digest(path)

    monkeypatch.setattr(checksums, "file_digest", refuse)
    chosen, (error,) = find_newest(tmp_path)
    assert chosen == older
    assert error.what.startswith("the checkpoint's weights cannot be read: Input/output error (on ")
    assert error.where == str(newest)

    # Where none can be read the file system is at fault, and another attempt may find them all.
    unreadable.append(older / "run.json")
    with pytest.raises(LoaderError, match="weights cannot be read"):
        find_newest(tmp_path)


@pytest.mark.parametrize(
    "at", ["its work", "its start", "its start, before another's", "its start, in a hook of a fork", "its own will"]
)
def test_a_writer_process_that_ends_early_is_an_error_and_no_wait_without_end(at, monkeypatch) -> None:
    """Megatron's writer waits for a report of each process that it starts, and one that ends early sends none."""
    start = ForkProcess._Popen

    def start_and_wait(child: Any) -> Any:
        started = start(child)
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)  # The list of children does not have it yet.
        return started

    compat.keep_checkpoint_results_in_a_file()
    forking = multiprocessing.get_context("fork")
    reading, writing = os.pipe()

    def write() -> None:
        reports = forking.JoinableQueue()
        reports.put(0)
        if at == "its own will":
            forking.Process(target=signal.pause).start()  # another one, which does not end by itself
        if at != "its work":
            monkeypatch.setattr(ForkProcess, "_Popen", staticmethod(start_and_wait))
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        ended = forking.Process(target=partial(os._exit, 3) if at == "its own will" else kill)
        ended.start()
        if at == "its start, in a hook of a fork":  # where Python drops what a signal handler raises
            os.register_at_fork(after_in_parent=partial(signal.raise_signal, signal.SIGCHLD))
        if at.startswith("its start, "):
            forking.Process(target=lambda: None).start()  # Waits for those in the list that have ended.
        reports.join()

    writer = forking.Process(target=compat._hash_and_write, args=(write, writing))
    writer.start()
    writer.join(300)
    writer.kill()  # where it waits without end
    writer.join()
    assert writer.exitcode == 0
    result = filesystem_async._results_queue.get_nowait()
    how = "ended with exit code 3" if at == "its own will" else "was killed by signal 9"
    assert str(result) == f"a process that writes it {how}"
    for descriptor in (reading, writing):
        os.close(descriptor)


EXPERTS = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_experts=4, router_score="sigmoid")


@pytest.mark.parametrize("change", [{"num_layers": 1}, {"tie_embeddings": True}])
def test_a_model_that_lacks_weights_of_a_checkpoint_is_refused_with_their_name(tmp_path: Path, change) -> None:
    row = build_thd_batch([SequenceView(np.arange(17, dtype=np.int32), np.ones(17, np.uint8))])
    with one_rank(replace(EXPERTS, tie_embeddings=False), vocab_size=64) as step:
        step.train([row])
        path = save(tmp_path, step)
        load_checkpoint(path, step)
    name = "decoder.layers.1." if "num_layers" in change else "output_layer.weight"
    refused = pytest.raises(CheckpointError, match=f"does not fit this run: .*{name}")
    with one_rank(replace(EXPERTS, **{"tie_embeddings": False, **change}), vocab_size=64) as step, refused:
        load_checkpoint(path, step)


@pytest.mark.parametrize("text", [None, "", "- 1"])
def test_other_adapters_are_refused_whatever_becomes_of_the_settings_in_the_run_s_folder(tmp_path: Path, text) -> None:
    newest = checkpoint(tmp_path / "checkpoints", 5)
    before = to_plain(SftConfig(model=ModelConfig(lora_rank=4, lora_alpha=16.0)))
    rewrite(newest, json.dumps({"step": 5, "loader": STATE.to_json(), "settings": before}))
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    assert check_resumed(SftConfig(model=ModelConfig(lora_rank=4, lora_alpha=16.0)), tmp_path, newest).step == 5
    with pytest.raises(ConfigError, match=r"different adapters: model\.lora_alpha was 16\.0 and is 300\.0"):
        check_resumed(SftConfig(model=ModelConfig(lora_rank=4, lora_alpha=300.0)), tmp_path, newest)


def test_a_checkpoint_that_was_copied_alone_is_exported_with_its_own_settings(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5)
    with pytest.raises(FormatError, match="the run's settings cannot be read"):
        _find_checkpoint(path, unchecked=False)
    rewrite(path, json.dumps({"step": 5, "loader": STATE.to_json(), "settings": to_plain(SftConfig())}))
    found, settings = _find_checkpoint(path, unchecked=False)
    assert (found, settings["model"]["num_layers"]) == (path, SftConfig().model.num_layers)


def test_an_export_needs_initial_weights_only_if_it_copies_tensors_of_them(tmp_path: Path) -> None:
    model = ModelConfig(init_from=str(tmp_path / "removed"))
    assert list(_copied_tensors(model, tmp_path, keep_mtp=False)) == []
    with pytest.raises(ConfigError, match="there is no folder"):
        _copied_tensors(model, tmp_path, keep_mtp=True)
