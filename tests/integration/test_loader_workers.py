"""Worker processes change nothing but the time, and fail in words."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import FormatError, LoaderError
from harness.formats import PackReader, open_dataset
from harness.loader import Blend, JoinedReader, Loader, LoaderConfig, RankLayout
from harness.loader.order import BatchRange
from harness.loader.workers import BatchStream
from harness.schedule import ScheduleConfig
from tests.samples.small_packs import batch_digest

from .conftest import WritePacks

NUM_PACKS = 37


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, write_packs: WritePacks) -> Path:
    return write_packs(tmp_path_factory.mktemp("loader") / "packs", NUM_PACKS, format="parquet", packs_per_shard=16)


def loader(source: Path | PackReader, **settings: object) -> Loader:
    """Return a loader of rank 1 of 2, over two epochs by default."""
    own = {name: settings.pop(name) for name in ("num_epochs", "num_steps") if name in settings} or {"num_epochs": 2}
    reader = open_dataset(source) if isinstance(source, Path) else source
    config = LoaderConfig(
        **{"global_batch_size": 5, "block_packs": 4, "window_blocks": 2, "timeout_s": 60.0, **settings}
    )
    return Loader(
        reader,
        config,
        schedule=ScheduleConfig("dp_balanced", 64),
        layout=RankLayout(dp_rank=1, dp_size=2, pad_to_multiple=2),
        **own,
    )


def contents(made: Loader) -> list[tuple[int, int, list[int], str]]:
    with made:
        return [(batch.epoch, batch.step_in_epoch, batch.pack_ids.tolist(), batch_digest(batch)) for batch in made]


def test_persistent_workers_live_across_epochs_and_others_do_not(dataset: Path) -> None:
    def pids_by_epoch(persistent_workers: bool) -> list[set[int]]:
        pids: list[set[int]] = [set(), set()]
        with loader(dataset, num_workers=2, persistent_workers=persistent_workers) as made:
            for batch in made:
                pids[batch.epoch] |= set(made.worker_pids())
        return pids

    first, second = pids_by_epoch(True)
    assert first == second
    assert len(first) == 2
    first, second = pids_by_epoch(False)
    assert not first & second


def test_a_loader_can_be_iterated_again(dataset: Path) -> None:
    # As validation does. Stopping in the middle leaves batches on their way, which must not come up again.
    with loader(dataset, num_workers=2, num_epochs=1, shuffle=False) as made:
        first = []
        for batch in made:
            first.append(batch_digest(batch))
            if len(first) == 3:
                break
        again = [batch_digest(batch) for batch in made]
        third = [batch_digest(batch) for batch in made]
    assert again == third
    assert again[:3] == first
    assert len(again) == made.num_steps_per_epoch == 8


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_iteration_whose_workers_another_one_has_taken_is_refused(dataset: Path, is_whole: bool) -> None:
    with loader(dataset, num_workers=1, num_epochs=1) as made:
        expected = [batch_digest(batch) for batch in made]
        first, second = iter(made), iter(made)
        next(first)
        taken = zip(expected if is_whole else [""], second, strict=False)
        found = [batch_digest(batch) for _, batch in taken]
        with pytest.raises(LoaderError, match="another iteration over this loader has begun") as refused:
            next(first)
        assert refused.value.fix
        assert found + [batch_digest(batch) for batch in second] == expected


def test_no_process_or_shared_memory_is_left_over(dataset: Path) -> None:
    shared_before = set(Path("/dev/shm").iterdir())
    made = loader(dataset, num_workers=2, num_epochs=6)
    open_files = []
    for batch in made:
        open_files.append(len(list(Path("/proc/self/fd").iterdir())))
        if batch.step_in_epoch == 1:
            pids = made.worker_pids()
    made.close()
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    # Other processes of the machine come and go there too; torch puts its process id into its names.
    left = [path.name for path in set(Path("/dev/shm").iterdir()) - shared_before]
    assert not [name for name in left if any(str(pid) in name for pid in (*pids, os.getpid()))]
    # Nothing is opened with the batches: what is open after the first is open after the last.
    assert max(open_files[4:]) <= max(open_files[:4])


def test_a_loader_and_its_workers_need_no_pytorch(dataset: Path) -> None:
    code = """
import sys
from harness import Loader, LoaderConfig, open_dataset
sys.modules["torch"] = None
with Loader(open_dataset(sys.argv[1]), LoaderConfig(global_batch_size=5, num_workers=1), num_epochs=1) as loader:
    print(sum(len(batch.pack_ids) for batch in loader))
"""
    done = subprocess.run([sys.executable, "-c", code, str(dataset)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{NUM_PACKS}\n"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_arrives_as_itself(tmp_path: Path, num_workers: int, write_packs: WritePacks) -> None:
    folder = write_packs(tmp_path / "packs", NUM_PACKS, format="parquet", packs_per_shard=16)
    made = loader(folder, num_workers=num_workers)
    shard = max(folder.rglob("*.parquet"), key=lambda path: path.stat().st_size)
    damaged = bytearray(shard.read_bytes())
    for at in range(200, len(damaged) // 2, 50):
        damaged[at] ^= 0xFF
    shard.write_bytes(damaged)
    with pytest.raises(FormatError) as caught:
        contents(made)
    assert shard.name in caught.value.where
    assert caught.value.fix


def test_a_forked_worker_leaves_the_garbage_of_the_training_process_alone() -> None:
    # As a group of gloo, whose end waits for a thread that a fork does not copy.
    class Deadly:
        def __init__(self) -> None:
            self.itself, self.owner = self, os.getpid()

        def __del__(self) -> None:
            if os.getpid() != self.owner:
                os._exit(9)

    def read_after_collecting(batch: BatchRange) -> int:
        gc.collect()
        return batch.index

    gc.collect()
    gc.disable()
    try:
        Deadly()
        config = LoaderConfig(num_workers=1, start_method="fork", timeout_s=60.0)
        with BatchStream(read_after_collecting, config, where="here") as stream:
            assert list(stream.read([BatchRange(0, number, 0, 1) for number in range(3)])) == [0, 1, 2]
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_weighted_blend_whose_workers_are_ended_is_not_drawn_to_its_end(dataset: Path) -> None:
    reader = JoinedReader([open_dataset(dataset), open_dataset(dataset)])
    blend = Blend(("a", "b"), (NUM_PACKS, NUM_PACKS), (1.0, 1.0), (None, None))
    config = LoaderConfig(global_batch_size=4, num_workers=1)
    made = Loader(reader, config, schedule=ScheduleConfig("dp_balanced", 64), blend=blend)
    batches = iter(made)
    next(batches)
    made.close()
    assert next(batches, None) is None
