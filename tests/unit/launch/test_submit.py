"""From the name of an experiment to its script."""

from __future__ import annotations

import shlex

import pytest

from harness.config import compose_config
from harness.errors import ConfigError
from harness.launch.script import Job
from harness.launch.submit import check_arguments, dataset_paths, submit_job
from harness.loader import CorpusConfig, DataConfig
from harness.loader.corpus import CorpusSource, SplitSources
from harness.loader.datasets import BlendSource, LiveConfig, LiveSource
from harness.plan import SftConfig


def test_a_dry_run_prints_the_script_and_leaves_nothing_behind(tmp_path, harness):
    runs = tmp_path / "runs"
    (runs / "sft_tiny-004").mkdir(parents=True)
    (runs / "sft_tiny-old-009").mkdir()
    arguments = ["nodes=3", "--dry-run", f"runs={runs}", "cluster.time=00:10:00", "trainer.steps=5"]
    code, printed, errors = harness("submit", "sft_tiny", *arguments)
    assert code == 0, errors
    lines = printed.splitlines()
    assert "#SBATCH --nodes=3" in lines
    assert "#SBATCH --time=00:10:00" in lines
    program = next(line for line in lines if line.startswith("program="))
    expected = f"experiment=sft_tiny runs={runs} trainer.steps=5 run_dir={runs}/sft_tiny-005 resume=auto)"
    assert program.endswith(f"-m harness.recipes.sft {expected}")
    assert sorted(path.name for path in runs.iterdir()) == ["sft_tiny-004", "sft_tiny-old-009"]
    assert f"mkdir -p {runs}/sft_tiny-005/logs && sbatch FILE" in errors


def test_secret_values_are_not_printed_and_their_script_is_for_its_owner_alone(tmp_path, monkeypatch, harness):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    command = ("submit", "sft_tiny", f"runs={tmp_path}", "name=a", "cluster.env.HF_TOKEN=hf_hidden")
    code, printed, errors = harness(*command, "--dry-run")
    assert (code, "export HF_TOKEN='***'" in printed, "hf_hidden" in printed + errors) == (0, True, False)
    code, printed, errors = harness(*command)
    assert (code, "hf_hidden" in printed + errors) == (0, False)
    script = tmp_path / "a-001" / "job.sbatch"
    assert "export HF_TOKEN='hf_hidden'" in script.read_text()
    assert script.stat().st_mode & 0o777 == 0o600
    # A script that others could read before is theirs no more.
    script.chmod(0o644)
    job = Job("a", 1, "harness.recipes.sft", (), str(script.parent), "/", "python")
    assert submit_job(job, "#!/bin/sh\n", is_private=True) == "7"
    assert script.stat().st_mode & 0o777 == 0o600


def test_a_node_left_out_by_a_file_is_checked_as_a_setting_is(tmp_path, harness):
    (tmp_path / "a-001").mkdir()
    (tmp_path / "a-001" / "excluded_nodes").write_text("n1;touch$IFS/canary too slow\n")
    code, _, errors = harness("submit", "sft_tiny", f"run_dir={tmp_path / 'a-001'}", "name=a", "--dry-run")
    assert (code, "where: cluster.exclude" in errors) == (2, True), errors


@pytest.mark.parametrize("argument", ["resume=false", "a=1\n"])
def test_settings_that_the_job_sets_itself_are_refused(argument):
    with pytest.raises(ConfigError):
        check_arguments([argument])


def test_every_dataset_of_a_run_is_listed(tmp_path):
    assert dataset_paths(DataConfig(path="data/a", validation_path="s3://b/v")) == ("data/a", "s3://b/v")
    assert dataset_paths(DataConfig(path="", blend=[BlendSource("a"), BlendSource("b")])) == ("a", "b")
    assert dataset_paths(DataConfig(path="data/pydoc", live=LiveConfig(path="not/yet"))) == ()
    several = LiveConfig(path="unused", blend=[LiveSource("a"), LiveSource("b")])
    assert dataset_paths(DataConfig(path="data/pydoc", live=several, validation_path="v")) == ("v",)
    assert dataset_paths(CorpusConfig(path="c")) == ("c",)
    assert dataset_paths(CorpusConfig(blend=[CorpusSource("a"), CorpusSource("s3://b/c")])) == ("a",)
    split = SplitSources(train=[CorpusSource("a")], valid=[CorpusSource("a"), CorpusSource("b")])
    assert dataset_paths(CorpusConfig(blend_per_split=split)) == ("a", "b")
    (tmp_path / "splits.json").write_text('{"train": ["0.5", "x", "0.5", "y"], "valid": null}')
    assert dataset_paths(CorpusConfig(per_split_data_args_path=str(tmp_path / "splits.json"))) == ("x", "y")


IN_CONTAINER = ("sft_tiny", "name=tiny", "cluster=h100_pyxis", "runs=/shared/runs", "data.path=/shared/data")

LONG = "schedule.max_tokens_per_rank=16384"
LIVE_IN_CONTAINER = (*IN_CONTAINER, "data.live.path=/shared/l", "data.live.pack_size=1024")
CORPUS_IN_CONTAINER = ("pretrain", *IN_CONTAINER[1:], "parallel.ranks=null")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "data.path=x"], "there is no experiment 'prepare'"),
        (["sft_tinny"], "did you mean sft_tiny?"),
        (["sft_tiny", "run_dir=nowhere"], "there is no run to resume"),
        (["sft", "cluster=h100_ib", "nodes=4"], "16 packs is too small for 32 data-parallel ranks"),
        (["sft_tiny", "cluster=h100_pyxis", "data.path=data/mine"], "container's own folder\n  where: data.path"),
        ([*IN_CONTAINER, "data.path=/data"], "shows /data: /shared:/shared\n  where: data.path, data.evaluation, cl"),
        ([*IN_CONTAINER, "data.evaluation={a: /e/a}"], "shows /e/a: /shared:/shared\n  where: data.path"),
        ([*IN_CONTAINER, "model.init_from=/w"], "shows /w: /shared:/shared\n  where: model.init_from, cluster.mounts"),
        ([*IN_CONTAINER, "data.live.path=/live"], "shows /live: /shared:/shared\n  where: data.live.path, cluster.mo"),
        ([*LIVE_IN_CONTAINER, "data.live.tokenizer.name=/t"], "where: data.live.tokenizer.name"),
        ([*CORPUS_IN_CONTAINER, "data.per_split_data_args_path=/s.json"], "shows /s.json: /shared:/shared"),
        ([*CORPUS_IN_CONTAINER, "data.per_dataset_sequences_path=/n.json"], "where: data.per_dataset_sequences_path"),
        ([*IN_CONTAINER, "runs=/home/me"], "shows /home/me/tiny-001: /shared:/shared\n  where: runs, cluster.mounts\n"),
        ([*IN_CONTAINER, "runs=/shared/../home/me"], "shows /shared/../home/me/tiny-001: /shared:/shared\n"),
        ([*IN_CONTAINER, "data.path=/shared/../data"], "shows /shared/../data: /shared:/shared\n  where: data.path"),
        ([*IN_CONTAINER, "cluster.mounts=[/lustre:/shared]"], "shows /shared/runs/tiny-001 at the same path"),
        (["llama3_8b_4nodes", "cluster=h100_ib", "nodes=2"], "2 nodes of 8 have 16\n  where: nodes\n  fix:   nodes=4"),
        (["llama3_8b_1node", "cluster=h100_ib", LONG], "does not fit the cluster's GPUs: the fullest rank, of"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_submitted(harness, arguments, message):
    code, _, errors = harness("submit", *arguments, "--dry-run")
    assert code == 2
    assert message in errors


def test_a_link_to_what_no_mount_shows_is_refused(harness, tmp_path):
    shared, outside = tmp_path / "shared", tmp_path / "outside"
    for folder in (shared / "data", outside):
        folder.mkdir(parents=True)
        (folder / "shard.parquet").touch()
    (tmp_path / "mounted").symlink_to(shared)  # as file systems are often mounted
    (shared / "data" / "beside.parquet").symlink_to("shard.parquet")
    (shared / "all").symlink_to(outside)
    mount = f"cluster.mounts=[{tmp_path}/mounted:/shared,/runs]"
    submit = ("submit", *IN_CONTAINER, "runs=/runs", mount, "--dry-run")
    code, _, errors = harness(*submit, "data.path=/shared/data")
    assert "is a link to" not in errors
    code, _, errors = harness(*submit, "data.path=/shared/all")
    assert (code, f"{tmp_path}/mounted/all is a link to {outside}, which no mount" in errors) == (2, True)
    (shared / "data" / "one.parquet").symlink_to(outside / "shard.parquet")
    code, _, errors = harness(*submit, "data.path=/shared/data")
    assert (code, f"one.parquet is a link to {outside}/shard.parquet, which no mount" in errors) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.micro_batch_size=3"], "a global batch of 16 samples is not a multiple of"),
        (["data.sequence_length=8192"], "longer than the model's max_sequence_length"),
        (["model.vocab_size=null"], "the vocabulary size is unknown"),
    ],
)
def test_what_a_run_refuses_without_its_data_is_refused_before_it_is_submitted(harness, tmp_path, arguments, message):
    usual = ("submit", "pretrain", "cluster=local_cpu", f"runs={tmp_path}", "data.path=/corpus", "model.vocab_size=512")
    assert harness(*usual, "--dry-run")[0] == 0
    code, printed, errors = harness(*usual, *arguments, "--dry-run")
    assert (code, printed, message in errors) == (2, "", True)


@pytest.mark.parametrize("name", ["a,b", "a=b", "a(b)", "[a]", "a&b", "a:b", "a|b", "a*b", "a@b+c"])
def test_the_recipe_reads_the_folder_of_a_run_as_it_is(harness, tmp_path, name):
    (tmp_path / name / "x-001").mkdir(parents=True)
    code, printed, errors = harness("submit", "sft_tiny", f"run_dir='{tmp_path / name / 'x-001'}'", "--dry-run")
    assert code == 0, errors
    line = next(line for line in printed.splitlines() if line.startswith("program=("))
    words = shlex.split(line.removeprefix("program=(").removesuffix(")"))[3:]
    assert compose_config("sft", SftConfig, words).run_dir == str(tmp_path / name / "x-001")


def test_the_name_of_a_job_is_one_of_a_file_for_a_run_that_exists_too(harness, tmp_path):
    code, _, errors = harness("submit", "sft_tiny", "name=a/b", f"run_dir={tmp_path}", "--dry-run")
    assert (code, "'a/b' is not a valid name" in errors) == (2, True)
