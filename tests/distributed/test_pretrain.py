"""Real runs of `recipes.pretrain`: the same on every layout, over a stop, and with a corpus blended with SFT data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_packs import VOCAB

from harness.errors import HarnessError, LoaderError
from harness.indexed.index import IndexedWriter
from harness.recipes import pretrain as recipe

from .conftest import Run, forked, read_metrics, run_command, run_here

SMALL = (
    *("model.num_layers=4", "model.hidden_size=32", "model.ffn_hidden_size=64", f"model.vocab_size={VOCAB}"),
    *("loader.global_batch_size=6", "loader.num_workers=1", "data.sequence_length=64", "data.split='90,10,0'"),
    *("data.eod=0", "data.reset_attention_mask=true", "data.reset_position_ids=true", "optimizer.decay_steps=10"),
    *("trainer.device=cpu", "trainer.record_digests=true", "trainer.checkpoint_interval=3"),
    *("trainer.eval_interval=3", "trainer.eval_batches=1"),
)
# Layouts of two data-parallel or context-parallel ranks of two stages.
AT_NIGHT = ("pp2", "pp2_cp2")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "pairs_text_document"
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix) as writer:
        for length in rng.integers(10, 150, 150):
            document = np.append(rng.integers(1, 290) + np.arange(length) % 7, 0)
            writer.append(document, np.array([length + 1]))
    return prefix


@pytest.fixture(scope="module")
def pretrain(corpus: Path) -> Callable[..., Run]:
    """pretrain(folder, *overrides, ranks=1): run to the end."""

    def run(folder: Path, *overrides: str, ranks: int = 1) -> Run:
        settings = [f"data.path={corpus}", f"data.path_to_cache={corpus.parent / 'cache'}", f"run_dir={folder}"]
        if ranks == 1:
            run_here(recipe, recipe.PretrainConfig, [*settings, *SMALL, *overrides])
            return Run(0, "", read_metrics(folder))
        code, output = run_command([*forked(ranks), "harness.recipes.pretrain", *settings, *SMALL, *overrides])
        return Run(code, output, read_metrics(folder))

    return run


@pytest.fixture(scope="module")
def whole(pretrain, tmp_path_factory) -> Path:
    """A run of six steps on one rank."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    pretrain(folder, "trainer.steps=6")
    return folder


def digests(folder: Path) -> list[str]:
    return [json.loads(line)["digest"] for line in (folder / "digests.jsonl").read_text().splitlines()]


def stopped_after(whole: Path, folder: Path, step: int) -> Path:
    """Copy a run as if it had been stopped after `step`. Layouts are compared from one checkpoint, not from a seed."""
    shutil.copytree(whole, folder)
    for path in (folder / "checkpoints").iterdir():
        if path.name != f"step-{step:08d}":
            shutil.rmtree(path)
    return folder


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param("tp2_sp", marks=pytest.mark.submission),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT),
    ],
)
def test_a_stopped_run_resumes_with_other_ranks_and_trains_the_same_samples(pretrain, whole, tmp_path, parallel):
    expected = Run(0, "", read_metrics(whole))
    assert expected.column("packs_consumed") == [6, 12, 18, 24, 30, 36]
    assert expected.column("tokens") == [6 * 64] * 6
    assert expected.column("loss")[-1] < expected.column("loss")[0]
    assert (whole / "report.md").exists()

    folder = stopped_after(whole, tmp_path / "parts", 3)
    other = ("resume=true", f"parallel={parallel}", "loader.num_workers=0")
    rest = pretrain(folder, "trainer.steps=6", *other, ranks=4 if parallel in AT_NIGHT else 2)
    assert rest.code == 0, rest.output
    assert rest.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5)
    assert rest.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-4)
    assert rest.metrics[5]["validation_loss"] == pytest.approx(expected.metrics[5]["validation_loss"], rel=1e-5)
    assert digests(folder) == digests(whole)


def test_an_order_that_more_steps_would_change_is_refused_and_not_trained(pretrain, whole, tmp_path) -> None:
    folder = stopped_after(whole, tmp_path / "run", 3)
    with pytest.raises(LoaderError, match="in another order"):
        pretrain(folder, "trainer.steps=60", "resume=true")
    assert read_metrics(folder) == read_metrics(whole)


def test_a_run_resumes_after_its_consumed_samples_with_another_batch_size(pretrain, whole, tmp_path) -> None:
    folder = stopped_after(whole, tmp_path / "run", 3)
    more = pretrain(folder, "trainer.steps=5", "resume=true", "loader.global_batch_size=3")
    assert more.column("step") == [1, 2, 3, 4, 5]
    assert more.column("packs_consumed") == [6, 12, 18, 21, 24]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("data.eod=300",), "data.eod is 300, but the model has 300"),
        (
            ("data.reset_attention_mask=false",),
            "data.reset_position_ids is true, and data.reset_attention_mask is false",
        ),
        (("trainer.early_stop=1", "trainer.eval_interval=0"), "early_stop requires validations"),
        (("trainer.early_stop=1", "data.split='100'"), "early_stop requires validations"),
        (("trainer.sample_prompts=[hello]",), "which a corpus does not specify"),
        (("loader.global_batch_size=7", "data.micro_batch_size=2"), "not a multiple of 2"),
        (("data.sequence_length=5000",), "longer than the model's max_sequence_length"),
        (
            (
                *("model.vocab_size=null", "data.eod=null", "data.reset_attention_mask=false"),
                "data.reset_position_ids=false",
            ),
            "a corpus does not store it",
        ),
        (
            ("data.blend_per_split.train=[{path:a,weight:1.0},{path:b,weight:2.0}]", "trainer.eval_batches=null"),
            "its validation must be set",
        ),
        (("+data.blend_per_split.training=[{path:a}]",), "unknown setting 'data.blend_per_split.training'"),
    ],
)
def test_settings_that_cannot_train_are_refused_by_name(pretrain, tmp_path, settings, message) -> None:
    with pytest.raises(HarnessError) as refused:
        pretrain(tmp_path / "run", *settings)
    assert message in refused.value.what
    assert refused.value.fix


@pytest.mark.nightly
def test_a_corpus_and_sft_data_train_in_one_run(pretrain, corpus, dataset, tmp_path) -> None:
    blend = [
        *(f"data.blend=[{{path:{corpus},weight:0.5}},{{path:{dataset},weight:0.5}}]", "data.sequence_length=256"),
        *("data.micro_batch_size=3", "trainer.steps=4"),
    ]
    first = pretrain(tmp_path / "one", *blend)
    assert first.code == 0, first.output
    folder = stopped_after(tmp_path / "one", tmp_path / "two", 3)
    two = pretrain(folder, *blend, "resume=true", "parallel=pp2", ranks=2)
    assert two.code == 0, two.output
    assert two.column("loss") == pytest.approx(first.column("loss"), rel=1e-5)
    # Packs have prompts, which are not trained, and are shorter than samples of the corpus.
    assert all(line["trained_tokens"] < line["tokens"] < 6 * 256 for line in first.metrics)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


@pytest.mark.nightly
def test_all_ranks_end_with_the_reason_if_a_pair_is_damaged(pretrain, tmp_path) -> None:
    Path(f"{tmp_path}/x.bin").write_bytes(b"\0\0")
    Path(f"{tmp_path}/x.idx").write_bytes(b"nonsense" * 9)
    done = pretrain(tmp_path / "run", f"data.path={tmp_path}/x", ranks=2)
    assert done.code == 1
    assert "FormatError: begins with b'nonsensen'" in done.output, done.output
    assert f"where: {tmp_path}/x.idx" in done.output
