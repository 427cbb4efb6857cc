"""A dataset that is replaced while it is read: readers get the old packs or an error, and never a mix."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from counted_calls import Commands, Ran
from live_streams import some_packs
from small_packs import write_packs

from harness.errors import FormatError
from harness.formats import FORMATS, PackReader, open_dataset, open_writer
from harness.prep.pipeline import repack_store
from harness.records import Pack

pytestmark = pytest.mark.submission

OLD = some_packs(24)
# The same lengths, bounds and masks, so that nothing but their tokens tells them apart.
NEW = [Pack((pack.input_ids + 7) % 300, pack.loss_mask, pack.seq_start_id) for pack in OLD]


def write(path: Path, packs: list[Pack], format: str, *, stages: Callable[[], None] = lambda: None) -> None:
    with open_writer(path, format=format, pack_size=64, packs_per_shard=5, overwrite=True) as writer:
        stages()
        for number, pack in enumerate(packs):
            writer.append(pack)
            if number % 8 == 0:
                stages()
    stages()


def write_plan(path: Path, packs: list[Pack], *, stages: Callable[[], None] = lambda: None) -> None:
    """Replace the store below a plan, then the plan."""
    write(path.with_name("store"), packs, "virtual", stages=stages)
    repack_store(str(path.with_name("store")), str(path), pack_size=64, algorithm="next_fit", overwrite=True)
    stages()


def write_bare(path: Path, packs: list[Pack], format: str, *, stages: Callable[[], None] = lambda: None) -> None:
    """Replace a folder of shards as another tool does, which knows no manifest."""
    write(path.with_name("elsewhere"), packs, format)
    (path.with_name("elsewhere") / "manifest.json").unlink()
    shutil.rmtree(path.with_name("elsewhere") / "index")
    for entry in path.with_name("elsewhere").iterdir():
        entry.rename(entry.with_name(entry.name.replace("shard", "part").replace("chunk", "part")))
    shutil.rmtree(path, ignore_errors=True)
    stages()
    path.with_name("elsewhere").rename(path)
    stages()


LAYOUTS: dict[str, Callable[..., None]] = {
    **{format: lambda path, packs, format=format, **more: write(path, packs, format, **more) for format in FORMATS},
    **{
        f"bare {format}": lambda path, packs, format=format, **more: write_bare(path, packs, format, **more)
        for format in FORMATS
    },
    "one.parquet": lambda path, packs, **more: write(path.with_name("one.parquet"), packs, "parquet", **more),
    "one.npy": lambda path, packs, **more: write(path.with_name("one.npy"), packs, "npy", **more),
    "plan": write_plan,
}


def places(layout: str, folder: Path) -> Path:
    return folder / (layout if layout.startswith("one.") else "data")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_readers_of_a_replaced_dataset_get_old_packs_or_an_error(tmp_path: Path, layout: str) -> None:
    replace, path = LAYOUTS[layout], places(layout, tmp_path)
    replace(tmp_path / "data", NEW)
    new = list(open_dataset(path))
    replace(tmp_path / "data", OLD)
    untouched, used, closed = (open_dataset(path) for _ in range(3))
    old = list(used)
    assert [pack.sequence_lengths.tolist() for pack in old] == [pack.sequence_lengths.tolist() for pack in new]
    assert not {key(pack) for pack in old} & {key(pack) for pack in new}
    list(closed)
    closed.close()
    pickled = pickle.dumps(used)
    refused = 0

    def look() -> None:
        nonlocal refused
        for reader in (untouched, used, closed, *unpickled(pickled)):
            refused += check(reader, old)
        refused += check_anew(path, old, new)

    replace(tmp_path / "data", NEW, stages=look)
    look()
    assert refused > 0
    assert list(map(key, open_dataset(path))) == list(map(key, new))


def unpickled(data: bytes) -> Iterator[PackReader]:
    try:
        yield pickle.loads(data)
    except FormatError:
        return


def check(reader: PackReader, old: list[Pack]) -> int:
    """Read all packs of an old reader one by one; return how many it refused."""
    refused = 0
    for number, pack in enumerate(old):
        try:
            found = reader[number]
        except FormatError:
            refused += 1
        else:
            assert key(found) == key(pack), f"pack {number} is a new one"
    return refused


def check_anew(path: Path, old: list[Pack], new: list[Pack]) -> int:
    """Open the dataset during the replacement: it is refused, or whole and of one side."""
    try:
        packs = list(map(key, open_dataset(path)))
    except FormatError:
        return 1
    assert packs in (list(map(key, old)), list(map(key, new)))
    return 0


def key(pack: Pack) -> bytes:
    return pack.input_ids.tobytes()


@pytest.mark.parametrize(("format", "file"), [("memmap", "shard_000000/input_ids.npy"), ("binidx", "shard_000000.bin")])
def test_a_command_whose_input_is_cut_short_names_the_file(commands, tmp_path, format, file) -> None:
    write_packs(tmp_path / "kept", OLD * 8, format=format, pack_size=64)
    data, out = tmp_path / "data", tmp_path / "out"

    def convert(at: int = -1) -> Ran:
        for old in (data, out):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", data)
        both = ["harness", "convert", data, out, "memmap"], ["tests.kills.cut_short", data / file]
        return commands.run(*both[: 1 + (at >= 0)], root=out, at=at, stops=at >= 0)

    whole = convert()
    assert whole.code == 0, whole.output
    # Before the file is opened, once it is mapped, and in the middle of its packs.
    calls = [0, whole.calls.index("open /shard_000000/input_ids.npy.tmp"), whole.count // 5]
    found = [
        "bytes, ",
        "the file was truncated or removed, or its disk failed, while it was read: byte",
        "the file was truncated or removed, or its disk failed, while it was read: byte",
    ]
    for at, text in zip(calls, found, strict=True):
        ran = convert(at)
        assert ran.codes == [2, 0], f"cut in call {at}, {ran.died_in}: {ran.output}"
        assert text in ran.output
        assert f"where: {data / file}\n" in ran.output
        assert "Traceback" not in ran.output


@pytest.mark.parametrize("name", ["packs", "plan"])
def test_sixteen_processes_read_one_dataset_alike(commands: Commands, tmp_path: Path, name: str) -> None:
    path = write_packs(tmp_path / "data", OLD, format="parquet" if name == "packs" else "virtual", pack_size=64)
    if name == "plan":  # whose fingerprint the first of them computes and keeps for the others
        repack_store(str(path), str(path := tmp_path / "plan"), pack_size=50)
    ran = commands.run(*[["harness", "inspect", path, "--json"]] * 16, root=tmp_path)
    assert ran.codes == [0] * 16, ran.output
    texts = ran.output.split("\n]\n") if "\n]\n" in ran.output else ran.output.split("\n}\n")
    assert len({text.strip() for text in texts if text.strip()}) == 1
