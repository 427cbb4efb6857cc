"""A CPU replaces CUDA while a job runs, and only then."""

from __future__ import annotations

import pytest
import torch

from harness.errors import ConfigError, LostRankError
from harness.megatron.job import runtime
from harness.parity.running import free_ports


def test_cuda_means_the_cpu_inside_a_cpu_job_and_nothing_is_left_behind() -> None:
    before = (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.manual_seed)
    with runtime.start("cpu") as job:
        assert (job.rank, job.world_size, job.device.type) == (0, 1, "cpu")
        made = torch.zeros(3, device="cuda")
        assert made.device.type == "cpu"
        assert made.cuda() is made
        assert made.type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert made.to("cuda").device.type == "cpu"
    assert (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.manual_seed) == before
    assert torch.zeros(3).type() == "torch.FloatTensor"
    assert not torch.distributed.is_initialized()


def test_a_job_ends_cleanly_after_an_error_and_another_can_start() -> None:
    with pytest.raises(ConfigError, match="planted"), runtime.start("cpu"):
        raise ConfigError("planted")
    assert not torch.distributed.is_initialized()
    with runtime.start("cpu"):
        assert torch.distributed.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="finds no GPU"):
        runtime.choose_device("cuda")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "1"}, "RANK is 1, but WORLD_SIZE is 1"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "but WORLD_SIZE is 2"),
    ],
)
def test_an_incomplete_or_invalid_launcher_environment_is_refused(monkeypatch, variables, message) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=message), runtime.start("cpu"):
        pass


@pytest.mark.parametrize(("backend", "number"), [("gloo", 2), ("nccl", 4)])
def test_groups_of_the_same_ranks_are_one_group_of_gloo(monkeypatch, backend, number) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, **options: object())
    with runtime._same_ranks_share_groups():
        made = {torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 1], [2, 3])}
    assert len(made) == number


def test_an_error_of_the_file_system_on_rank_0_is_one_clear_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the folder cannot be used") as error, runtime.start("cpu"):
        runtime.on_rank_0(lambda: (tmp_path / "file" / "run").mkdir(parents=True))
    assert "file" in error.value.where


@pytest.mark.parametrize(
    ("rank", "message"), [(0, "rank 1 (and 1 more) of 3 did not connect"), (1, "rank 0 cannot be reached")]
)
def test_missing_ranks_are_named(monkeypatch, rank, message) -> None:
    place = {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(LostRankError) as lost, runtime.start("cpu", meet_timeout_s=1):
        pass
    assert lost.value.what.startswith(message)
    assert lost.value.about == 1 - rank
    assert f"127.0.0.1:{place['MASTER_PORT']}" in lost.value.where
