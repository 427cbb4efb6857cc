"""The manifest of a dataset folder. It is written last: a folder without a manifest is not a dataset."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from harness.errors import FormatError, os_errors_as
from harness.records import HUNDREDTHS
from harness.settings import from_plain
from harness.storage import Folder, LocalFolder, StoredFile

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 2
# Of datasets with media: programs that do not know of these must not read the tokens alone.
MEDIA_VERSION = 3
# A hundred thousand shards fit; parsed, a hostile file takes up to 25 times its size.
MAX_MANIFEST_BYTES = 64 << 20

_COUNTS = ("num_packs", "num_sequences", "num_tokens", "num_trained_tokens", "num_media")
_HEX64 = re.compile(r"[0-9a-f]{16}")
_HEX128 = re.compile(r"[0-9a-f]{32}")
_REQUIRED = {"format", "version", "fingerprint", "shards"}
# Keys that the manifest of no other tool is known to have: three of them are ours, whatever happened to the others.
_DISTINCTIVE = {"fingerprint", "shards", "index", "provenance", "num_packs", "num_trained_tokens"}


@dataclass(frozen=True)
class Provenance:
    """The origin of a dataset; fields are empty if unknown.

    Attributes:
        tokenizer_hash: digest of the tokenizer's files.
        chat_template_hash: digest of the chat template's text.
        settings_hash: digest of all preparation settings.
        counts: free-form whole numbers, such as conversations read and dropped.
        mask: how the loss mask was made, as text by name: `rule`, `why`, `history`, `train_on` and so on, `end_tokens`,
            the JSON list of the tokens that end a turn, `schema`, that of the chats, `weights=hundredths` where
            entries of the loss mask are weights from 0 to 100, and `media`, the rules of their placeholders. Empty for
            datasets that do not record it.
    """

    tokenizer: str = ""
    tokenizer_hash: str = ""
    chat_template_hash: str = ""
    packer: str = ""
    seed: int | None = None
    settings_hash: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    mask: dict[str, str] = field(default_factory=dict)

    @property
    def max_weight(self) -> int:
        """Largest entry that the loss mask may have: 1, or 100 in a dataset with weights."""
        return HUNDREDTHS if self.mask.get("weights") == "hundredths" else 1


@dataclass(frozen=True)
class Shard:
    """One shard: its path (a file, or what its files' names start with), its packs and its files."""

    path: str
    num_packs: int
    files: tuple[StoredFile, ...]


@dataclass(frozen=True)
class Manifest:
    """Contents of a dataset.

    A manifest stored inside a dataset's only file lists no shards and no index files: a file cannot hold its own hash.

    Attributes:
        fingerprint: digest of the ordered content, equal across formats; empty for a plan over a sequence store,
            which is written without reading the packs.
        num_media: images and sounds; stored only where there are any.
        checksum: digest of all other fields, in a stored manifest; empty in those of earlier versions.
    """

    format: str
    pack_size: int
    num_packs: int
    num_sequences: int
    num_tokens: int
    num_trained_tokens: int
    fingerprint: str
    shards: tuple[Shard, ...]
    index: tuple[StoredFile, ...]
    provenance: Provenance = Provenance()
    version: int = MANIFEST_VERSION
    num_media: int = 0
    checksum: str = field(default="", compare=False)

    def to_json(self) -> str:
        """Return the manifest as JSON text, with the checksum of its contents."""
        return json.dumps(self.sealed().to_plain(), indent=1) + "\n"

    def sealed(self) -> Manifest:
        """Return this manifest with its own checksum."""
        versioned = replace(self, version=MEDIA_VERSION if self.num_media else MANIFEST_VERSION)
        return replace(versioned, checksum=content_checksum(versioned.to_plain()))

    def to_plain(self) -> dict[str, Any]:
        values = asdict(self)
        if not self.num_media:
            del values["num_media"]
        return values

    @classmethod
    def from_json(cls, text: str, *, where: str = "") -> Manifest:
        """Parse and validate; raises FormatError that names the field."""
        return _parse(_parse_json(text, where), where)

    def save(self, folder: Folder) -> None:
        """Write `manifest.json` atomically and durably."""
        folder.write(MANIFEST_NAME, [self.to_json().encode()])


def restore_hint(folder: str) -> str:
    return f"copy the dataset again; if all its shards are complete: harness verify --repair-manifest {folder}"


@dataclass(frozen=True)
class Totals:
    num_packs: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_media: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, name) + getattr(other, name) for name in _COUNTS))


def file_problems(folder: Folder, files: Iterable[StoredFile], kind: str, *, hashes: bool) -> Iterator[FormatError]:
    """Yield problems with existence and size of files, and with `hashes` with their content, which is read."""
    for stored in files:
        where = folder.where(stored.path)
        try:
            num_bytes = folder.find_size(stored.path)
            digest = folder.digest(stored.path) if hashes and num_bytes == stored.num_bytes else stored.xxh3
        except OSError as error:
            yield FormatError(f"a {kind} is missing, or cannot be read: {error.strerror or error}", where=where)
        except FormatError as error:
            yield FormatError(f"a {kind} cannot be read: {error.what}", where=where, fix=error.fix)
        else:
            if num_bytes != stored.num_bytes:
                what = f"a {kind} has {num_bytes:,} bytes, the manifest says {stored.num_bytes:,}"
                yield FormatError(what, where=where)
            if digest != stored.xxh3:
                what = f"the file has the hash {digest}, but the manifest lists {stored.xxh3}"
                fix = "open the dataset again if it was replaced; if not, copy it again"
                yield FormatError(what, where=where, fix=fix)


def content_checksum(values: Mapping[str, Any]) -> str:
    """xxh3_128 (hexadecimal) of a manifest's values as ASCII JSON of sorted keys without spaces.

    Every key counts, known or not, except `checksum` at the top.
    """
    content = {name: value for name, value in values.items() if name != "checksum"}
    return str(xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")))


def load_manifest(folder: Path | Folder) -> Manifest | None:
    """Read a folder's manifest, or return None if it has none of ours: other tools also write a `manifest.json`.

    FormatError if it is unreadable, damaged, breaks an invariant, or was written by a newer version.
    """
    folder = LocalFolder(folder) if isinstance(folder, Path) else folder
    where = folder.where(MANIFEST_NAME)
    with os_errors_as(FormatError, "the manifest cannot be read", where=where, fix="check permissions and mounts"):
        data = folder.read(MANIFEST_NAME, MAX_MANIFEST_BYTES + 1)
    if data is None:
        return None
    if len(data) > MAX_MANIFEST_BYTES:
        raise _damaged(f"is larger than {MAX_MANIFEST_BYTES:,} bytes", where)
    values = _parse_json(data, where)
    is_ours = isinstance(values, dict) and (values.keys() >= _REQUIRED or len(values.keys() & _DISTINCTIVE) >= 3)
    if not is_ours:
        return None
    manifest = _parse(values, where)
    if not manifest.shards:
        raise _damaged("lists no shards", where)
    return manifest


def _damaged(what: str, where: str) -> FormatError:
    # A manifest that is stored inside a file has no folder to repair.
    fix = restore_hint(where.removesuffix(f"/{MANIFEST_NAME}")) if where.endswith(MANIFEST_NAME) else ""
    return FormatError(f"the manifest {what}", where=where, fix=fix)


def _parse_json(data: str | bytes, where: str) -> Any:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"it contains the key {twice[:40]!r} twice")
        return values

    try:
        return json.loads(data.decode() if isinstance(data, bytes) else data, object_pairs_hook=build)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"is not JSON: {error}", where) from None


def _parse(values: Any, where: str) -> Manifest:
    """Build a manifest from its JSON values; raise FormatError for other keys, types, counts or names."""
    known = (MANIFEST_VERSION, MEDIA_VERSION)
    if not (isinstance(values, dict) and values.keys() >= _REQUIRED):
        raise _damaged("lacks format, version, fingerprint or shards", where)
    if isinstance(values["version"], int) and values["version"] not in known:
        what = f"the manifest has version {values['version']}; this program reads version {known[0]} and {known[1]}"
        fix = "use the version of the program that wrote it, or write the dataset again"
        raise FormatError(what, where=where, fix=fix)
    try:
        # Keys of later versions are ignored; the checksum covers them.
        origin = from_plain(Provenance, values.get("provenance", {}), lenient=True)
        manifest = replace(from_plain(Manifest, {**values, "provenance": {}}, lenient=True), provenance=origin)
        problem = _count_problem(manifest) or _name_problem(manifest) or _content_problem(manifest, values)
    except (ValueError, RecursionError) as error:
        problem = f"is damaged: {error}"
    if problem:
        raise _damaged(problem, where)
    return manifest


def _content_problem(manifest: Manifest, values: dict[str, Any]) -> str:
    unknown = values.keys() - {field.name for field in fields(Manifest)}
    if not manifest.checksum and unknown:
        # Otherwise, a damaged `checksum` key would turn a manifest with a checksum into one without.
        return f"has the unknown key {min(unknown)[:40]!r} and no checksum"
    digest = content_checksum(values)
    if manifest.checksum and digest != manifest.checksum:
        return f"has the checksum {manifest.checksum[:40]!r}, but its content has {digest!r}: it was damaged or edited"
    return ""


def _count_problem(manifest: Manifest) -> str | None:
    stored = sum(shard.num_packs for shard in manifest.shards)
    counts = {name: getattr(manifest, name) for name in ("pack_size", *_COUNTS)}
    numbers = [*counts.values(), *(file.num_bytes for file in _files(manifest))]
    if min(numbers) < 0 or max(numbers) >= 2**63 or any(shard.num_packs < 1 for shard in manifest.shards):
        return "has a negative count, one of 2^63 or more, or a shard without packs"
    pack_size, packs, sequences, tokens, trained, media = counts.values()
    # A pack contains at least one sequence, and a sequence at least one token.
    is_sound = 0 < packs <= sequences <= tokens <= packs * pack_size and max(trained, media) <= tokens
    is_sound &= (media > 0) == (manifest.version == MEDIA_VERSION) and stored in (packs, 0)
    shown = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return None if is_sound else f"has counts that contradict each other: {shown}, and {stored:,} packs in its shards"


def _name_problem(manifest: Manifest) -> str | None:
    is_plan = manifest.format == "virtual" and manifest.fingerprint == ""
    if not is_plan and not _HEX128.fullmatch(manifest.fingerprint):
        return f"has the fingerprint {manifest.fingerprint[:40]!r}, expected 32 hexadecimal digits"
    shards, files = [shard.path for shard in manifest.shards], _files(manifest)
    if not all(shard.files for shard in manifest.shards):
        return "lists a shard without files"
    for file in files:
        if not _HEX64.fullmatch(file.xxh3):
            return f"has the file hash {file.xxh3[:24]!r}, expected 16 hexadecimal digits"
    for names in (shards, [file.path for file in files]):
        for text in names:
            path, is_unicode = PurePosixPath(text), not any("\ud800" <= character <= "\udfff" for character in text)
            is_plain = is_unicode and str(path) == text and not path.is_absolute() and ".." not in path.parts
            if not is_plain or not text or "\\" in text or "\0" in text:
                return f"lists the path {text[:200]!r}, which is not a plain path inside the dataset's folder"
        if len(set(names)) != len(names):
            twice, _ = Counter(names).most_common(1)[0]
            return f"lists {twice!r} twice"
    return None


def _files(manifest: Manifest) -> list[StoredFile]:
    return [file for shard in manifest.shards for file in shard.files] + list(manifest.index)
