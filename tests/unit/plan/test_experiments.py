"""The experiments for H100 nodes: their files quote the memory and speed of the plan."""

from __future__ import annotations

import re

import pytest
from engine_backends import golden, question
from small_packs import write_packs

from harness.config import CONFIGS, compose_config
from harness.errors import ConfigError
from harness.loader import DataConfig, RunData, open_datasets
from harness.megatron.run.checks import check
from harness.plan.run_plan import AssumedPacks, plan_run
from harness.plan.settings import SftConfig
from harness.records import Pack

NAMES = sorted(file.stem for file in (CONFIGS / "experiment").glob("*node*.yaml"))


def test_every_known_transformer_engine_trains_every_experiment_by_cudnn_s_kernel() -> None:
    asked = [name for name, one in golden()["questions"].items() if one is not None]
    assert sorted(golden()["questions"]) == NAMES
    for version, found in golden()["versions"].items():
        chosen = {name: one["plain"] for name, one in found["answers"].items()}
        assert chosen == dict.fromkeys(asked, "fused"), version


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("experiments") / "data"
    write_packs(path, [Pack([1, 2, 3], [1, 1, 0], [0])], pack_size=8192)
    return open_datasets(DataConfig(path=str(path)))


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_fits_its_number_of_ranks_alone_and_its_file_quotes_the_plan(name: str, data: RunData) -> None:
    config = compose_config("sft", SftConfig, [f"experiment={name}"])
    ranks = config.parallel.ranks
    config.check(ranks)
    assert check(config, data) == config.model.vocab_size
    with pytest.raises(ConfigError, match=f"planned for {ranks:,} ranks, but the job has 16"):
        config.check(16)
    text = (CONFIGS / "experiment" / f"{name}.yaml").read_text()
    pack_size = int(re.findall(r"data.pack_size=(\d+)", text)[0])
    # Else the table has to be made again: python tests/samples/engine_backends.py write
    assert golden()["questions"][name] == question(config)
    sequence_tokens = int((re.findall(r"sequence_tokens=(\d+)", text) or [1024])[0])
    planned = plan_run(config, packs=AssumedPacks(100_000, pack_size, sequence_tokens))
    assert planned.ranks == 8 * int(re.findall(r"(\d+)nodes?$", name)[0])
    assert planned.memory.fits(80 * 2**30)
    # A batch is whole rows on every rank.
    assert config.loader.global_batch_size * pack_size % (planned.ranks * config.schedule.max_tokens_per_rank) == 0
    assert planned.work is not None
    assert f"{planned.memory.total / 2**30:.1f} GiB of 80" in text
    assert f"{planned.work.microbatches} microbatches, {planned.work.tokens:,.0f} tokens per step" in text
    assert f"an estimated MFU of {planned.mfu:.0%} ({planned.step_s:.1f} s per step)" in text
