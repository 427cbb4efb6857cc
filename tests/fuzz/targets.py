"""Targets of the fuzzer: every parser of stored bytes, with files of the project's own writers as seeds."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from parity_reports import all_same
from small_packs import write_packs

from harness.errors import HarnessError
from harness.formats import FORMATS, load_format, load_manifest, open_dataset
from harness.formats.foreign import CONVENTIONS
from harness.formats.index import load_index
from harness.formats.layouts.virtual import open_store, write_plan
from harness.formats.manifest import content_checksum
from harness.formats.media import INDEX, media_tokens, read_data
from harness.indexed.index import IndexedWriter, verify_indexed
from harness.indexed.token_shards import read_shards
from harness.loader import LoaderState
from harness.loader.live.folder import LiveChunk, LiveFolder
from harness.loader.live.producer import LiveProducer
from harness.parity.baselines import read_baseline
from harness.parity.result import to_json as report_to_json
from harness.plan.hf_config import read_hf_config
from harness.prep.chat import SCHEMAS, RecordReader
from harness.prep.media import AudioSize, MediaLimits, MediaRules, check_medium, draw_medium, measure
from harness.prep.media.files import ImageSize
from harness.prep.sources.reading import read_chunks
from harness.records import MEDIA_KINDS, Medium, Pack
from harness.storage import LocalFolder
from harness.storage.claims import parse_lease
from harness.storage.inputs import open_source
from harness.train.attempts import Stop, read_attempts, read_status
from harness.train.checkpoints import RUN_FILE, Progress, begin_attempt, read_identity, read_progress, write_run_file
from harness.train.digests import DIGESTS_FILE, RowDigests, StepDigests, read_digests, to_json
from harness.train.folder import read_settings
from harness.train.metrics import read_metrics
from harness.train.verify import verify_run

PACKS = [Pack([number, 2, 300, 70_000, 5], [1, 0, 1, 1, 0], [0, 2]) for number in range(6)]
CHAT = {
    "messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "Hello", "weight": 1, "reasoning_content": "hm"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}
CHATS = [
    CHAT,
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 1.0}]},
    {"instruction": "Do", "input": "it", "output": "done", "history": [["a", "b"]]},
    {"prompt": "Hi", "completion": "Hello"},
    {"query": "Hi", "tools": json.dumps(CHAT["tools"]), "answers": '[{"name": "f", "arguments": {}}]'},
    {"prompt": "Hi", "chosen": [{"role": "assistant", "content": "Yes"}], "rejected": []},
    {"text": "Hi"},
]
_SOUND = {"feature_size": 16, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 1, "n_fft": 400}
_GRID = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 78400}}
RULES = [
    json.dumps({"family": "qwen2_audio", "tokens": {"audio": 7}, "numbers": {**_SOUND, "padding_value": 0.0}}),
    json.dumps({"family": "qwen3_omni_moe", "tokens": {"audio": 7}, "numbers": {**_SOUND, "n_window": 50}}),
    json.dumps({"family": "qwen3_vl", "tokens": {"image": 7}, "numbers": _GRID}),
    json.dumps({"family": "llava", "tokens": {"image": 7}, "numbers": {"tokens": 9}}),
]


@dataclass(frozen=True)
class Target:
    """A parser: bytes that it accepts, and the function that reads any. It may raise nothing but HarnessError.

    The first byte chooses one of `files`, where there are several.
    """

    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    files: Sequence[str] = ()

    def try_one(self, data: bytes) -> bool:
        """Return False for bytes that were refused; what else the parser raises is its mistake."""
        try:
            self.read(data)
        except HarnessError:
            return False
        return True

    def try_one_quietly(self, data: bytes) -> None:
        self.try_one(data)


def files_target(folder: Path, files: Iterable[Path], read: Callable[[], object]) -> Target:
    """Return the target of some files of a folder, one of which is replaced at a time."""
    paths = sorted(files)
    contents = [path.read_bytes() for path in paths]
    assert 0 < len(paths) < 256, folder

    def put(path: Path, data: bytes) -> None:
        # A new file each time: the old one may still be mapped.
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    def feed(data: bytes) -> None:
        number = data[0] % len(paths) if data else 0
        put(paths[number], data[1:])
        try:
            read()
        finally:
            put(paths[number], contents[number])

    seeds = [bytes([number]) + content for number, content in enumerate(contents)]
    return Target(seeds, feed, [path.name for path in paths])


def text_target(texts: Iterable[str], read: Callable[[str], object]) -> Target:
    return Target([text.encode() for text in texts], lambda data: read(data.decode(errors="replace")))


def _read_dataset(path: Path) -> None:
    with suppress(StopIteration):
        reader = open_dataset(path)
        try:
            for index in range(min(len(reader), 8)):
                assert reader[index].problem() is None
        finally:
            reader.close()


def _write(path: Path, format: str) -> Path:
    return write_packs(path, PACKS, format=format, pack_size=8, packs_per_shard=6, rows_per_group=2)


def bare_files(folder: Path, format: str) -> Target:
    """The files of a shard without manifest and index, so that no hash refuses what was changed."""
    path = _write(folder / "data", format)
    (path / "manifest.json").unlink()
    shutil.rmtree(path / "index")
    for file in list(path.iterdir()):  # the names of our shards would be those of an incomplete dataset
        file.rename(path / file.name.replace("shard_", "part").replace("chunk_", "part"))
    return files_target(path, (file for file in path.rglob("*") if file.is_file()), partial(_read_dataset, path))


def whole_dataset(folder: Path, format: str) -> Target:
    """All files of a dataset: what is read of it is what was written."""
    path = _write(folder / "data", format)

    def read() -> None:
        reader = open_dataset(path)
        try:
            assert list(reader) == PACKS
        finally:
            reader.close()

    return files_target(path, (file for file in path.rglob("*") if file.is_file()), read)


def _read_virtual(path: Path, *, is_plan: bool = False) -> None:
    shard = load_format("virtual").open_shard(path, None)
    try:
        if not is_plan:  # which has none without its manifest
            shard.contents()
        for row in range(min(shard.num_packs, 8)):
            shard.read_row(row)
    finally:
        shard.close()


def virtual_shard(folder: Path) -> Target:
    path = _write(folder / "store", "virtual") / "shard_000000"
    return files_target(path, path.iterdir(), partial(_read_virtual, path))


def virtual_plan(folder: Path) -> Target:
    store, order = open_store(_write(folder / "store", "virtual")), np.arange(12)[::-1].copy()
    offsets, path = np.array([0, 6, 12]), folder / "plan"
    write_plan(path, store, pack_offsets=offsets, sequence_ids=order, pack_size=30, packer="p", seed=0)
    (path / "manifest.json").unlink()
    shard = path / "shard_000000"
    return files_target(shard, shard.iterdir(), partial(_read_virtual, shard, is_plan=True))


def manifest(folder: Path) -> Target:
    """The manifest, with its checksum made right where it is JSON, so that what is behind the checksum is reached."""
    path = _write(folder / "data", "npy")
    where = path / "manifest.json"
    seed = where.read_bytes()

    def read(data: bytes) -> None:
        with suppress(ValueError, RecursionError):
            values = json.loads(data[1:])
            if data[:1] == b"\1" and isinstance(values, dict):
                data = b"\1" + json.dumps({**values, "checksum": content_checksum(values)}).encode()
        where.write_bytes(data[1:])
        try:
            _read_dataset(path)
        finally:
            where.write_bytes(seed)

    return Target([b"\0" + seed, b"\1" + seed], read)


def index(folder: Path) -> Target:
    """The files of an index, whose hashes in the manifest are made right."""
    path = _write(folder / "data", "npy")
    manifest = load_manifest(path)
    own = LocalFolder(path)

    def read() -> None:
        load_index(own, replace(manifest, index=own.describe([stored.path for stored in manifest.index])))

    return files_target(path, (path / "index").iterdir(), read)


def indexed(folder: Path) -> Target:
    with IndexedWriter(folder / "pair") as writer:
        writer.append(np.arange(40), np.array([30, 10]))
    return files_target(folder, folder.iterdir(), lambda: verify_indexed(folder / "pair"))


def state(_folder: Path) -> Target:
    texts = [LoaderState(3, 1, 7, "f" * 32, "o", "t", live).to_json() for live in ("", "{}")]
    return text_target(texts, LoaderState.from_json)


def live(folder: Path) -> Target:
    path = folder / "live"
    with LiveProducer(path) as producer:
        for number in range(3):
            producer.add(
                {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": str(number)}]}
            )
        producer.flush()
        producer.end()
    here = LiveFolder(path)

    def read() -> None:
        here.end()
        for name in (file.name for file in path.iterdir()):
            here.status(name)
        if (record := here.record(0)) is not None:
            assert record.rows + record.total_rows >= 0
        chunk = LiveChunk(next(path.glob("chunk_00000.jsonl")), None)
        try:
            for row in range(min(chunk.num_rows, 8)):
                chunk.pack(row) if chunk.kind == "packs" else chunk.conversation(row)
        finally:
            chunk.close()

    return files_target(path, (file for file in path.iterdir() if file.is_file()), read)


def checkpoint(folder: Path) -> Target:
    path = folder / "step-00000004"
    path.mkdir(parents=True)
    (path / "weights").write_bytes(bytes(9))
    write_run_file(path, Progress(4, LoaderState(0)), {"settings": {}}, [], ["weights"])
    listed = path / "checksums.json"
    seeds = [(path / RUN_FILE).read_bytes(), listed.read_bytes()]

    def read(data: bytes) -> None:
        from harness.storage.checksums import digest_files, write_checksums

        if data[:1] == b"\1":
            listed.write_bytes(data[1:])
        else:  # with the hash that it would have
            (path / RUN_FILE).write_bytes(data[1:])
            write_checksums(path, digest_files(path, ["weights", RUN_FILE]))
        try:
            read_progress(path)
        finally:
            (path / RUN_FILE).write_bytes(seeds[0])
            listed.write_bytes(seeds[1])

    return Target([b"\0" + seeds[0], b"\1" + seeds[1]], read)


def run(folder: Path) -> Target:
    """The records in the folder of a run, but for its settings, which take a hundred times as long to parse."""
    path = folder / "run"
    path.mkdir(parents=True)
    (path / "job.sbatch").touch()
    step = {"step": 1, "loss": 2.5, "validation_loss": None, "grad_norm": 1.0, "evaluation_losses": {"other": 3.0}}
    (path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    stop = json.dumps({**asdict(Stop(4, "StopSignal", "SIGTERM", None, True)), "job": "7", "time": 1.0}) + "\n"
    for name in ("attempts.jsonl", "_stopped.json"):
        (path / name).write_text(stop)
    begin_attempt(path)
    rows = [RowDigests(0, 0, np.array([0, 1]), np.array([4, 3]), np.ones((2, 4), np.uint64), {})]
    (path / DIGESTS_FILE).write_text(json.dumps(to_json(StepDigests(1, 0, [0], rows, []))) + "\n")

    def read() -> None:
        for one in (read_attempts, read_status, read_digests, read_identity, verify_run):
            with suppress(HarnessError):
                one(path)
        with suppress(HarnessError):
            read_metrics(path / "metrics.jsonl")

    return files_target(path, (file for file in path.iterdir() if file.suffix != ".sbatch"), read)


def file_target(path: Path, seeds: Sequence[bytes], read: Callable[[Path], object]) -> Target:
    """Return the target of one file, whose seeds are of several."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return Target(seeds, feed)


def settings(folder: Path) -> Target:
    sections = {"data": {"path": "a"}, "loader": {"seed": 1}, "optimizer": {"lr": 0.5}, "trainer": {"steps": 3}}
    text = yaml.safe_dump({"model": {"num_layers": 2, "fp8": "no"}, "parallel": {}, **sections})

    return file_target(folder / "config.yaml", [text.encode()], read_settings)


def hf_config(folder: Path) -> Target:
    golden = Path(__file__).parents[1] / "golden" / "hf_configs"
    seeds = [one.read_bytes() for one in sorted(golden.glob("*.json"))]
    return file_target(folder / "config.json", seeds, lambda path: read_hf_config(path.parent))


def weights(folder: Path) -> Target:
    import torch
    from safetensors.torch import save_file

    from harness.megatron.hf_files import INDEX_FILE, HfWeights

    path = folder / "weights"
    path.mkdir(parents=True)
    save_file({"a": torch.ones(2, 3), "b_blocks": torch.ones(1, 2, 1, 16, dtype=torch.uint8)}, path / "m.safetensors")
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "m.safetensors"}}))

    def read() -> None:
        with HfWeights(path) as files:
            for name in files.names:
                files.shape(name)

    return files_target(path, path.iterdir(), read)


def metadata(folder: Path) -> Target:
    import io
    import pickle

    import torch
    from torch.distributed.checkpoint import metadata as parts
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    from harness.megatron.state.loading import read_metadata

    chunk = parts.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    tensor = parts.TensorStorageMetadata(parts.TensorProperties(torch.float32), torch.Size([2]), [chunk])
    stored = {parts.MetadataIndex("a", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 8)}
    seed = pickle.dumps(parts.Metadata({"a": tensor, "b": parts.BytesStorageMetadata()}, None, stored))
    return Target([seed], lambda data: read_metadata(io.BytesIO(data), folder))


def chat(_folder: Path) -> Target:
    readers = [RecordReader(), RecordReader(drop_media=True, ignore_fields=("id",)), *map(RecordReader, SCHEMAS)]

    def read(data: bytes) -> None:
        for reader in readers:
            reader.parse_line(data, "line 1")

    return Target([json.dumps(one).encode() for one in CHATS], read)


def sources(folder: Path) -> Target:
    """Files of chats: lines, a list, tables, and packed ones."""
    import gzip

    folder.mkdir(parents=True, exist_ok=True)
    lines = b"".join(json.dumps(one).encode() + b"\n" for one in CHATS)
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.json").write_text(json.dumps(CHATS))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines))
    table = pa.Table.from_pylist([{"messages": json.dumps(CHAT["messages"])}, {"messages": "[]"}])
    pq.write_table(table, folder / "d.parquet")
    packed = pa.ipc.IpcWriteOptions(compression="zstd")
    for name, opened, options in (("e", pa.ipc.new_stream, None), ("f", pa.ipc.new_file, packed)):
        with opened(str(folder / f"{name}.arrow"), table.schema, options=options) as writer:
            writer.write_table(table)
    paths = sorted(folder.iterdir())

    def read() -> None:
        for path in paths:
            with suppress(HarnessError):
                for piece in read_chunks([path], limit=16):
                    list(piece.parse())

    return files_target(folder, paths, read)


def imports(folder: Path) -> Target:
    """Packed files of other tools, each read by the conventions of all."""
    folder.mkdir(parents=True, exist_ok=True)
    swift = {"input_ids": [1, 2, 3, 4, 0], "labels": [-100, 2, -100, 4, -100], "lengths": [2, 2]}
    megatron = {"tokens": [1, 2, 3, 4], "labels": [2, -100, 4, 5], "cu_seqlens": [0, 2, 4], "loss_mask": [1, 0, 1, 1.0]}
    for name, row in {"swift": swift, "megatron": megatron}.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    columns = {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 0]], "seq_start_id": [[0]]}
    pq.write_table(pa.table(columns), folder / "bridge.parquet")
    with IndexedWriter(folder / "bridge") as writer:
        writer.append(np.array([0x53465442, 1, 1, 0, 5, 6, 7]), np.array([7]))
    paths = sorted(folder.iterdir())

    def read() -> None:
        for path in paths:
            for convention in CONVENTIONS.values():
                with suppress(HarnessError):
                    for pack in convention(str(path), "train")[0](Counter()):
                        pack.problem()

    return files_target(folder, paths, read)


def token_shards(folder: Path) -> Target:
    folder.mkdir(parents=True, exist_ok=True)
    rows = pa.array([[1, 2, 70_000], [3]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"a": rows, "b": ["1 2", "[3]"]}), folder / "a.parquet")

    def read() -> None:
        for column in ("a", "b"):
            with suppress(HarnessError):
                for _, batch in read_shards([folder / "a.parquet"], column=column):
                    batch.document_tokens()

    return files_target(folder, folder.iterdir(), read)


def records(folder: Path) -> Target:
    """The records that commands find beside data: of leases and of parity."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lease").write_bytes(b'{"token": "t", "pid": 7, "host": "h", "renewed": 1.0}\nleft')
    report = folder / "report.json"
    report.write_text(report_to_json(all_same()))

    def read() -> None:
        parse_lease((folder / "lease").read_bytes())
        with suppress(HarnessError):
            read_baseline(folder / "report.json")

    return files_target(folder, folder.iterdir(), read)


def stored_media(folder: Path) -> Target:
    """The index of media, whose hash in the manifest is made right, and the files that its spans are of."""
    media = (Medium("audio", 1, 2, b"RIFF a sound"), Medium("image", 6, 1, b"a picture"))
    packs = [Pack([number, 9, 9, 7, 8, 6, 9, 5], [0, 0, 1, 0, 1, 0, 0, 0], [0, 6], media) for number in range(4)]
    path = write_packs(folder / "data", packs, format="npy", pack_size=8, packs_per_shard=2)
    manifest, own = load_manifest(path), LocalFolder(path)

    def read() -> None:
        whole = replace(manifest, index=own.describe([stored.path for stored in manifest.index]))
        index = load_index(own, whole)
        media_tokens(index.media, np.arange(index.sequence_lengths.shape[0]))
        places = sorted(path.glob("*.media"))
        sources = [open_source(place) for place in places]
        try:
            read_data(index.media, range(len(index.media)), lambda shard: (sources[shard], places[shard]))
        finally:
            for source in sources:
                source.close()

    return files_target(path, [path / INDEX, *path.glob("*.media")], read)


def media(_folder: Path) -> Target:
    """Sounds and images, by their headers and decoded; the first byte is the kind."""
    from tests.samples.media_models import picture, sound

    sounds = [sound(400, format=name) for name in ("WAV", "FLAC", "OGG", "MP3")]
    images = [picture(9, 7, format=name) for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    limits = MediaLimits(num_bytes=1 << 20, num_pixels=1 << 16, seconds=2.0)
    rules = [MediaRules.from_text(text) for text in RULES]

    def read(data: bytes) -> None:
        kind = MEDIA_KINDS[data[0] % 2] if data else "audio"
        size = measure(kind, data[1:], limits)
        for one in rules:
            with suppress(HarnessError):
                assert one.count_tokens(kind, size) > 0
        check_medium(kind, data[1:], limits)
        draw_medium(kind, data[1:])

    kinds = [(MEDIA_KINDS.index("audio"), sounds), (MEDIA_KINDS.index("image"), images)]
    return Target([bytes([kind]) + data for kind, some in kinds for data in some], read)


def media_rules(_folder: Path) -> Target:
    def read(text: str) -> None:
        rules = MediaRules.from_text(text)
        for size in (AudioSize(9, 8000), AudioSize(1 << 22, 48_000), ImageSize(1, 1), ImageSize(9000, 4000)):
            with suppress(HarnessError):
                rules.count_tokens("audio" if isinstance(size, AudioSize) else "image", size)

    return text_target(RULES, read)


TARGETS: dict[str, Callable[[Path], Target]] = {
    **{name: partial(bare_files, format=name) for name in ("npy", "jsonl", "parquet", "memmap", "binidx")},
    **{f"whole {name}": partial(whole_dataset, format=name) for name in FORMATS},
    "virtual": virtual_shard,
    "plan": virtual_plan,
    "manifest": manifest,
    "index": index,
    "indexed": indexed,
    "state": state,
    "live": live,
    "checkpoint": checkpoint,
    "run": run,
    "settings": settings,
    "hf_config": hf_config,
    "weights": weights,
    "metadata": metadata,
    "chat": chat,
    "sources": sources,
    "imports": imports,
    "token shards": token_shards,
    "records": records,
    "stored media": stored_media,
    "media": media,
    "media rules": media_rules,
}
