"""The resumable stream that all adapters are made of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from harness import Loader, LoaderConfig, open_dataset, open_writer
from harness.errors import ConfigError, LoaderError
from harness.integrations import INTEGRATIONS, RankStream, registry, require
from harness.loader import RankLayout
from harness.records import Pack


def write_packs(path: Path, lengths: Sequence[Sequence[int]]) -> str:
    with open_writer(str(path), format="memmap", pack_size=64) as writer:
        for number, sizes in enumerate(lengths):
            ends = np.cumsum(sizes)
            mask = np.ones(ends[-1], np.uint8)
            mask[ends - 1] = 0
            writer.append(Pack(np.arange(ends[-1]) + 100 * number, mask, ends - sizes))
    return str(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_packs(tmp_path_factory.mktemp("data") / "packs", [[3 + n % 5, 4 + n % 3] for n in range(10)])


def stream(path: str, size: int = 4, **more: object) -> RankStream:
    return RankStream(path, LoaderConfig(global_batch_size=size, seed=3, num_workers=0), **more)  # type: ignore[arg-type]


def test_a_position_in_the_middle_is_loaded_on_another_number_of_ranks(path: str) -> None:
    whole = [batch.pack_ids.tolist() for batch in islice(stream(path), 5)]
    first = stream(path, dp_rank=1, dp_size=2)
    read = [batch.pack_ids.tolist() for batch in islice(first, 2)]
    position = json.loads(json.dumps(first.state_dict()))
    for rank in range(3):
        second = stream(path, dp_rank=rank, dp_size=3)
        second.load_state_dict(position)

        assert read + [batch.pack_ids.tolist() for batch in islice(second, 3)] == whole


def test_a_stream_without_its_rank_is_refused_in_a_job_of_several(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stream(path).layout.dp_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    for given in ({}, {"dp_size": 2}):
        with pytest.raises(ConfigError, match=r"2 ranks, but dp_rank or dp_size is not set: .* the same packs"):
            stream(path, **given)
    with pytest.raises(ConfigError, match="dp_rank and dp_size"):
        Loader(open_dataset(path), LoaderConfig(num_workers=0))
    assert stream(path, dp_rank=1, dp_size=2).layout.dp_rank == 1
    assert stream(path, dp_rank=0, dp_size=1).layout.dp_size == 1
    assert stream(path, layout=RankLayout(dp_size=2)).layout.dp_size == 2


def test_one_epoch_ends_with_its_last_packs_and_an_iterator_that_was_left_is_refused(path: str) -> None:
    data = stream(path)

    assert [batch.pack_ids.shape[0] for batch in data.one_epoch()] == [4, 4, 2]
    assert [(batch.epoch, batch.step_in_epoch) for batch in data.one_epoch()] == [(1, 0), (1, 1), (1, 2)]
    assert data.num_steps_per_epoch == 3
    data = stream(path)
    left = iter(data)
    next(left)
    again = iter(data)
    with pytest.raises(LoaderError, match="closed or replaced by another iterator"):
        next(left)

    assert next(again).step_in_epoch == 1


def test_a_position_of_other_data_is_refused(path: str, tmp_path: Path) -> None:
    other = stream(write_packs(tmp_path / "other", [[5, 4]] * 6))
    data = stream(path)
    next(iter(data))
    before = data.state_dict()
    with pytest.raises(LoaderError, match="fingerprint"):
        data.load_state_dict(other.state_dict())

    assert data.state_dict() == before


@pytest.mark.parametrize(
    "wrong", [{}, {"seed": 1}, {"seed": 3.0}, {"epoch": object()}, {"packs_consumed": -1}, {"packs_consumed": "4"}]
)
def test_a_value_that_is_no_position_is_refused(path: str, wrong: dict[str, object]) -> None:
    data = stream(path)
    state = {**data.state_dict(), **wrong} if wrong and wrong != {"seed": 1} else wrong
    with pytest.raises(LoaderError):
        data.load_state_dict(state)


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = registry.Integration(("torch", "nothing_of_that_name.inner"), "pip install nothing")
    monkeypatch.setattr(registry, "INTEGRATIONS", {"torch": nothing})
    with pytest.raises(ConfigError, match=r"requires nothing_of_that_name.inner \(not installed\)") as refused:
        require("torch")

    assert refused.value.fix == "pip install nothing"
    assert "torchtitan" in INTEGRATIONS


def test_the_package_imports_no_training_framework() -> None:
    code = "import sys, harness.integrations; print({'torch', 'transformers', 'megatron'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"
