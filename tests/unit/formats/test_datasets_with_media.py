"""Images and sounds lie beside the shards of every format, and nothing trains their placeholders without them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_packs import PACKS, write_packs

from harness import LoaderConfig, Pack, open_dataset
from harness.config import compose_config
from harness.errors import ConfigError, FormatError, HarnessError
from harness.formats import (
    FORMATS,
    Provenance,
    convert_dataset,
    diff_datasets,
    load_manifest,
    open_writer,
    repair_manifest,
    verify_dataset,
)
from harness.formats.foreign import export_to_bridge, export_to_swift
from harness.formats.inspect import inspect_dataset
from harness.formats.layouts.virtual import open_store
from harness.formats.media import MEDIA_DTYPE, check_rows, read_data
from harness.integrations import RankStream
from harness.integrations.packed_sft import create_sft_dataset
from harness.integrations.torch import StoredRows
from harness.loader import BatchRange, DataConfig, JoinedReader, Loader, RankLayout, open_datasets
from harness.loader.live.produce import read_packs
from harness.loader.plan import BatchReader
from harness.megatron.data.feed import LengthsOnly
from harness.plan import PretrainConfig
from harness.prep.pipeline import repack_store
from harness.records import MEDIA_KINDS, Medium
from harness.schedule import ScheduleConfig, SequenceCost
from harness.storage.inputs import LocalSource, open_source

SAME = b"the same logo in many conversations"
SOUND = Medium("audio", 1, 2, b"RIFF a sound")
FIRST = Pack([5, 9, 9, 7, 8, 6], [0, 0, 1, 0, 1, 0], [0, 4], (SOUND, Medium("image", 4, 1, SAME)))


def random_packs(seed: int, count: int = 9) -> list[Pack]:
    """Packs of sequences with none, one or several media, next to each other or at the beginning, and packs without."""
    rng = np.random.default_rng(seed)
    packs = []
    for _ in range(count):
        ids, mask, starts, media = [], [], [], []
        for _ in range(rng.integers(1, 5)):
            starts.append(len(ids))
            for _ in range(rng.integers(1, 4)):
                if rng.random() < 0.5:
                    tokens = int(rng.integers(1, 6))
                    data = SAME if rng.random() < 0.3 else rng.bytes(int(rng.integers(0, 2000)))
                    media.append(Medium(str(rng.choice(MEDIA_KINDS)), len(ids), tokens, data))
                    if mask and starts[-1] < len(ids):
                        mask[-1] = 0
                    ids += [299] * tokens
                    mask += [0] * tokens
                else:
                    tokens = int(rng.integers(1, 9))
                    ids += rng.integers(0, 290, tokens).tolist()
                    mask += rng.integers(0, 2, tokens).tolist()
            if len(ids) == starts[-1] + 1 or (media and media[-1].start + media[-1].tokens == len(ids)):
                ids, mask = [*ids, 1], [*mask, 0]
            mask[-1] = 0
        packs.append(Pack(ids, mask, starts, tuple(media)))
    return packs


def write(path: Path, packs: list[Pack], format: str = "parquet", **settings: Any) -> Path:
    return write_packs(path, packs, format=format, **{"pack_size": 100, "packs_per_shard": 4} | settings)


def interrupt(path: Path, packs: list[Pack], **settings: Any) -> None:
    """Kill a process that has written up to the last of these packs."""
    child = os.fork()
    if child == 0:
        try:
            with open_writer(path, **settings) as writer:
                for pack in packs[writer.num_packs :]:
                    writer.append(pack)
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def without_media(pack: Pack) -> Pack:
    return Pack(pack.input_ids, pack.loss_mask, pack.seq_start_id)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("format", FORMATS)
def test_packs_with_media_are_read_and_converted_as_they_were_written(tmp_path: Path, format: str) -> None:
    packs = random_packs(FORMATS.index(format))
    path = write(tmp_path / "data", packs, format)

    reader = open_dataset(path)

    assert reader.has_media
    assert [*reader] == packs
    assert reader.read([5, 0, 5, -1]) == [packs[5], packs[0], packs[5], packs[-1]]
    assert reader.read_tokens([5, 0]) == [without_media(packs[5]), without_media(packs[0])]
    of_each = [sequence.media for pack in packs for sequence in pack.sequences()]
    assert reader.read_media(np.arange(len(of_each))) == of_each
    assert reader.read_media([3, 0, 3]) == [of_each[3], of_each[0], of_each[3]]
    assert verify_dataset(path) == []
    assert reader.fingerprint == open_dataset(write(tmp_path / "other", packs, "npy", packs_per_shard=2)).fingerprint
    for other in FORMATS:
        convert_dataset(path, tmp_path / other, format=other, packs_per_shard=3)
        assert diff_datasets(path, tmp_path / other) is None
    assert [*open_dataset(tmp_path / "binidx")] == packs
    assert inspect_dataset(str(path))["media"] == {
        kind: count for kind in MEDIA_KINDS if (count := sum(one.kind == kind for media in of_each for one in media))
    }


def test_the_same_bytes_are_stored_once_in_a_shard_and_a_shard_without_media_has_no_file(tmp_path: Path) -> None:
    path = write(tmp_path / "data", [FIRST, FIRST, PACKS[0], PACKS[1], FIRST], packs_per_shard=2)
    assert (path / "shard_000000.media").read_bytes() == SOUND.data + SAME
    assert sorted(file.name for file in path.glob("*.media")) == ["shard_000000.media", "shard_000002.media"]
    rows = np.load(path / "index/media.npy")
    assert rows[["sequence", "start", "tokens", "shard", "offset"]].tolist()[2:] == [
        (2, 1, 2, 0, 0),
        (3, 0, 1, 0, 12),
        (8, 1, 2, 2, 0),
        (9, 0, 1, 2, 12),
    ]


def test_a_dataset_without_media_has_no_trace_of_them_and_old_programs_refuse_one_with_some(tmp_path: Path) -> None:
    path = write(tmp_path / "data", PACKS)
    stored = json.loads((path / "manifest.json").read_bytes())
    reader = open_dataset(path)
    assert (stored["version"], "num_media" in stored) == (2, False)
    assert not [*path.rglob("*media*")]
    assert not reader.has_media
    assert reader.read_media([0, 1]) == [(), ()]
    stored = json.loads((write(tmp_path / "media", [FIRST]) / "manifest.json").read_bytes())
    assert (stored["version"], stored["num_media"]) == (3, 2)


@pytest.mark.parametrize(
    "media",
    [
        (SOUND, Medium("image", 4, 1, b"another picture")),
        (Medium("image", 1, 2, SOUND.data), FIRST.media[1]),
        (Medium("audio", 1, 1, SOUND.data), FIRST.media[1]),
        (Medium("audio", 0, 2, SOUND.data), FIRST.media[1]),
        (SOUND,),
        (),
    ],
)
def test_other_media_are_another_dataset_and_their_difference_is_found(tmp_path: Path, media: Any) -> None:
    other = Pack(FIRST.input_ids, [0] * 6, FIRST.seq_start_id, media)
    first = Pack(FIRST.input_ids, [0] * 6, FIRST.seq_start_id, FIRST.media)
    a, b = write(tmp_path / "a", [first]), write(tmp_path / "b", [other])
    assert open_dataset(a).fingerprint != open_dataset(b).fingerprint
    difference = diff_datasets(a, b)
    assert difference is not None
    assert difference.field.startswith("media.")


def test_a_medium_in_another_sequence_is_another_dataset(tmp_path: Path) -> None:
    packs = [Pack([9, 1, 9, 1], [0] * 4, [0, 2], (Medium("image", start, 1, SAME),)) for start in (0, 2)]
    a, b = (write(tmp_path / str(number), [pack]) for number, pack in enumerate(packs))
    assert open_dataset(a).fingerprint != open_dataset(b).fingerprint
    assert str(diff_datasets(a, b)) == "pack 0, media.sequence[0]: 0 and 1"


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_byte_is_found_when_it_is_read_and_by_verify(tmp_path: Path, format: str) -> None:
    packs = [FIRST, PACKS[0], FIRST]
    path = write(tmp_path / "data", packs, format, packs_per_shard=2)
    [*_, file] = sorted(path.glob("*.media"))
    flip(file, 14)

    reader = open_dataset(path)

    assert reader.read_tokens([2]) == [without_media(FIRST)]
    assert reader.read_media([4]) == [(SOUND,)]
    for read in (lambda: reader[2], lambda: reader.read_media([0, 5])):
        with pytest.raises(FormatError, match="medium 0 of sequence 5, image, does not match its checksum") as it:
            read()
        assert it.value.where == f"{file}, bytes 12 to {12 + len(SAME)}"
        assert it.value.fix
    found = [str(problem) for problem in verify_dataset(path)]
    assert len(found) == 2
    assert "medium 0 of sequence 5" in found[1]


def test_a_missing_or_short_file_is_refused_when_the_dataset_is_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "data", [FIRST])
    file = path / "shard_000000.media"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(FormatError, match=r"file of shard 0 has 46 bytes, the manifest says 47"):
        open_dataset(path)
    reader = open_dataset(write(tmp_path / "other", [FIRST]))
    (tmp_path / "other/shard_000000.media").unlink()
    with pytest.raises(FormatError, match="media cannot be read: No such file"):
        reader.read_media([0])
    file.unlink()
    with pytest.raises(FormatError, match="file of shard 0 is missing"):
        open_dataset(path)
    assert verify_dataset(path)


def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "data", PACKS[:2])
    (path / "shard_000000.media").write_bytes(b"left")
    with pytest.raises(FormatError, match=r"shards not in the manifest: 1, such as shard_000000\.media"):
        open_dataset(path)
    write(path, PACKS[:2], overwrite=True)
    assert not [*path.glob("*.media")]


@pytest.mark.parametrize("format", FORMATS)
def test_an_interrupted_write_continues_with_the_media_of_its_whole_shards(tmp_path: Path, format: str) -> None:
    packs = random_packs(7, 8)
    settings = {"format": format, "pack_size": 100, "packs_per_shard": 3, "resume_key": "k"}
    for stop in (2, 5, 7):
        interrupt(tmp_path / "data", packs[:stop], **settings)
    flip(sorted((tmp_path / "data").glob("*.media"))[1], 3)  # damaged since
    with open_writer(tmp_path / "data", **settings) as writer:
        assert writer.num_packs == 3
        for pack in packs[3:]:
            writer.append(pack)
    assert not [*(tmp_path / "data").rglob("*.tmp")]
    assert [*open_dataset(tmp_path / "data")] == packs
    assert open_dataset(tmp_path / "data").fingerprint == open_dataset(write(tmp_path / "one", packs)).fingerprint
    assert verify_dataset(tmp_path / "data") == []


def test_a_plan_reads_the_media_of_its_store(tmp_path: Path) -> None:
    packs = random_packs(11)
    store = write(tmp_path / "store", packs, "virtual")
    repack_store(store, tmp_path / "plan", pack_size=60, seed=3)

    reader = open_dataset(tmp_path / "plan")

    stored = [sequence for pack in packs for sequence in pack.sequences()]
    read = [sequence for pack in reader for sequence in pack.sequences()]
    assert sorted((one.input_ids.tobytes(), repr(one.media)) for one in read) == sorted(
        (one.input_ids.tobytes(), repr(one.media)) for one in stored
    )
    assert reader.read_media(range(len(read))) == [one.media for one in read]
    assert verify_dataset(tmp_path / "plan") == []
    convert_dataset(tmp_path / "plan", tmp_path / "out", format="parquet")
    assert open_dataset(tmp_path / "out").fingerprint == reader.fingerprint
    repack_store(tmp_path / "plan", tmp_path / "again", pack_size=80)
    assert open_store(tmp_path / "again").manifest.num_media == load_manifest(tmp_path / "again").num_media
    flip(store / "shard_000001.media", 0)
    with pytest.raises(FormatError, match="does not match its checksum") as it:
        list(reader)
    assert str(store / "shard_000001.media") in it.value.where


def test_joined_datasets_with_and_without_media_read_both(tmp_path: Path) -> None:
    plain, media = write(tmp_path / "plain", PACKS), write(tmp_path / "media", [FIRST, PACKS[0]])
    joined = JoinedReader([open_dataset(path) for path in (media, plain, media)])
    assert joined.has_media
    assert joined.read([0, 2, 9]) == [FIRST, PACKS[0], FIRST]
    assert joined.read_tokens([9]) == [without_media(FIRST)]
    assert joined.read_media(np.array([18, 4, 0, 19, 18])) == [
        (SOUND,),
        (),
        (SOUND,),
        (Medium("image", 0, 1, SAME),),
        (SOUND,),
    ]
    with pytest.raises(IndexError):
        joined.read_media(np.array([22]))
    assert not JoinedReader([open_dataset(plain)] * 2).has_media


def work_of_tokens(tokens: np.ndarray) -> np.ndarray:
    return 1000.0 * tokens


def test_the_schedule_of_every_rank_knows_the_work_of_all_media_from_the_index(tmp_path: Path) -> None:
    """Also with text between datasets with media, and on ranks that read neither."""
    paths = [write(tmp_path / str(seed), random_packs(seed, 30)) for seed in (1, 2)]
    paths.insert(1, write(tmp_path / "text", PACKS * 5))
    joined = JoinedReader([open_dataset(path) for path in paths])
    packs, order = [*random_packs(1, 30), *PACKS * 5, *random_packs(2, 30)], np.random.default_rng(0)
    wanted = [sum(one.tokens for one in view.media) for pack in packs for view in pack.sequences()]
    ids = order.permutation(len(wanted))
    for some in (ids, np.sort(ids), ids[:1], ids[:0]):
        numbers, tokens = joined.media_tokens(some)
        found = np.bincount(numbers, weights=tokens, minlength=some.shape[0])
        assert found.tolist() == [wanted[number] for number in some.tolist()]
    for path in paths:  # the files of media are not needed
        for file in path.glob("*.media"):
            file.unlink()
    config, placed = LoaderConfig(global_batch_size=40, num_workers=0), []
    for source, rank in ((joined, 0), (LengthsOnly(joined), 1)):
        layout = RankLayout(dp_rank=rank, dp_size=4, is_first_stage=False)
        for encode in (work_of_tokens, None):
            schedule = ScheduleConfig("cost_balanced", 200)
            reader = BatchReader(source, config, schedule=schedule, layout=layout, cost=SequenceCost(encode=encode))
            placed.append(reader.plan(BatchRange(0, 0, 0, 40))[2:])
    (with_media, measured), (without, blind), (again, _), _ = placed
    assert with_media.order.tolist() == again.order.tolist() != without.order.tolist()
    assert measured.cost_ratio < 1.02
    assert measured.rank_cost.sum() > 100 * blind.rank_cost.sum()


def test_a_rank_reads_the_bytes_of_its_own_media_alone_and_counts_them(tmp_path: Path, monkeypatch) -> None:
    """Two ranks of a balancing schedule, each with sequences from every pack; a row reads the same bytes once."""
    random = np.random.default_rng(3)
    packs, logo = [], random.bytes(1000)
    for number in range(12):
        files = [logo if number == 5 else random.bytes(int(random.integers(300, 3000))) for _ in range(4)]
        media = tuple(Medium("image", 10 * at, 3, data) for at, data in enumerate(files))
        mask = [0, 0, 1, 1, 1, 1, 1, 1, 1, 0] * 4
        packs.append(Pack([299, 299, 299, *range(7)] * 4, mask, [0, 10, 20, 30], media))
    data = write(tmp_path / "data", packs)
    read: list[tuple[str, int, int]] = []
    original = LocalSource.read_at

    def read_at(self: LocalSource, start: int, num_bytes: int) -> bytes:
        read.extend([(self._path.name, start, num_bytes)] * (self._path.suffix == ".media"))
        return original(self, start, num_bytes)

    monkeypatch.setattr(LocalSource, "read_at", read_at)
    spans = []
    for rank in range(2):
        read.clear()
        config, schedule = LoaderConfig(global_batch_size=12, num_workers=0), ScheduleConfig("cost_balanced", 72)
        loader = Loader(
            open_dataset(data), config, schedule=schedule, dp_rank=rank, dp_size=2, features=lambda _: {}, num_steps=1
        )
        (batch,) = loader
        assert batch.media_bytes == sum(size for *_, size in read) > 0
        spans.append({(name, start + byte) for name, start, size in read for byte in range(size)})
    assert len(spans[0] | spans[1]) == sum(file.stat().st_size for file in data.glob("*.media"))
    assert len(spans[0] & spans[1]) <= len(logo)


def test_datasets_whose_media_were_made_by_other_rules_are_not_joined(tmp_path: Path) -> None:
    one, other = (
        write(tmp_path / name, [FIRST], provenance=Provenance(mask={"media": name})) for name in ("qwen", "llava")
    )
    plain = write(tmp_path / "plain", PACKS)
    assert JoinedReader([open_dataset(path) for path in (one, plain, one)]).has_media
    with pytest.raises(ConfigError, match="the same rules of media"):
        JoinedReader([open_dataset(one), open_dataset(other)])
    with pytest.raises(ConfigError, match="the media of the training set were made with qwen"):
        open_datasets(DataConfig(path=str(one), validation_path=str(other)))


def test_rows_that_are_not_of_the_dataset_are_refused(tmp_path: Path) -> None:
    rows = np.array([(0, 1, 2, 0, 0, 0, 12, 5), (1, 0, 1, 1, 0, 12, 35, 5)], MEDIA_DTYPE)
    lengths = np.array([4, 2], np.int32)
    check_rows(rows, lengths, 1, where="index")
    wrong = {"sequence": 2, "start": 2, "tokens": 3, "kind": 2, "shard": 1, "offset": -1, "num_bytes": -1}
    for name, value in wrong.items():
        changed = rows.copy()
        changed[name][1] = value
        with pytest.raises(FormatError, match="medium 1 of 2 is not part"):
            check_rows(changed, lengths, 1, where="index")
    with pytest.raises(FormatError, match="medium 1 of 2 is not part"):
        check_rows(rows[::-1].copy(), lengths, 1, where="index")

    def open_media(_: int) -> Any:
        return open_source(tmp_path / "short"), tmp_path / "short"

    (tmp_path / "short").write_bytes(b"46 bytes")
    with pytest.raises(FormatError, match="the file has 8 bytes, but a medium ends at byte 47"):
        read_data(rows, [0, 1], open_media)


def test_a_reader_maps_the_index_and_reads_no_more_of_a_file_than_its_sequences(tmp_path: Path, monkeypatch) -> None:
    from harness.storage import inputs

    media = (Medium("image", 0, 1, b"a" * 1_000_000), Medium("image", 2, 1, b"b" * 10))
    big = Pack([9, 1, 9, 1], [0] * 4, [0, 2], media)
    reader = open_dataset(write(tmp_path / "data", [big]))
    read: list[int] = []
    real = inputs.LocalSource.read_at

    def count(self: Any, start: int, num_bytes: int) -> bytes:
        read.append(num_bytes)
        return real(self, start, num_bytes)

    monkeypatch.setattr(inputs.LocalSource, "read_at", count)
    assert reader.read_media([1]) == [(Medium("image", 0, 1, b"b" * 10),)]
    assert 10 in read
    assert sum(read) < 1000


def pretrain(path: Path) -> None:
    from harness.megatron.data.corpus import find_packs  # imports Megatron-Core

    find_packs(compose_config("pretrain", PretrainConfig, [f"data.path={path}"]).data)


USERS = {
    "single npy file": lambda path: convert_dataset(path, path.with_name("out.npy"), format="npy"),
    "single parquet file": lambda path: convert_dataset(path, path.with_name("out.parquet"), format="parquet"),
    "bridge": lambda path: export_to_bridge(path, path.with_name("out")),
    "swift": lambda path: export_to_swift(path, path.with_name("out")),
    "stream": lambda path: RankStream(path, LoaderConfig(global_batch_size=1)),
    "stream of a run": lambda path: RankStream(
        open_datasets(DataConfig(path=str(path))), LoaderConfig(global_batch_size=1)
    ),
    "rows": lambda path: StoredRows(path, dialect="megatron"),
    "packed_sft": create_sft_dataset,
    "pretraining": pretrain,
    "live": lambda path: list(read_packs(str(path))),
    "one shard": lambda path: open_dataset(path / "shard_000000.parquet"),
    "a glob": lambda path: open_dataset(f"{path}/*.parquet"),
}


@pytest.mark.parametrize("user", USERS)
def test_what_would_train_placeholders_without_their_media_refuses_them_by_name(tmp_path: Path, user: str) -> None:
    path = write(tmp_path / "data", [FIRST])
    with pytest.raises(HarnessError, match=r"images or sounds|has media|with media") as it:
        USERS[user](path)
    assert it.value.fix
    assert not (tmp_path / "out.npy").exists()
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_a_dataset_with_media_whose_manifest_is_lost_is_incomplete_and_not_repaired(tmp_path, format) -> None:
    path = write(tmp_path / "data", [FIRST], format)
    (path / "manifest.json").unlink()
    with pytest.raises(FormatError, match="the dataset is incomplete"):
        open_dataset(path)
    manifest, problems, _ = repair_manifest(str(path))
    assert manifest is None
    assert [problem.what for problem in problems] == [
        "the dataset has media, whose manifest and index cannot be made again"
    ]
    (path / "index/media.npy").unlink()
    assert repair_manifest(str(path))[0] is None
