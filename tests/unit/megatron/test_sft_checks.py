"""Settings and data that cannot train are refused before any rank waits for another."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.recipes.sft import main
from live_streams import some_chats, some_packs, write_stream
from small_packs import write_packs

from harness.errors import ConfigError, HarnessError, LoaderError
from harness.formats import Provenance
from harness.loader import DataConfig, LiveConfig, LoaderConfig, open_datasets
from harness.loader.datasets import BlendSource, LiveSource
from harness.loader.live.folder import LiveFolder
from harness.megatron.job import runtime
from harness.megatron.run import training
from harness.megatron.run.checks import check, check_memory
from harness.megatron.run.fine_tuning import open_fine_tuning
from harness.plan.settings import SftConfig
from harness.records import Pack
from harness.schedule import ScheduleConfig
from harness.train.attempts import decide
from harness.train.checkpoints import read_identity
from harness.train.folder import open_run_folder

VOCABULARY = Provenance(counts={"vocab_size": 90})


@pytest.fixture
def data(tmp_path):
    def made(*, vocab_size=90, pack_size=64):
        counts = {} if vocab_size is None else {"vocab_size": vocab_size}
        path, packs = tmp_path / f"data-{vocab_size}-{pack_size}", [Pack([1, 2, 3, 95] * 12, [1] * 47 + [0], [0])]
        options = {"pack_size": pack_size, "provenance": Provenance(counts=counts), "overwrite": True}
        return open_datasets(DataConfig(path=str(write_packs(path, packs, format="parquet", **options))))

    return made


def config(**model):
    made = SftConfig()
    for name, value in model.items():
        setattr(made.model, name, value)
    return made


def small(folder, data, **trainer):
    """Return a run on a CPU that trains a step in a moment."""
    made = SftConfig(run_dir=str(folder), data=data)
    made.model.hidden_size, made.model.ffn_hidden_size, made.model.num_layers = 32, 64, 1
    made.loader.num_workers = 0
    made.trainer = replace(made.trainer, device="cpu", **trainer)
    return made


def test_the_vocabulary_comes_from_the_dataset_or_from_the_settings(data):
    assert check(config(), data()) == 90
    assert check(config(vocab_size=200), data()) == 200
    assert check(config(vocab_size=50), data(vocab_size=None)) == 50
    with pytest.raises(ConfigError, match="the vocabulary size is unknown"):
        check(config(), data(vocab_size=None))
    with pytest.raises(ConfigError, match=r"model.vocab_size is 50, but the dataset's tokenizer has 90"):
        check(config(vocab_size=50), data())


def test_batches_larger_than_the_data_are_warned_of(tmp_path):
    for name in ("train", "validation"):
        write_packs(tmp_path / name, [Pack([1, 2], [1, 0], [0])] * 3, format="parquet", pack_size=8)
    made = SftConfig(data=DataConfig(path=str(tmp_path)), loader=LoaderConfig(global_batch_size=2))
    made.model.vocab_size = 90
    ranks = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    made.trainer.eval_batches = 2
    assert open_fine_tuning(made, ranks).warnings == []
    made.trainer.eval_batches = 3
    [warning] = open_fine_tuning(made, ranks).warnings
    assert warning.startswith("trainer.eval_batches is 3, but the validation set has 3 packs")
    made.loader.global_batch_size, made.trainer.eval_batches = 4, None
    [warning] = open_fine_tuning(made, ranks).warnings
    assert warning.startswith("loader.global_batch_size is 4, but the dataset has 3 packs")


def test_the_most_sequences_of_a_row_are_known_for_graphs_before_the_first_step(tmp_path):
    packs = [Pack([1] * 48, [1] * 47 + [0], starts) for starts in ([0, 20], [0, 10, 20, 30, 40], [0])]
    path = write_packs(tmp_path / "data", packs, format="parquet", pack_size=64, provenance=VOCABULARY)
    made = SftConfig(data=DataConfig(path=str(path)), loader=LoaderConfig(global_batch_size=2))
    made.parallel.static_rows = True
    ranks = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    assert open_fine_tuning(made, ranks).max_sequences is None
    made.parallel.cuda_graphs = True
    for schedule, most in (
        (ScheduleConfig("as_packed", max_tokens_per_rank=64), 5),
        (ScheduleConfig("dp_balanced", max_tokens_per_rank=64), 6),  # 7 + 4 * 9 + 19 model tokens
        (ScheduleConfig("dp_balanced"), 7),  # the two packs with the most
    ):
        assert open_fine_tuning(replace(made, schedule=schedule), ranks).max_sequences == most


def test_a_pack_size_above_the_limit_of_the_model_is_refused(data):
    with pytest.raises(ConfigError, match="pack_size 128 exceeds the model"):
        check(config(max_sequence_length=100), data(pack_size=128))
    further = DataConfig(path=str(data().train.path), evaluation={"large": str(data(pack_size=128).train.path)})
    with pytest.raises(ConfigError, match="pack_size 128 exceeds the model"):
        check(config(max_sequence_length=100), open_datasets(further))
    with pytest.raises(ConfigError, match="'a set' is not a valid name for a validation set"):
        DataConfig(evaluation={"a set": "x"})


def run(tmp_path, data, *, resume="false", **changes):
    made = small("", DataConfig(path=str(data.train.path)), steps=1)
    made.run_dir, made.runs, made.resume = None, str(tmp_path / "runs"), resume
    for name, value in changes.items():
        setattr(made.schedule if name == "max_tokens_per_rank" else made.model, name, value)
    main(made)


def test_a_token_beyond_the_vocabulary_is_refused_and_not_trained(tmp_path, data):
    with pytest.raises(ConfigError, match="a token id is 95, but the model has 90 tokens"):
        run(tmp_path, data())
    run(tmp_path, data(vocab_size=96))
    assert (tmp_path / "runs" / "sft-002" / "report.md").exists()


def test_adapters_of_random_weights_are_refused(tmp_path, data):
    with pytest.raises(ConfigError, match=r"model\.lora_rank is 4, but model\.init_from is not set"):
        run(tmp_path, data(vocab_size=96), lora_rank=4)


def test_a_finished_run_that_is_resumed_keeps_its_settings_and_names_how_to_train_more_and_what_its_records_lost(
    tmp_path, data, capsys
):
    made = data(vocab_size=96)
    run(tmp_path, made)
    folder = tmp_path / "runs" / "sft-001"
    before = (folder / "config.yaml").read_bytes()
    run(tmp_path, made, resume="true", max_tokens_per_rank=128)
    assert ((folder / "config.yaml").read_bytes(), list(folder.glob("config.before-*"))) == (before, [])
    (folder / "metrics.jsonl").write_text("")  # a power failure, in a run that did not force it to disk
    (folder / "config.yaml").write_bytes(b"model: \xff")
    capsys.readouterr()
    run(tmp_path, made, resume="true")
    printed = capsys.readouterr().out
    assert "nothing to train: step 1 of 1 is complete" in printed
    assert "trainer.steps=2" in printed
    assert "warning: metrics.jsonl has no records of 1 of the trained steps 1 to 1: " in printed
    assert (folder / "config.before-1.yaml").read_bytes() == b"model: \xff"


def test_the_records_of_a_step_are_on_disk_before_the_checkpoint_after_it_has_its_name(tmp_path, data, monkeypatch):
    stored = DataConfig(path=str(data(vocab_size=96).train.path))
    made = small(tmp_path / "run", stored, steps=2, checkpoint_interval=1, record_digests=True)
    fsync, rename, events = os.fsync, os.rename, []

    def forced(descriptor):
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.suffix == ".jsonl":
            events.append((path.name, len(path.read_text().splitlines())))

    def renamed(path, target, **options):
        rename(path, target, **options)
        if Path(target).parent.name == "checkpoints" and Path(target).name in ("step-00000001", "step-00000002"):
            events.append((Path(target).name, 0))

    monkeypatch.setattr(os, "fsync", forced)
    monkeypatch.setattr(os, "rename", renamed)
    main(made)
    for step in (1, 2):
        before = events[: events.index((f"step-0000000{step}", 0))]
        for name in ("metrics.jsonl", "digests.jsonl"):
            assert max(lines for file, lines in before if file == name) >= step, (name, events)


def test_epochs_end_with_their_ragged_batch_also_where_a_resumed_run_has_another_batch_size(tmp_path, capsys):
    packs = [Pack([number + 1] * 40, [1] * 39 + [0], [0]) for number in range(7)]
    write_packs(tmp_path / "train", packs, format="parquet", pack_size=64, provenance=VOCABULARY)
    made = small(tmp_path / "run", DataConfig(path=str(tmp_path / "train")))

    def train(resume: str, size: int, steps: int | None, epochs: int | None) -> tuple[list[dict], str]:
        made.loader, made.resume = LoaderConfig(global_batch_size=size, num_workers=0), resume
        made.trainer.steps, made.trainer.epochs = steps, epochs
        assert main(made) == 0
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], capsys.readouterr().out

    lines, printed = train("false", 3, 4, None)
    assert "4 steps are 1.43 epochs of 7 packs" in printed
    assert [(line["epoch"], line["packs_consumed"]) for line in lines] == [(0, 3), (0, 6), (0, 0), (1, 3)]
    # Four packs of the second epoch are left: two steps of two.
    lines, printed = train("true", 2, None, 2)
    assert "6 steps are 2 epochs of 7 packs" in printed
    assert [(line["epoch"], line["packs_consumed"]) for line in lines[4:]] == [(1, 5), (1, 0)]
    # A third epoch has one step of five packs and a ragged one of two.
    lines, printed = train("true", 5, None, 3)
    assert "8 steps are 3 epochs of 7 packs" in printed
    assert [(line["epoch"], line["tokens"]) for line in lines[6:]] == [(2, 195), (2, 78)]
    # The rate had reached its end at step 4, and a longer run does not raise it again.
    assert "learning rate 0.002 after 1 warm-up step, cosine decay to 0.0002 over 4 steps" in printed
    assert [line["learning_rate"] for line in lines[4:]] == [pytest.approx(2e-4)] * 4
    recorded = (tmp_path / "run" / "config.yaml").read_text()
    for setting in ("steps: 8", "epochs: null", "lr: 0.002", "warmup_steps: 1", "decay_steps: 4"):
        assert f"  {setting}\n" in recorded


def test_a_copy_of_a_run_resumes_as_a_run_of_its_own(tmp_path, data, capsys):
    made = data(vocab_size=96)
    run(tmp_path, made)
    original, copy = tmp_path / "runs" / "sft-001", tmp_path / "runs" / "sft-002"
    shutil.copytree(original, copy)
    before = read_identity(original)
    capsys.readouterr()
    run(tmp_path, made, resume="true")
    of = read_identity(copy)
    note = f"its checkpoint belongs to run {before.run}, and the resumed run is {of.run}"
    assert note in " ".join(capsys.readouterr().out.split())
    assert (of.run != before.run, read_identity(original)) == (True, before)
    run(tmp_path, made, resume="true")
    assert (read_identity(copy).run, read_identity(copy).attempt != of.attempt) == (of.run, True)


@pytest.mark.submission
def test_no_file_of_a_run_ends_a_resume_with_an_error_that_has_no_name(tmp_path, data):
    made = data(vocab_size=96)
    run(tmp_path, made)
    folder = tmp_path / "runs" / "sft-001"
    names = ["config.yaml", "identity.json", "attempts.jsonl", "metrics.jsonl"]
    contents, outcomes = (b"\xff\n", b"[" * 100_000 + b"\n", b"- 1\n"), {}
    for name in [*names, "checkpoints/step-00000001/run.json", "checkpoints/step-00000001/checksums.json"]:
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        for number, content in enumerate(contents):
            path.write_bytes(content)
            try:
                run(tmp_path, made, resume="true")
                outcomes[path.name, number] = ""
            except HarnessError as error:
                outcomes[path.name, number] = error.what
        path.write_bytes(before) if before is not None else path.unlink()
    # Settings that cannot be read are kept beside the new ones.
    assert {name for (name, _), what in outcomes.items() if not what} == {"config.yaml"}
    assert {path.read_bytes() for path in folder.glob("config.before-*.yaml")} >= set(contents)


def test_a_job_whose_settings_are_refused_is_not_started_again_even_if_its_launcher_changes_the_exit_code(
    tmp_path, data, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    folder = tmp_path / "run"
    made = SftConfig(run_dir=str(folder), resume="auto", data=DataConfig(path=str(data().train.path)))
    made.parallel.tensor_parallel_size = 3
    folder.mkdir()
    with open_run_folder(folder, settings="", resumes=True), pytest.raises(ConfigError):
        main(made)
    assert decide(folder, exit_code=1).requeue  # another run was active there and left no reason
    with pytest.raises(ConfigError):
        main(made)
    decision = decide(folder, exit_code=1)
    assert not decision.requeue
    assert "a restart would fail in the same way" in decision.message


def live_config(tmp_path, **data):
    made = small(tmp_path / "run", SftConfig().data, steps=100, checkpoint_interval=2)
    made.data.live = LiveConfig(path=str(tmp_path / "live"), pack_size=64, timeout_s=20, **data)
    made.schedule, made.model.vocab_size, made.loader.global_batch_size = ScheduleConfig("as_packed", 64), 300, 4
    return made


def test_a_run_on_live_chunks_ends_with_them_and_marks_them_once_a_checkpoint_is_whole(tmp_path):
    write_stream(tmp_path / "live", some_packs(18), [7, 7, 4])
    assert main(live_config(tmp_path)) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["packs_consumed"] for line in lines] == [4, 8, 12, 16, 18]
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step-00000004",
        "step-00000005",
    ]
    assert sorted(LiveFolder(tmp_path / "live").look().completed) == [0, 1, 2]
    status = LiveFolder(tmp_path / "live").status("_consumer")
    assert (status["state"], status["rows"], status["read_below"]) == ("ended", 18, 3)
    assert "live chunks in" in (tmp_path / "run" / "report.md").read_text()


def test_chunks_are_marked_only_once_every_kept_checkpoint_contains_them(tmp_path, monkeypatch):
    write_stream(tmp_path / "live", some_packs(32), [4] * 8)
    marked, complete = [], LiveFolder.complete
    monkeypatch.setattr(
        LiveFolder, "complete", lambda self, chunks: (marked.append(sorted(chunks)), complete(self, chunks))
    )
    made = live_config(tmp_path)
    made.trainer.steps, made.trainer.keep_checkpoints = 6, 2
    assert main(made) == 0
    # After steps 2, 4 and 6, of which two are kept; then the run is at its end.
    assert marked == [[0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def test_a_new_run_on_chunks_that_another_run_used_up_is_refused_and_does_not_wait(tmp_path):
    write_stream(tmp_path / "live", some_packs(18), [7, 7, 4])
    for left in tmp_path.glob("live/chunk_00000*"):
        left.unlink()
    with pytest.raises(LoaderError, match="chunk_00000 was deleted"):
        main(live_config(tmp_path))


def test_live_chunks_are_refused_with_settings_that_they_do_not_support(tmp_path):
    with pytest.raises(ConfigError, match="live chunks cannot be blended"):
        DataConfig(live=LiveConfig(path="somewhere"), blend=[BlendSource("a", 1.0)])
    write_stream(tmp_path / "live", some_chats(3), [3])
    with pytest.raises(ConfigError, match="the chunk contains conversations, but no tokenizer is set"):
        main(live_config(tmp_path))
    made = live_config(tmp_path / "second")
    made.model.vocab_size = None
    with pytest.raises(ConfigError, match="no tokenizer is set") as caught:
        main(made)
    assert caught.value.where == "data.live.tokenizer.name"
    for name, live in (("window_sequences", {"window_sequences": 8}), ("blend", {"blend": [LiveSource("some")]})):
        with pytest.raises(ConfigError, match=f"data.live.{name} is .*, and schedule.name is as_packed"):
            main(live_config(tmp_path / name, **live))


def test_a_model_that_no_memory_of_the_machine_holds_is_refused_by_name(monkeypatch):
    made = config(hidden_size=1_000_000)
    sizes = {"vocab_size": 300, "dp_size": 1}
    with pytest.raises(ConfigError, match="weights, gradients and optimizer need") as error:
        check_memory(made, torch.device("cpu"), **sizes)
    assert error.value.where == "model, model.vocab_size"
    check_memory(config(), torch.device("cpu"), **sizes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE is 'two'"):
        check_memory(config(), torch.device("cpu"), **sizes)


def test_memory_that_runs_out_is_one_clear_error(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.\nmore")

    monkeypatch.setattr(runtime, "start", fail)
    with pytest.raises(ConfigError, match="out of memory: can't allocate memory: you tried to allocate 8 bytes"):
        training.run_training(SftConfig(), None)

    def hide(*_, **__):
        try:
            raise MemoryError
        finally:
            raise ValueError("cannot close a file that is being written")

    monkeypatch.setattr(runtime, "start", hide)
    with pytest.raises(ConfigError, match="out of memory: this process"):
        training.run_training(SftConfig(), None)
    monkeypatch.setattr(runtime, "start", lambda *_, **__: 1 + "")
    with pytest.raises(TypeError):
        training.run_training(SftConfig(), None)
