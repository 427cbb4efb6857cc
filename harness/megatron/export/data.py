"""Find the data that a run was trained on, and its tokenizer, by fingerprint and hashes, never by name alone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, FormatError, HarnessError, is_of_disk, os_error_of, reason_of_memory
from harness.formats import Manifest, PackReader, holds_manifest
from harness.formats.inspect import find_tokenizer_folder
from harness.loader import JoinedReader, LoaderState, corpus_paths
from harness.loader.datasets import open_train
from harness.prep import ChatTokenizer, TokenizerConfig, as_prepared, tokenizer_hash
from harness.prep.tokenize.recorded import end_tokens
from harness.printing import count_of
from harness.storage import join_path

# The folder of a tokenizer may also contain a whole model; copy only these files.
_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges.txt"),
    *("*.model", "*.tiktoken", "*processor_config.json"),
)
_TEMPLATES = "additional_chat_templates"


@dataclass
class TrainedData:
    """Data of a run that was found on this machine.

    Attributes:
        tokenizer: folder or hub id; empty if no tokenizer is known to be the right one.
        template: file or name of a template that replaces the tokenizer's own.
        live_mask: facts about the masks of conversations in live chunks; empty for other data.
        eod: id of the token that ends a document of a pretraining corpus.
    """

    names: list[str]
    manifests: dict[str, Manifest] = field(default_factory=dict)
    tokenizer: str = ""
    template: str = ""
    live_mask: Mapping[str, str] = field(default_factory=dict)
    eod: int | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def masks(self) -> list[Mapping[str, str]]:
        """Facts about the masks of each dataset; only those of live data, possibly empty, if no manifest was read."""
        return [manifest.provenance.mask for manifest in self.manifests.values()] or [self.live_mask]


def find_data(settings: Mapping[str, Any], state: LoaderState, moved_to: Sequence[str] = ()) -> TrainedData:
    """Find the data of a run; missing data raises an error only if `moved_to` lists its location.

    Args:
        state: loader state in the checkpoint; a dataset with another fingerprint is not the one that was trained on.
        moved_to: current locations of the run's data, in the order of its settings; empty if it has not moved.

    Raises:
        ConfigError: `moved_to` contains other data, or none.
        MemoryError: memory ran out.
    """
    data = settings["data"]
    live = data.get("live") or {}
    folders = [source["path"] for source in live.get("blend") or [live] if source.get("path")]
    if folders:
        if moved_to:
            what = "exports do not read live chunks"
            raise ConfigError(what, where="data.paths", fix="omit it; the tokenizer of the run is used")
        tokenizer = live["tokenizer"]
        found = TrainedData(folders, template=tokenizer.get("chat_template", ""))
        found.tokenizer = tokenizer.get("name") or data.get("tokenizer") or ""
        if not found.tokenizer:
            found.missing.append(f"tokenizer and chat template: {', '.join(folders)}: chunks of packs do not list them")
            return found
        # `write_tokenizer` reports problems with the tokenizer; settings of other versions may differ.
        with suppress(ConfigError, FormatError, TypeError):
            config, _ = as_prepared(TokenizerConfig(**tokenizer), found.tokenizer)
            found.live_mask = ChatTokenizer(config, found.tokenizer).mask_facts()
        return found
    is_corpus = "sequence_length" in data
    names = corpus_paths(data) if is_corpus else [source["path"] for source in data.get("blend") or [data]]
    found = TrainedData(names, eod=data.get("eod"))
    if moved_to and len(moved_to) != len(names):
        what = f"the run has {count_of(len(names), 'data source')}, but data.paths lists {len(moved_to)}"
        raise ConfigError(what, where="data.paths", fix=f"list one location for each of {', '.join(names)}")
    places = moved_to or names
    try:
        # A corpus may have packed datasets among its sources.
        readers = [open_train(path)[0] for path in places if not is_corpus or _is_packed(path)]
        if not is_corpus:
            now = (JoinedReader(readers) if data.get("blend") else readers[0]).fingerprint
            if state.fingerprint not in ("", now):
                what = f"has the fingerprint {now}, but the run was trained on {state.fingerprint}"
                raise ConfigError(what, where=", ".join(places), fix="restore the data that was trained")
    except (HarnessError, OSError) as error:
        if moved_to or reason_of_memory(error) is not None:
            raise
        where = f"{error.where}: {error.what}" if isinstance(error, HarnessError) else str(error)
        found.missing.append(
            f"facts of the data, tokenizer and chat template: {where}; if the data has been moved, set data.paths"
        )
        return found
    found.manifests = {reader.path: reader.manifest for reader in readers if reader.manifest is not None}
    if found.manifests:
        _find_tokenizer(found, next(reader for reader in readers if reader.manifest is not None), settings)
    else:
        found.missing.append(f"facts of the data, tokenizer and chat template: {', '.join(names)} does not list them")
    return found


def _is_packed(path: str) -> bool:
    return holds_manifest(path) or holds_manifest(join_path(path, "train"))


def _find_tokenizer(found: TrainedData, reader: PackReader, settings: Mapping[str, Any]) -> None:
    """Set the tokenizer to the first candidate whose hashes match the dataset's manifest."""
    assert reader.manifest is not None
    recorded = reader.manifest.provenance
    reasons = []
    # Candidates: next to the data, then those that the run names.
    names = [settings["data"].get("tokenizer"), settings["model"].get("init_from")]
    with suppress(ConfigError):
        names.insert(0, str(find_tokenizer_folder(reader)))
    for name in filter(None, names):
        try:
            tokens, template = _hashes(name)
        except ConfigError as error:
            reasons.append(f"{name}: {error.what}" + f" ({error.fix})" * error.fix.startswith("pip "))
            continue
        then = {"tokenizer": recorded.tokenizer_hash, "chat template": recorded.chat_template_hash}
        wrong = [
            f"{name} has the {what} {now or 'none'}, but the data was prepared with {then[what]}"
            for what, now in (("tokenizer", tokens), ("chat template", template))
            if then[what] and now != then[what]
        ]
        if not wrong:
            found.tokenizer = name
            return
        reasons += wrong
    why = "; ".join(reasons) or f"{reader.path} specifies none that exists on this machine"
    found.missing.append(f"tokenizer and chat template: {why}")


def _hashes(name: str) -> tuple[str, str]:
    try:
        tokenizer = ChatTokenizer(TokenizerConfig(name=name, mask="all"))
    except ConfigError:
        return tokenizer_hash(name), ""
    return tokenizer.tokenizer_hash, tokenizer.chat_template_hash


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that control generation; None for a missing token.

    Attributes:
        ends: tokens that end an answer, including the end token of the tokenizer.
        pad: token that fills the rows of a batch; different from the tokens that end an answer, if possible.
    """

    ends: tuple[int, ...]
    pad: int | None
    begin: int | None
    texts: Mapping[int, str]


def write_tokenizer(found: TrainedData, folder: Path, *, vocab_size: int) -> SpecialTokens | None:
    """Write the tokenizer of the data with its chat template; return None, and add to `found.missing`, if that fails.

    Raise ConfigError if the data records an end token that the tokenizer does not have.
    """
    if not found.tokenizer:
        return None
    try:
        source = Path(found.tokenizer)
        if source.is_dir() and not found.template:
            # Copy these files unchanged, and no other files of the folder.
            for file in {file for pattern in _TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()}:
                shutil.copy(file, folder / file.name)
            if (source / _TEMPLATES).is_dir():
                shutil.copytree(source / _TEMPLATES, folder / _TEMPLATES)
        else:
            ChatTokenizer(TokenizerConfig(name=found.tokenizer, chat_template=found.template, mask="all")).save(folder)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # The library raises almost any exception for a damaged folder.
    except Exception as error:
        if reason_of_memory(error) is not None or ((refused := os_error_of(error)) is not None and is_of_disk(refused)):
            raise
        what = error.what if isinstance(error, HarnessError) else (str(error).splitlines() or [type(error).__name__])[0]
        found.missing.append(f"tokenizer and chat template: {found.tokenizer}: {what}")
        return None
    if not (tokenizer.chat_template or found.missing):
        found.missing.append(f"chat template: the tokenizer {found.tokenizer} has none")
    ends = {token for mask in found.masks for token in end_tokens(tokenizer, mask)}
    ends |= set() if found.eod is None else {found.eod}
    return _special_tokens(tokenizer, ends, vocab_size)


def _special_tokens(tokenizer: Any, ends: set[int], vocab_size: int) -> SpecialTokens:
    added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    # Exclude placeholder tokens of media, which require features from an encoder.
    named = [id for id, text in sorted(added.items()) if re.search(r"(?i)^(?!.*(image|audio|video)).*pad", text)]
    ids = (tokenizer.pad_token_id, *named, tokenizer.unk_token_id)
    known = [id for id in ids if id is not None and id < vocab_size]
    # Prefer another token than those that end an answer: a trainer that masks padding would mask them too.
    pad = next((id for id in known if id not in ends), next(iter(known), min(ends, default=None)))
    used = {*ends, *(id for id in (pad, tokenizer.bos_token_id) if id is not None)}
    # An id in the model's vocabulary but not in the tokenizer's has no text.
    texts = {id: tokenizer.convert_ids_to_tokens(id) or f"token {id}" for id in used}
    return SpecialTokens(tuple(sorted(ends)), pad, tokenizer.bos_token_id, texts)
