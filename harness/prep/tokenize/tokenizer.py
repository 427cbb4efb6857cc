"""A tokenizer with its chat template and mask rule."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from harness.errors import ConfigError, FormatError, PrepError, reason_of_memory
from harness.paths import near_paths
from harness.prep.chat import BadReason, BadRecord, BadRecordError, Conversation
from harness.prep.media import MediaRules, measure
from harness.prep.packing import MIN_SEQUENCE_TOKENS
from harness.prep.tokenize.chats import as_object
from harness.prep.tokenize.config import TokenizerConfig
from harness.prep.tokenize.masks import Rendered
from harness.prep.tokenize.offsets import Span, TokenBytes, token_mask
from harness.prep.tokenize.recorded import PARTS, end_tokens
from harness.prep.tokenize.renderer import Renderer
from harness.prep.tokenize.templates.builtin import BUILT_IN, load_template
from harness.records import HUNDREDTHS, Int32Array, Medium, SequenceView, UInt8Array
from harness.storage.inputs import NO_MODEL, ask_hub

_JSON = json.JSONEncoder(ensure_ascii=False)
# Characters encoded in one batch: an encoding takes up to 600 bytes per character.
_TOGETHER = 1 << 20
# Maximum length of one sequence, which is encoded as a whole: within 4 GB, and more than a million tokens.
_MAX_CHARACTERS = 6 << 20

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = ("tokenizer.json", "tokenizer_config.json")
_OF_CODE = "its Python code is never run: remove auto_map from tokenizer_config.json if tokenizer.json is complete"
_FIX = "set tokenizer.name to a folder with tokenizer.json, or a hub id"


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sequence of a conversation: input_ids int32 [L], loss_mask uint8 [L], and the text they are made from.

    `spans` are the first and past-the-end characters of the trained parts of the text. The mask is label-aligned:
    shifted left by one from the tokens of those parts.
    """

    view: SequenceView
    text: str
    spans: list[Span]


class ChatTokenizer:
    """A tokenizer with its chat template and mask rule.

    Tokens equal those of `apply_chat_template(..., tokenize=True)`. The mask is computed here, from the characters of
    each token: transformers looks up the token of a span's last character, finds none if a tokenizer leaves white space
    out of its offsets, and then trains everything up to the end of the conversation.

    `hf` is the transformers tokenizer; its templates are never rendered in this process. `media_rules` are the rules of
    the tokenizer's model, or None if it does not support media. `chat_template_hash` has 16 hex digits. `mask_rule` is
    the rule that selects trained tokens, explained in `mask_facts`. If `uses_date`, the text depends on the date.
    """

    def __init__(self, config: TokenizerConfig, folder: str = "", *, today: date | None = None) -> None:
        """Load from `folder` if given, or from `config.name`; `today` is for templates that write the date.

        Raises ConfigError if no fast tokenizer can be loaded, or if it has no valid template that fits the mask rule.
        """
        self.name = folder or config.name
        self._config = config
        self.hf = load_tokenizer(self.name)
        self.media_rules: MediaRules | None = None
        with suppress(ConfigError, FormatError):  # for an unsupported processor, records with media are refused
            self.media_rules = MediaRules.of(self.name)
        self._backend = self.hf.backend_tokenizer
        # A tokenizer.json may contain settings of the program that wrote it.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        added = {number: token.content for number, token in self.hf.added_tokens_decoder.items()}
        self._token_bytes = TokenBytes.of(self._backend, added)
        if config.chat_template:
            self.hf.chat_template = load_template(config.chat_template)
            tokens = BUILT_IN.get(config.chat_template)
            # If the tokenizer split such a token, the text would not be in the models' format.
            for token in (*tokens.ends, *tokens.marks) if tokens else ():
                if len(self._backend.encode(token, add_special_tokens=False)) != 1:
                    what = f"the chat template {config.chat_template!r} writes {token}, which is not a token of the "
                    fix = "set tokenizer.chat_template to the template of the tokenizer's own family, or to an empty "
                    raise ConfigError(f"{what}tokenizer", where=self.name, fix=f"{fix}value")
        try:
            self.chat_template: str = self.hf.get_chat_template(None, None)
        except ValueError as error:
            fix = f"set tokenizer.chat_template to a Jinja file, or to one of {', '.join(BUILT_IN)}"
            raise ConfigError("the tokenizer has no chat template", where=self.name, fix=fix) from error
        special_tokens = {token.content for token in self.hf.added_tokens_decoder.values() if token.special}
        # Longest first, so that an error names the token that the text would become.
        special = sorted(special_tokens | set(self.hf.all_special_tokens), key=lambda token: (-len(token), token))
        if config.end_of_last_turn not in ("", *special):
            what = f"{config.end_of_last_turn!r} is not a special token of the tokenizer"
            raise ConfigError(what, where="tokenizer.end_of_last_turn", fix=f"use one of {', '.join(special[:8])}")
        refused = special if config.control_tokens == "refuse" else []
        self._control = re.compile("|".join(map(re.escape, refused)) or r"(?!)")
        where = config.chat_template or self.name
        variables = self.hf.special_tokens_map
        self._renderer = Renderer(self.chat_template, variables, config, special, today=today, where=where)
        self.chat_template_hash = _digest(self.chat_template)
        self.mask_rule, self.uses_date = self._renderer.rule, self._renderer.uses_date

    def mask_facts(self, schema: str = "") -> dict[str, str]:
        """Return facts about the mask for a dataset's manifest; with the schema `text`, everything is trained."""
        config = self._config
        weights = {"weights": "hundredths"} if config.train_on == "weighted" else {}
        if schema == "text":
            ends = json.dumps([self.hf.eos_token] if self.hf.eos_token else [], ensure_ascii=False)
            why = "the records are plain text, which is trained completely"
            return {"rule": "text", "why": why, "end_tokens": ends, "schema": schema, **weights}
        return {
            "rule": self._renderer.rule,
            "why": self._renderer.why,
            "history": config.history,
            "train_on": config.train_on,
            "untrained": json.dumps([part for part in PARTS if not getattr(config, f"train_{part}")]),
            "end_tokens": json.dumps(list(self._renderer.end_tokens), ensure_ascii=False),
            **({"end_of_last_turn": config.end_of_last_turn} if config.end_of_last_turn else {}),
            **({"media": self.media_rules.to_text()} if self.media_rules else {}),
            **({"schema": schema} if schema else {}),
            **weights,
        }

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one."""
        return 1 + int(max(self.hf.get_vocab().values()))

    @property
    def tokenizer_hash(self) -> str:
        """Hash of all tokens with their ids and of the roles of special tokens, as 16 hex digits."""
        return _hash_tokens(self.hf)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder with the template in use, the media rules and the processor."""
        self.hf.save_pretrained(str(folder))
        if self.media_rules is not None:
            self.media_rules.save(folder, self.name)

    def prompt(self, *turns: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a conversation with these turns, up to the start of the answer."""
        return list(self._backend.encode(self._renderer.prompt(turns), add_special_tokens=False).ids)

    @property
    def ends(self) -> list[int]:
        """Ids of the tokens that end an answer."""
        return self.ends_of(self.mask_facts())

    def ends_of(self, mask: Mapping[str, str]) -> list[int]:
        """Return the ids that end an answer, for a model trained on data with this `Provenance.mask`."""
        return end_tokens(self.hf, mask)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return str(self._backend.decode(list(map(int, ids)), skip_special_tokens=False))

    def encode(self, conversations: Sequence[Conversation]) -> list[SequenceView | BadRecord]:
        """Tokenize conversations, and return their sequences, or the reasons why there are none, in the same order.

        Most conversations make one sequence; `encode_each` groups sequences by conversation. Each has at least 2 tokens
        (L of `Encoded`) and at least one trained token.
        """
        results: list[SequenceView | BadRecord] = []
        for made in self.encode_each(conversations):
            results += [made] if isinstance(made, BadRecord) else [encoded.view for encoded in made]
        return results

    def encode_each(self, parsed: Sequence[Conversation | BadRecord]) -> list[list[Encoded] | BadRecord]:
        """Tokenize parsed records in order, and return the sequences of each, or the reason why it has none."""
        rendered = self._render(parsed)
        texts = [sequence.text for made in rendered if not isinstance(made, BadRecord) for sequence in made]
        encodings, results = self._encodings(texts), list[list[Encoded] | BadRecord]()
        for record, made in zip(parsed, rendered, strict=True):
            if isinstance(made, BadRecord):
                results.append(made)
            else:
                of_record = islice(encodings, len(made))
                results.append(self._to_sequences(cast(Conversation, record), made, of_record))
                deque(of_record, maxlen=0)  # skip the rest of a refused record
        return results

    def _encodings(self, texts: Iterable[str]) -> Iterator[Any]:
        """Yield the encoding of each text, in batches of up to `_TOGETHER` characters, or of one longer text."""
        encode = self._backend.encode_batch_fast if self._token_bytes else self._backend.encode_batch
        waiting, size = list[str](), 0
        for text in texts:
            if waiting and size + len(text) > _TOGETHER:
                yield from encode(waiting, add_special_tokens=False)
                waiting, size = [], 0
            waiting.append(text)
            size += len(text)
        yield from encode(waiting, add_special_tokens=False)

    def _to_sequences(
        self, conversation: Conversation, rendered: list[Rendered], encodings: Iterable[Any]
    ) -> list[Encoded] | BadRecord:
        made = []
        try:
            media = _Media(self.media_rules, conversation) if self.media_rules is not None else None
            for sequence, encoding in zip(rendered, encodings, strict=True):
                ids = np.array(encoding.ids, np.int32)
                if len(ids) < MIN_SEQUENCE_TOKENS:
                    detail = f"is {len(ids)} token long, so there is nothing to predict"
                    raise BadRecordError(BadReason.TOO_SHORT, detail)
                mask = np.zeros(len(ids), np.uint8)
                if sequence.spans:
                    mask[:-1] = self._token_mask(ids, encoding, sequence)[1:]
                view = SequenceView(ids, mask)
                if media is not None:
                    view = media.place(view, sequence.num_turns)
                if view.loss_mask.any():
                    made.append(Encoded(view, sequence.text, sequence.spans))
            if not made:
                detail = "the chat template writes no trainable assistant token"
                raise BadRecordError(BadReason.NOTHING_TRAINED, detail)
        except BadRecordError as bad:
            return BadRecord(conversation.where, bad.reason, bad.detail)
        return made

    def _token_mask(self, ids: Int32Array, encoding: Any, sequence: Rendered) -> UInt8Array:
        """Mask the tokens of a sequence's trained parts, token-aligned; `encoding` encodes its text."""
        text, spans = sequence.text, sequence.spans
        weights = sequence.weights or [HUNDREDTHS] * len(spans) if self._config.train_on == "weighted" else ()
        if self._token_bytes is not None:
            mask = self._token_bytes.mask(ids, text, spans, weights)
            if mask is not None:
                return mask
            encoding = self._backend.encode(text, add_special_tokens=False)
        return token_mask(encoding.offsets, spans, weights)

    def _render(self, parsed: Sequence[Conversation | BadRecord]) -> list[list[Rendered] | BadRecord]:
        """Return the texts of each conversation's sequences, with their trained spans."""
        known = [record if isinstance(record, BadRecord) else self._known(record) for record in parsed]
        unknown = [
            cast(Conversation, one).without_data() for one, made in zip(parsed, known, strict=True) if made is None
        ]
        rendered, results = iter(self._renderer.sequences(unknown)), list[list[Rendered] | BadRecord]()
        for record, one in zip(parsed, known, strict=True):
            made = next(rendered) if one is None else one
            longest = 0 if isinstance(made, BadRecord) else max((len(sequence.text) for sequence in made), default=0)
            if longest > _MAX_CHARACTERS:
                detail = f"has {longest:,} characters, and may have {_MAX_CHARACTERS:,}, each of which takes up to 600 "
                detail += "bytes of memory while it is tokenized; divide the record"
                made = BadRecord(record.where, BadReason.TOO_LONG, detail)
            results.append(made)
        return results

    def _known(self, conversation: Conversation) -> list[Rendered] | BadRecord | None:
        """Return the result for a conversation that does not depend on the template; None if it does."""
        for place, text in texts_of(conversation, has_names=True):
            if found := self._control.search(text):
                detail = f"{place} contains the control token {found.group()!r}"
                return BadRecord(conversation.where, BadReason.CONTROL_TOKEN, detail)
        if conversation.media and self.media_rules is None:
            detail = "the record has media, and the tokenizer does not belong to a model that supports them"
            return BadRecord(conversation.where, BadReason.MEDIA, detail)
        if conversation.text is None:
            return None
        whole = conversation.text + (self.hf.eos_token or "")
        return [Rendered(whole, [(0, len(whole))])]


class _Media:
    def __init__(self, rules: MediaRules, conversation: Conversation) -> None:
        self._rules, self._media, self._turns = rules, conversation.media, conversation.messages
        self._counts = []
        for number, message in enumerate(conversation.messages, start=1):
            for part in message.media:
                try:
                    self._counts.append(rules.count_tokens(part.kind, measure(part.kind, part.data)))
                except PrepError as error:
                    detail = f"the {part.kind} of turn {number} ({message.role}) {error.what}"
                    raise BadRecordError(BadReason.MEDIA, detail) from error

    def place(self, view: SequenceView, num_turns: int | None) -> SequenceView:
        """Return a sequence of the first turns (None: all) with a placeholder for each token of a medium, untrained."""
        tokens = self._rules.tokens
        at = np.flatnonzero(np.isin(view.input_ids, list(tokens.values())))
        kinds = [tokens[part.kind] for turn in self._turns[:num_turns] for part in turn.media]
        if view.input_ids[at].tolist() != kinds:
            detail = f"the chat template writes {len(at):,} placeholders of media, and there are {len(kinds):,}"
            raise BadRecordError(BadReason.MEDIA, detail)
        if not len(at):
            return view
        repeats = np.ones(len(view), np.int64)
        repeats[at] = self._counts[: len(at)]
        # The label at a position is the next token.
        trained = np.roll(view.loss_mask, 1)
        trained[at] = 0
        starts = (np.cumsum(repeats) - repeats)[at].tolist()
        media = tuple(
            Medium(part.kind, start, count, part.data)
            for part, start, count in zip(self._media, starts, self._counts, strict=False)
        )
        mask = np.roll(np.repeat(trained, repeats), -1)
        mask[-1] = 0
        return SequenceView(np.repeat(view.input_ids, repeats), mask, media)


def texts_of(conversation: Conversation, *, has_names: bool = False) -> Iterator[tuple[str, str]]:
    """Yield every text of a conversation that a template may write, with a description of its place.

    `has_names` adds names, ids, decoded arguments and variables.
    """
    if conversation.text is not None:
        yield "the text", conversation.text
    for number, message in enumerate(conversation.messages, start=1):
        place = f"turn {number} ({message.role})"
        yield place, message.text
        if message.reasoning:
            yield f"the reasoning of {place}", message.reasoning
        for call in message.tool_calls:
            arguments = call.arguments
            spelled = arguments if isinstance(arguments, str) else _JSON.encode(arguments)
            yield f"a tool call of {place}", f"{call.name} {spelled}"
            if has_names and isinstance(arguments, str):  # JSON text may escape characters
                yield f"a tool call of {place}", _JSON.encode(as_object(arguments))
            if has_names:
                yield f"the id of a tool call of {place}", call.id
        if has_names:
            yield f"the name of {place}", message.name
            yield f"the id of {place}", message.tool_call_id
    if conversation.tools:
        yield "a tool", _JSON.encode(list(conversation.tools))
    if has_names and conversation.template_kwargs:
        yield "`chat_template_kwargs`", _JSON.encode(dict(conversation.template_kwargs))


def tokenizer_hash(name: str) -> str:
    """Return `ChatTokenizer.tokenizer_hash` of a folder or hub id, with or without a chat template."""
    return _hash_tokens(load_tokenizer(name))


def _hash_tokens(tokenizer: Any) -> str:
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return _digest(json.dumps([sorted(tokenizer.get_vocab().items()), sorted(special.items())]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer from a folder or the Hugging Face hub; raise ConfigError at once if the name is neither.

    transformers retries for many seconds if the hub does not answer, so the hub is queried once before loading.
    HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE work as with Hugging Face's own tools.
    """
    try:
        with _without_advice():
            from transformers import AutoTokenizer
    except ImportError as error:
        what, fix = f"tokenizing requires `transformers`: {error}", "pip install 'megatron-sft-harness[tokenize]'"
        raise ConfigError(what, where=sys.executable, fix=fix) from error
    folder = Path(name).expanduser()
    if folder.is_dir() and not any(re.search("token|vocab|piece|tekken", path.name) for path in folder.iterdir()):
        fix = f"copy tokenizer.json and tokenizer_config.json of its model into it, or {_FIX}"
        raise ConfigError("the folder has no tokenizer", where=name, fix=fix)
    source = str(folder) if folder.is_dir() else _hub_source(name, folder)
    try:
        # A folder's code is never run. If this were unset, the library would ask on standard input.
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the library raises almost anything for a damaged folder
        if reason_of_memory(error) is not None:
            raise MemoryError(f"the tokenizer {name} cannot be loaded") from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fix = _OF_CODE if "trust_remote_code" in str(error) else _FIX
        raise ConfigError(f"the tokenizer cannot be loaded: {reason}", where=name, fix=fix) from error
    if not getattr(tokenizer, "is_fast", False):
        what = "it is not a fast tokenizer, so its tokens cannot be mapped to characters of the text"
        raise ConfigError(what, where=name, fix="use a tokenizer with a tokenizer.json")
    if not len(tokenizer):
        raise ConfigError("the tokenizer has no tokens", where=name, fix=_FIX)
    return tokenizer


def _hub_source(name: str, folder: Path) -> str:
    """Return a hub id, or its folder in the hub cache if the hub does not answer; refuse any other name."""
    if folder.exists():
        fix = f"set tokenizer.name={folder.parent}" if "token" in folder.name else _FIX
        raise ConfigError("the tokenizer's name is a file, not a folder", where=name, fix=fix)
    if not _HUB_ID.fullmatch(name) or name.endswith(".json"):
        raise ConfigError("the tokenizer folder does not exist", where=name, fix=_fix(folder))
    from huggingface_hub import constants, try_to_load_from_cache

    files = [file for file in (try_to_load_from_cache(name, file) for file in _FILES) if isinstance(file, str)]
    cached = str(Path(files[0]).parent) if files else ""
    if constants.HF_HUB_OFFLINE:
        if cached:
            return cached
        what = "the tokenizer folder does not exist, and HF_HUB_OFFLINE disables hub ids"
        raise ConfigError(what, where=name, fix=_fix(folder))
    if not (problem := ask_hub(name)):
        return name
    if cached and problem != NO_MODEL:
        return cached
    fix = "a private one requires HF_TOKEN"
    if problem != NO_MODEL:
        fix = f"for a hub id, `hf download {name}` where there is a network, and use that folder"
    raise ConfigError(f"the tokenizer folder does not exist, and {problem}", where=name, fix=f"{_fix(folder)}; {fix}")


def _fix(folder: Path) -> str:
    """Return how to fix the name, with the nearest existing folder if there is one."""
    return f"check tokenizer.name: {near_paths(folder) or _FIX}"


@contextmanager
def _without_advice() -> Iterator[None]:
    """Import transformers without its advice to install PyTorch, which tokenizing does not need."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
