"""The sources of one preparation: the only one, or those of `source.mix`, each with its files and its schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from harness.errors import PrepError
from harness.prep.chat import RecordReader
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.finding import Show, find_files
from harness.prep.sources.reading import SourceChunk, SourceFiles, SourceShard, cut_shards, read_chunks
from harness.prep.sources.schema import find_schema


@dataclass
class PreparedSource:
    """One source of a preparation; `name` is its row of the report, empty for a row for each file."""

    config: SourceConfig
    found: SourceFiles
    epochs: float = 1.0
    name: str = ""
    reader: RecordReader = field(default_factory=RecordReader)

    def find_schema(self) -> list[str]:
        """Find the schema of the records; return their fields that are not read."""
        self.reader, unused = find_schema(self.found.files, self.config)
        return unused

    def read_media(self) -> None:
        """Read the media of the records, unless the settings leave them out."""
        if not self.config.drop_media:
            self.reader = replace(self.reader, media=self.config.media)

    def chunks(self, limit: int) -> Iterator[SourceChunk]:
        """Yield the records, at most `limit`; 0 for the limit of the settings."""
        return read_chunks(self.found.files, limit=limit or self.config.limit, reader=self.reader)

    def shards(self, shard_bytes: int) -> Iterator[SourceShard]:
        return cut_shards(self.found.files, shard_bytes=shard_bytes, limit=self.config.limit, reader=self.reader)

    def identity(self) -> dict[str, Any]:
        """Return what the result depends on besides the settings and the files."""
        digest = RecordReader(self.config.schema).function_digest
        return {**self.found.facts, **({"schema_digest": digest} if digest else {})}


def find_sources(source: SourceConfig, show: Show) -> list[PreparedSource]:
    """Find the files of every source like `find_files`; raise PrepError if a file belongs to two sources."""
    sources = [PreparedSource(config, find_files(config, show=show)) for config in source.each()]
    for one, mixed in zip(sources, source.mix, strict=bool(source.mix)):
        one.epochs = mixed.epochs
        words = [mixed.path, mixed.subset, mixed.split, "" if mixed.epochs == 1 else f"({mixed.epochs:g} epochs)"]
        one.name = " ".join(filter(None, words))
    files = Counter(str(file) for one in sources for file in one.found.files)
    if source.mix and (twice := [file for file, count in files.items() if count > 1]):
        fix = "remove it from one of them; use epochs to repeat a source"
        raise PrepError("the file belongs to two sources of source.mix", where=twice[0], fix=fix)
    return sources
