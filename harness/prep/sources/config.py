"""Settings of the source of chat records."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from harness.checks import CheckedSettings, bounded, one_of, require_choice
from harness.errors import ConfigError
from harness.prep.media import MediaLimits

SOURCE_KINDS = ("files", "pydoc")
TOOL_CALLS = ("given", "hermes")


@dataclass
class MixedSource(CheckedSettings, section="source.mix[]"):
    """One of several sources.

    Attributes:
        path, split, subset, schema, columns: as in `source`.
        limit: maximum number of records to read; 0 reads all.
        epochs: number of times that its conversations occur in the training data. With 2.5, each occurs twice, and half
            of them, selected by their hash and data.seed, a third time; with 0.1, a tenth occurs once. Validation and
            test data contain each conversation of their share once.
    """

    path: str = ""
    split: str = ""
    subset: str = ""
    schema: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    limit: int = bounded(0, highest=10**15)
    epochs: float = bounded(1.0, above=0, highest=1000)


# Settings that each source of a mix sets separately.
_OF_EACH = ("path", "split", "subset", "schema", "columns", "limit")


@dataclass
class SourceConfig(CheckedSettings, section="source"):
    """Source of chat records.

    Attributes:
        kind: `files`, or `pydoc` for the built-in corpus made from the documentation of Python's standard library.
            Empty selects `files` if a path is set, and `pydoc` otherwise.
        path: file, glob or folder (searched recursively), on a disk or in a bucket (`s3://BUCKET/chats/*.jsonl`); or a
            dataset of the Hugging Face hub: `ORG/NAME` if no such local path exists, or `hf://datasets/ORG/NAME`,
            optionally followed by `@REVISION` and by a file, folder or glob.
        split: split to read, such as `train`, if the source has several; empty reads `train` of a hub dataset.
        subset: subset (configuration) to read, if a hub dataset has several.
        schema: schema of the records, such as `messages` or `sharegpt`; empty detects it from the first records.
            Alternatively a function `module:function`, from the working folder or an installed package, that receives
            each record as a dict and returns one with `messages`, or None to omit the record.
        columns: names of renamed fields, such as `source.columns.messages=chat` for records with a field `chat`.
        ignore_fields: fields to ignore, although they affect what the model sees or writes.
        drop_media: omit and count images, audio and videos, together with their placeholders in the text, instead of
            refusing the records. The remaining text then refers to content that the model does not see.
        media: limits of the images and sounds of records, which a model's own folder as tokenizer can train on.
        tool_calls: `given` reads tool calls only from the fields of the records. `hermes` also converts `<tool_call>`
            in assistant turns to calls and `<tool_response>` turns to tool messages, so that the chat template renders
            both in its own form. A call that cannot be parsed makes the record invalid; the system prompt is unchanged.
        on_bad: `refuse` stops at invalid records and lists them; `skip` omits and counts them.
        limit: maximum number of records to read; 0 reads all.
        mix: several sources, each with its own path and schema. With data.drop_duplicates, a conversation that occurs
            in several sources is kept in the first.
        shard_bytes: number of source bytes that one process tokenizes as one unit. Does not affect the result.
    """

    kind: str = ""
    path: str | None = None
    split: str = ""
    subset: str = ""
    schema: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    ignore_fields: list[str] = field(default_factory=list)
    drop_media: bool = False
    media: MediaLimits = field(default_factory=MediaLimits)
    tool_calls: str = one_of("given", TOOL_CALLS)
    on_bad: str = one_of("refuse", ("refuse", "skip"))
    limit: int = bounded(0, highest=10**15)
    mix: list[MixedSource] = field(default_factory=list)
    shard_bytes: int = bounded(16 << 20, lowest=1, highest=2**40)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind:
            require_choice(self.kind, SOURCE_KINDS, setting="source.kind")
        # An unset shell variable must not prepare the built-in corpus.
        paths = {"path": self.path} if self.path is not None or (self.kind == "files" and not self.mix) else {}
        paths |= {f"mix[{number}].path": one.path for number, one in enumerate(self.mix)}
        for name, path in paths.items():
            if self.kind != "pydoc" and not (path or "").strip():
                fix = "specify a file, a glob, a folder, a bucket path or a dataset of the hub"
                raise ConfigError("no path is set", where=f"source.{name}", fix=fix)
        unread = [name for name in ("mix", "path") if self.kind == "pydoc" and getattr(self, name)]
        unread += [name for name in ("split", "subset") if not self.path and not self.mix and getattr(self, name)]
        for name in unread:
            what = f"source.{name} would not be used: the source is the built-in corpus"
            raise ConfigError(what, where=f"source.{name}", fix="omit it, or set source.path and omit source=pydoc")
        if self.mix and (given := [name for name in _OF_EACH if getattr(self, name)]):
            what = f"source.{given[0]} would not be used: each source of the mix has its own"
            fix = f"source.mix=[{{path: chats.jsonl, {given[0]}: ...}}]" if given[0] != "path" else "omit one of them"
            raise ConfigError(what, where=f"source.{given[0]}", fix=fix)

    def resolve(self) -> SourceConfig:
        """Return these settings with their `kind`."""
        # Not done on construction: Hydra constructs the defaults first, and sets the path afterwards.
        return self if self.kind else replace(self, kind="files" if self.path or self.mix else "pydoc")

    def each(self) -> list[SourceConfig]:
        """Return the settings of each source of the mix, or these settings if there is no mix."""
        return [replace(self, mix=[], **{name: getattr(one, name) for name in _OF_EACH}) for one in self.mix] or [self]

    @property
    def name(self) -> str:
        """Description of the source in messages."""
        return ", ".join(one.path for one in self.mix) or self.path or "the built-in corpus, Python's documentation"
