"""Convert a dataset from any format to any other, pack by pack."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path

import xxhash

from harness.errors import ConfigError, FormatError
from harness.formats.base import load_format
from harness.formats.layouts.virtual import open_store
from harness.formats.manifest import Manifest, Provenance
from harness.formats.opening import open_dataset
from harness.formats.reader import PackReader, stamp_shard
from harness.formats.verify import diff_readers
from harness.formats.writer import forget_interruption, open_writer
from harness.storage import ObjectPath, is_uri
from harness.storage.connections import relative_path

_CHUNK = 64


def convert_dataset(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    *,
    format: str,
    pack_size: int | None = None,
    packs_per_shard: int | None = None,
    rows_per_group: int = 64,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Manifest:
    """Write a dataset again in another format, then read it back and compare the fingerprints of both sides.

    Memory does not grow with the dataset, except for `npy`, of which up to 64 unpickled shards are kept. The same call
    after an interruption continues after the last whole shard; a finished destination with the content of the source
    and the pack size is not written again. Returns the destination's manifest.

    Args:
        source: as for `open_dataset`.
        destination, packs_per_shard, rows_per_group, overwrite: as for `open_writer`.
        pack_size: tokens that no pack exceeds; the source's if None.
        progress: called with the stage (`convert`, `compare`), packs done and packs in total.

    Raises:
        ConfigError: source and destination are the same, or the destination has the packs of the source.
        FormatError: the source cannot be read, a pack cannot be expressed in the format, the destination cannot be
            written, or its content differs from the source in the end (the error names the first pack that does).
    """
    format = load_format(format).name
    with closing(open_dataset(source)) as reader:
        pack_size = reader.pack_size if pack_size is None else pack_size
        _refuse_source(destination, source, reader)
        if not overwrite and (finished := _finished(destination, reader, format, pack_size)) is not None:
            return finished
        with open_writer(
            destination,
            format=format,
            pack_size=pack_size,
            provenance=_provenance(reader, str(destination), format),
            packs_per_shard=packs_per_shard,
            rows_per_group=rows_per_group,
            overwrite=overwrite,
            resume_key=_identity(reader),
        ) as writer:
            for start in range(writer.num_packs, len(reader), _CHUNK):
                for pack in reader.iterate(start, min(start + _CHUNK, len(reader))):
                    writer.append(pack)
                if progress is not None:
                    progress("convert", writer.num_packs, len(reader))
        assert writer.manifest is not None
        with closing(open_dataset(destination)) as written:
            fingerprint = written.digest_packs(None if progress is None else partial(progress, "compare"))
            if fingerprint != reader.fingerprint:
                what = (
                    f"the fingerprints differ: {reader.fingerprint} of the source, {fingerprint} of the destination; "
                )
                what += f"first difference: {diff_readers(reader, written) or 'none when read again'}"
                fix = "remove the destination and convert again; if this happens again, check the disk and the memory"
                raise FormatError(what, where=str(destination), fix=fix)
        return writer.manifest


def _provenance(reader: PackReader, destination: str, format: str) -> Provenance:
    """Return the provenance of the source; a tokenizer folder relative to it becomes relative to the destination."""
    origin = reader.manifest.provenance if reader.manifest is not None else Provenance()
    if not origin.tokenizer.startswith(".") or is_uri(reader.path) or is_uri(destination):
        return origin
    source, target = Path(reader.path), Path(destination)
    folder = (source if source.is_dir() else source.parent) / origin.tokenizer
    if not folder.is_dir():
        return origin
    suffix = load_format(format).single_file_suffix
    base = target.parent if suffix and destination.endswith(suffix) else target
    return replace(origin, tokenizer=relative_path(folder, base))


def _real(path: str | PathLike[str]) -> str:
    return str(ObjectPath.parse(str(path)) if is_uri(str(path)) else Path(path).resolve())


def _refuse_source(destination: str | PathLike[str], source: str | PathLike[str], reader: PackReader) -> None:
    """Raise ConfigError for a destination that is the source, a folder with its packs, or the store of a plan."""
    read: set[object] = {source, *reader.files(), *(place.parent for place in reader.files())}
    if reader.manifest is not None and not reader.manifest.fingerprint:
        read.add(open_store(reader.path).folder.place)
    if _real(destination) in {_real(str(one)) for one in read}:
        what = "source and destination are the same, or the destination contains the packs of the source"
        raise ConfigError(what, where=str(destination), fix="specify another destination")


def _finished(destination: str | PathLike[str], reader: PackReader, format: str, pack_size: int) -> Manifest | None:
    """Return the manifest of a destination that an earlier run finished with the same pack size, or None."""
    try:
        written = open_dataset(destination)
    except FormatError:
        return None
    with closing(written):
        is_same = (written.format, written.pack_size) == (format, pack_size)
        if written.manifest is None or not is_same or written.fingerprint != reader.fingerprint:
            return None
        forget_interruption(destination)
        return written.manifest


def _identity(reader: PackReader) -> str:
    """Identify this source, without reading packs."""
    if reader.manifest is not None:
        return reader.fingerprint
    stamps = [stamp_shard(load_format(reader.format), place) for place in reader.files()]
    return xxhash.xxh3_128_hexdigest(repr((reader.path, stamps)).encode())
