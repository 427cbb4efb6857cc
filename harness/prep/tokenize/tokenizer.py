"""From conversations to sequences: chat template, token ids, and which tokens are trained."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.checks import require_at_least, require_choice
from harness.errors import ConfigError
from harness.prep.chat import BadReason, BadRecord, Conversation
from harness.prep.packing import MIN_SEQUENCE_TOKENS
from harness.prep.tokenize.bpe import INSTALL_FIX, MIN_VOCAB_SIZE
from harness.prep.tokenize.mask import Span, mask_of_encoding
from harness.records import SequenceView

MASK_RULES = ("generation", "assistant_turns", "all")

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# transformers keeps one compiled template for all that have its text, which notes spans and refuses a second thread.
_RENDERING = threading.Lock()
os.register_at_fork(before=_RENDERING.acquire, after_in_parent=_RENDERING.release, after_in_child=_RENDERING.release)


@dataclass
class TokenizerConfig:
    """Which tokenizer and chat template turn conversations into tokens.

    Attributes:
        kind: `bpe` trains a byte-level BPE on the source where no name is given, `huggingface` asks for a name.
        name: a Hugging Face tokenizer folder or hub id.
        vocab_size: tokens of a tokenizer that is trained; not used with `name`.
        chat_template: a Jinja file used in place of the tokenizer's own template.
        mask: which tokens are trained. `generation`: those that the template writes inside `{% generation %}`;
            `assistant_turns`: what each assistant turn adds to the conversation before it, for templates without that
            tag; `all`: every token.
        control_tokens: `refuse` conversations whose text spells a special token of the tokenizer, or `allow` them.
            Allowed, such text becomes the token itself, and a user who writes a turn's end has ended the turn.
    """

    kind: str = "bpe"
    name: str = ""
    vocab_size: int = 8192
    chat_template: str = ""
    mask: str = "generation"
    control_tokens: str = "refuse"

    def __post_init__(self) -> None:
        require_choice(self.kind, ("bpe", "huggingface"), setting="tokenizer.kind")
        if self.kind == "huggingface" and not self.name:
            raise ConfigError(
                "no tokenizer is named", where="tokenizer.name", fix="name a tokenizer folder, or a hub id"
            )
        require_at_least(self.vocab_size, MIN_VOCAB_SIZE, setting="tokenizer.vocab_size")
        require_choice(self.mask, MASK_RULES, setting="tokenizer.mask")
        require_choice(self.control_tokens, ("refuse", "allow"), setting="tokenizer.control_tokens")


class ChatTokenizer:
    """A tokenizer with its chat template and masking rule.

    Tokens are those of `apply_chat_template(..., tokenize=True)`. The mask is made here, from the characters that each
    token stands for: transformers asks for the token of a span's last character, finds none where a tokenizer leaves
    white space out of its offsets, and then trains everything up to the end of the conversation.
    """

    def __init__(self, config: TokenizerConfig, folder: str = "") -> None:
        """Load from `folder`, or else from `config.name`.

        Raises:
            ConfigError: it cannot be loaded, is no fast tokenizer, or its template is no Jinja, or has no
                `{% generation %}` while the masking rule needs it.
        """
        self.name = folder or config.name
        self.mask_rule = config.mask
        self._hf = _load(self.name)
        self._backend = self._hf.backend_tokenizer
        # A tokenizer.json may carry settings of the run that wrote it.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        if config.chat_template:
            self._hf.chat_template = _read_template(config.chat_template)
        try:
            self.chat_template: str = self._hf.get_chat_template(None, None)
        except ValueError as error:
            raise ConfigError(
                "the tokenizer has no chat template", where=self.name, fix="name one with tokenizer.chat_template"
            ) from error
        self._check_syntax(config.chat_template or self.name)
        if config.mask == "generation" and not _GENERATION_TAG.search(self.chat_template):
            raise ConfigError(
                "the chat template has no {% generation %}, so it does not say which tokens are the assistant's",
                where=config.chat_template or self.name,
                fix="set tokenizer.mask=assistant_turns, or name a template that has it with tokenizer.chat_template",
            )
        special_tokens = {token.content for token in self._hf.added_tokens_decoder.values() if token.special}
        # Longest first, so that the token named in an error is the one that would be made.
        special = sorted(special_tokens | set(self._hf.all_special_tokens), key=lambda token: (-len(token), token))
        refuse = config.control_tokens == "refuse" and special
        self._control = re.compile("|".join(map(re.escape, special))) if refuse else None
        # A look for these costs next to nothing, and most text has none.
        self._control_begins = sorted({token[0] for token in special})

    def _check_syntax(self, where: str) -> None:
        """Once and for all, where each conversation would say the same."""
        import jinja2

        try:
            self._template([{"role": "user", "content": ""}])
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is no Jinja: {error.message}, line {error.lineno}", where=where, fix="mend it there"
            ) from None
        except Exception:
            # Templates may refuse this conversation; each that is read is answered for on its own.
            pass

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return 1 + int(max(self._hf.get_vocab().values()))

    @property
    def tokenizer_hash(self) -> str:
        """16 hex digits over every token with its id and the roles of special ones."""
        return _hash_tokens(self._hf)

    @property
    def chat_template_hash(self) -> str:
        """16 hex digits over the template's text."""
        return _digest(self.chat_template)

    def save(self, folder: Path) -> None:
        """Write it as a Hugging Face tokenizer folder, with the template in use."""
        self._hf.save_pretrained(str(folder))

    def prompt(self, text: str) -> list[int]:
        """Token ids of a conversation in which a user has said `text`, up to where the answer begins."""
        rendered, _ = self._template([{"role": "user", "content": text}], prompt=True)
        return list(self._backend.encode(rendered, add_special_tokens=False).ids)

    @property
    def ends(self) -> list[int]:
        """Tokens that end an answer."""
        return end_tokens(self._hf)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self._backend.decode(list(map(int, ids)), skip_special_tokens=False))

    def encode(self, conversations: Sequence[Conversation]) -> list[SequenceView | BadRecord]:
        """Tokenise; each result stands where its conversation did.

        Returns:
            per conversation input_ids int32 [L] and loss_mask uint8 [L] (label-aligned, so shifted left by one from
            the tokens that the assistant wrote), L at least 2 with something to train; or why there is none.
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
            results.append(self._check(conversation, SequenceView(ids, mask)))
        return results

    def _check(self, conversation: Conversation, sequence: SequenceView) -> SequenceView | BadRecord:
        if len(sequence) < MIN_SEQUENCE_TOKENS:
            detail = f"is {len(sequence)} token long, so there is nothing to predict"
            return BadRecord(conversation.where, BadReason.TOO_SHORT, detail)
        if not sequence.loss_mask.any():
            detail = "the chat template writes no assistant token that can be trained"
            return BadRecord(conversation.where, BadReason.NOTHING_TRAINED, detail)
        return sequence

    def _render(self, conversation: Conversation) -> tuple[str, list[Span]] | BadRecord:
        """The conversation's text and the parts of it, in characters, that are trained."""
        if self._control is not None:
            for number, message in enumerate(conversation.messages, start=1):
                begins = any(character in message.content for character in self._control_begins)
                if begins and (found := self._control.search(message.content)):
                    detail = f"turn {number} ({message.role}) spells the control token {found.group()!r}"
                    return BadRecord(conversation.where, BadReason.CONTROL_TOKEN, detail)
        messages = conversation.as_dicts()
        try:
            if self.mask_rule == "generation":
                return self._template(messages, spans=True)
            text, _ = self._template(messages)
            if self.mask_rule == "all":
                return text, [(0, len(text))]
            return text, self._assistant_turns(messages, text)
        except Exception as error:  # a template is the user's program and can raise anything
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
            texts, found = render_jinja_template(
                conversations=[messages],
                chat_template=self.chat_template,
                return_assistant_tokens_mask=spans,
                add_generation_prompt=prompt,
                **self._hf.special_tokens_map,
            )
        return texts[0], [(start, end) for start, end in found[0]] if spans else []


def end_tokens(tokenizer: Any) -> list[int]:
    """Of a tokenizer of transformers: its own end, and what templates write after a turn."""
    marks = [tokenizer.eos_token, "<|im_end|>", "<|eot_id|>", "</s>"]
    known = tokenizer.get_vocab()
    return sorted({known[mark] for mark in marks if mark in known})


def fit_to_pack(sequence: SequenceView, *, pack_size: int, over_long: str) -> tuple[SequenceView | None, str]:
    """Cut a sequence to what a pack can hold.

    Returns:
        the sequence and what was done (`kept`, `truncated`), or None and why (`over_long`, `truncated_untrained`: no
        trained token is left in what fits).
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
    """`ChatTokenizer.tokenizer_hash` of a folder or hub id, whether it has a chat template or not."""
    return _hash_tokens(_load(name))


def _hash_tokens(tokenizer: Any) -> str:
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return _digest(json.dumps([sorted(tokenizer.get_vocab().items()), sorted(special.items())]))


def _load(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"tokenising takes a newer `transformers`: {error}", fix=INSTALL_FIX) from error
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).expanduser().is_dir():
        raise ConfigError("there is no such tokenizer folder", where=name, fix="check tokenizer.name")
    path = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the library raises almost anything for a damaged folder
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"the tokenizer cannot be loaded: {reason}",
            where=name,
            fix="tokenizer.name takes a folder with tokenizer.json, or a hub id",
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            "it is not a fast tokenizer, so tokens cannot be traced to the text that they stand for",
            where=name,
            fix="use a tokenizer with a tokenizer.json",
        )
    return tokenizer


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the template cannot be read: {error}", where=path, fix="check the setting") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
