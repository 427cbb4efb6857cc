"""Conversations to sequences: chat template, token ids, and the mask of trained tokens.

    tokenizer = ChatTokenizer(TokenizerConfig(name="folder or hub id"))
    tokenizer.encode([conversation])        # [SequenceView(input_ids, loss_mask)] or [BadRecord]

`train_bpe` trains a tokenizer on the conversations themselves. The libraries (transformers, tokenizers, jinja2) are
imported when a tokenizer is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import ConfigError
from harness.prep.chat import BadReason, BadRecord, Conversation
from harness.prep.packing import MIN_SEQUENCE_TOKENS
from harness.prep.tokenize.config import INSTALL_FIX, TokenizerConfig
from harness.prep.tokenize.ends import end_tokens
from harness.prep.tokenize.offsets import Span, mask_of_encoding
from harness.prep.tokenize.templates import load_template, template_tokens
from harness.records import SequenceView

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# transformers caches one compiled template per text, which records spans in place and refuses a second thread.
_RENDERING = threading.Lock()
os.register_at_fork(before=_RENDERING.acquire, after_in_parent=_RENDERING.release, after_in_child=_RENDERING.release)


class ChatTokenizer:
    """A tokenizer with its chat template and masking rule.

    Tokens equal those of `apply_chat_template(..., tokenize=True)`. The mask is computed here, from the characters of
    each token: transformers looks up the token of a span's last character, finds none where a tokenizer leaves white
    space out of its offsets, and then trains everything up to the end of the conversation.
    """

    def __init__(self, config: TokenizerConfig, folder: str = "") -> None:
        """Load from `folder` if given, or from `config.name`.

        Raises:
            ConfigError: it cannot be loaded, is not a fast tokenizer, or its template is not valid Jinja or lacks the
                `{% generation %}` that the masking rule needs.
        """
        self.name = folder or config.name
        self.mask_rule = "generation" if config.mask == "auto" else config.mask
        self._hf = _load(self.name)
        self._backend = self._hf.backend_tokenizer
        # A tokenizer.json may carry settings of the program that wrote it.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        if config.chat_template:
            self._hf.chat_template = load_template(config.chat_template)
            self._check_tokens(config.chat_template)
        try:
            self.chat_template: str = self._hf.get_chat_template(None, None)
        except ValueError as error:
            fix = "name a template with tokenizer.chat_template"
            raise ConfigError("the tokenizer has no chat template", where=self.name, fix=fix) from error
        self._check_template(config.chat_template or self.name)
        special_tokens = {token.content for token in self._hf.added_tokens_decoder.values() if token.special}
        # Longest first, so that an error names the token that would be made.
        special = sorted(special_tokens | set(self._hf.all_special_tokens), key=lambda token: (-len(token), token))
        refuse = config.control_tokens == "refuse" and special
        self._control = re.compile("|".join(map(re.escape, special))) if refuse else None
        # A cheap test for these characters spares most texts the regular expression.
        self._control_begins = sorted({token[0] for token in special})

    def _check_tokens(self, template: str) -> None:
        """Refuse a built-in template whose special tokens this tokenizer spells: it would not be the models' format."""
        tokens = template_tokens(template)
        needed = (*tokens.ends, *tokens.marks) if tokens else ()
        missing = [token for token in needed if len(self._backend.encode(token, add_special_tokens=False)) != 1]
        if missing:
            what = f"the chat template {template!r} writes {missing[0]}, which is no token of the tokenizer"
            fix = "set tokenizer.chat_template to the template of the tokenizer's own family, or leave it empty"
            raise ConfigError(what, where=self.name, fix=fix)

    def _check_template(self, where: str) -> None:
        """Report a broken template once, instead of once per conversation."""
        import jinja2

        try:
            self._template([{"role": "user", "content": ""}])
        except jinja2.TemplateSyntaxError as error:
            what = f"the chat template is not valid Jinja: {error.message}, line {error.lineno}"
            raise ConfigError(what, where=where, fix="fix the template") from None
        except Exception:
            # Templates may refuse this conversation; each real one gets an outcome of its own.
            pass
        if self.mask_rule == "generation" and not _GENERATION_TAG.search(self.chat_template):
            what = "the chat template has no {% generation %} that marks the assistant's tokens"
            fix = "set tokenizer.mask=assistant_turns, or name a template with the tag with tokenizer.chat_template"
            raise ConfigError(what, where=where, fix=fix)

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one."""
        return 1 + int(max(self._hf.get_vocab().values()))

    @property
    def tokenizer_hash(self) -> str:
        """16 hex digits over every token with its id and the roles of special tokens."""
        return _hash_tokens(self._hf)

    @property
    def chat_template_hash(self) -> str:
        """16 hex digits over the template's text."""
        return _digest(self.chat_template)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder that includes the template in use."""
        self._hf.save_pretrained(str(folder))

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of a conversation with the user turn `text`, up to where the answer begins."""
        rendered, _ = self._template([{"role": "user", "content": text}], prompt=True)
        return list(self._backend.encode(rendered, add_special_tokens=False).ids)

    @property
    def ends(self) -> list[int]:
        """Ids of the tokens that end an answer."""
        return self.ends_of({})

    def ends_of(self, mask: Mapping[str, str]) -> list[int]:
        """Return the ids that end an answer of a model trained on data with this `Provenance.mask`."""
        return end_tokens(self._hf, mask)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return str(self._backend.decode(list(map(int, ids)), skip_special_tokens=False))

    def encode(self, conversations: Sequence[Conversation]) -> list[SequenceView | BadRecord]:
        """Tokenize conversations; results are in the same order.

        Returns:
            for each conversation input_ids int32 [L] and loss_mask uint8 [L], with L at least 2 and something to train;
            or the reason why there is none. The mask is label-aligned: shifted left by one from the tokens that the
            assistant wrote.
        """
        rendered = [self._render(conversation) for conversation in conversations]
        texts = [item[0] for item in rendered if not isinstance(item, BadRecord)]
        encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        results: list[SequenceView | BadRecord] = []
        for conversation, item in zip(conversations, rendered, strict=True):
            if isinstance(item, BadRecord):
                results.append(item)
                continue
            encoding = next(encodings)
            ids = np.array(encoding.ids, np.int32)
            mask = np.zeros(len(ids), np.uint8)
            if item[1]:
                mask[:-1] = mask_of_encoding(encoding, len(ids), *item)[1:]
            if len(ids) < MIN_SEQUENCE_TOKENS:
                detail = f"is {len(ids)} token long, so there is nothing to predict"
                results.append(BadRecord(conversation.where, BadReason.TOO_SHORT, detail))
            elif not mask.any():
                detail = "the chat template writes no assistant token that can be trained"
                results.append(BadRecord(conversation.where, BadReason.NOTHING_TRAINED, detail))
            else:
                results.append(SequenceView(ids, mask))
        return results

    def _render(self, conversation: Conversation) -> tuple[str, list[Span]] | BadRecord:
        """Return the conversation's text and the spans of it that are trained."""
        if self._control is not None:
            for number, message in enumerate(conversation.messages, start=1):
                begins = any(character in message.text for character in self._control_begins)
                if begins and (match := self._control.search(message.text)):
                    detail = f"turn {number} ({message.role}) spells the control token {match.group()!r}"
                    return BadRecord(conversation.where, BadReason.CONTROL_TOKEN, detail)
        messages = conversation.as_dicts()
        try:
            if self.mask_rule == "generation":
                return self._template(messages, spans=True)
            text, _ = self._template(messages)
            if self.mask_rule == "all":
                return text, [(0, len(text))]
            return text, self._assistant_turns(messages, text)
        except Exception as error:  # a template is a user's program and can raise anything
            detail = f"the chat template failed: {type(error).__name__}: {error}"
            return BadRecord(conversation.where, BadReason.TEMPLATE_FAILED, detail)

    def _assistant_turns(self, messages: list[dict[str, str]], text: str) -> list[Span]:
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._template(messages[:index], prompt=True)
            after, _ = self._template(messages[: index + 1])
            if not after.startswith(before) or not text.startswith(after):
                raise ValueError(f"it writes turn {index + 1} differently once later turns follow; use another mask")
            spans.append((len(before), len(after)))
        return spans

    def _template(
        self, messages: list[dict[str, str]], *, spans: bool = False, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        with _RENDERING:
            texts, generated = render_jinja_template(
                conversations=[messages],
                chat_template=self.chat_template,
                return_assistant_tokens_mask=spans,
                add_generation_prompt=prompt,
                **self._hf.special_tokens_map,
            )
        return texts[0], [(start, end) for start, end in generated[0]] if spans else []


def fit_to_pack(sequence: SequenceView, *, pack_size: int, over_long: str) -> tuple[SequenceView | None, str]:
    """Cut or drop a sequence that is longer than a pack.

    Returns:
        the sequence and the outcome (`kept`, `truncated`), or None and the reason (`over_long`; `truncated_untrained`:
        the part that fits has no trained token).
    """
    if len(sequence) <= pack_size:
        return sequence, "kept"
    if over_long == "drop":
        return None, "over_long"
    ids, mask = sequence.input_ids[:pack_size], sequence.loss_mask[:pack_size].copy()
    # Its label is cut off.
    mask[-1] = 0
    return (SequenceView(ids, mask), "truncated") if mask.any() else (None, "truncated_untrained")


def tokenizer_hash(name: str) -> str:
    """Return `ChatTokenizer.tokenizer_hash` of a folder or hub id, with or without a chat template."""
    return _hash_tokens(_load(name))


def _hash_tokens(tokenizer: Any) -> str:
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return _digest(json.dumps([sorted(tokenizer.get_vocab().items()), sorted(special.items())]))


@contextlib.contextmanager
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


def _load(name: str) -> Any:
    try:
        with _without_advice():
            from transformers import AutoTokenizer
            from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"tokenizing needs a newer `transformers`: {error}", fix=INSTALL_FIX) from error
    folder = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not folder.is_dir():
        raise ConfigError("there is no such tokenizer folder", where=name, fix="check tokenizer.name")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name)
    except Exception as error:  # the library raises almost anything for a damaged folder
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "set tokenizer.name to a folder with tokenizer.json, or a hub id"
        raise ConfigError(f"the tokenizer cannot be loaded: {reason}", where=name, fix=fix) from error
    if not getattr(tokenizer, "is_fast", False):
        what = "it is not a fast tokenizer, so its tokens cannot be mapped to characters of the text"
        raise ConfigError(what, where=name, fix="use a tokenizer with a tokenizer.json")
    return tokenizer


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
