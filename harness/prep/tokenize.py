"""Conversations to sequences: chat template, token ids, and the mask of trained tokens.

    tokenizer = ChatTokenizer(TokenizerConfig(name="folder or hub id"))
    tokenizer.encode([conversation])        # [SequenceView(input_ids, loss_mask)] or [BadRecord]

`train_bpe` trains a tokenizer on the conversations themselves. The libraries (transformers, tokenizers, jinja2) are
imported when a tokenizer is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from harness.checks import require_choice, require_numbers
from harness.errors import ConfigError, PrepError
from harness.prep.chat import BadReason, BadRecord, Conversation
from harness.prep.packing import MIN_SEQUENCE_TOKENS
from harness.records import SequenceView, UInt8Array

MASK_RULES = ("generation", "assistant_turns", "all")
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Every byte is a token of its own before any merge.
MIN_VOCAB_SIZE = 256 + 3
INSTALL_FIX = "pip install 'megatron-sft-harness[tokenize]'"

# The end of a turn is trained, so that the model learns to stop; the line break after it is not.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}"
    "{{- message['content'] + '<|im_end|>' }}"
    "{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)
# First and past-the-end character.
Span = tuple[int, int]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# transformers caches one compiled template per text, which records spans in place and refuses a second thread.
_RENDERING = threading.Lock()
os.register_at_fork(before=_RENDERING.acquire, after_in_parent=_RENDERING.release, after_in_child=_RENDERING.release)


@dataclass
class TokenizerConfig:
    """Tokenizer, chat template and masking rule.

    Attributes:
        kind: `bpe` trains a byte-level BPE on the source if no name is given, `huggingface` requires a name.
        name: a Hugging Face tokenizer folder or hub id.
        vocab_size: number of tokens of a trained tokenizer; not used with `name`.
        chat_template: a Jinja file that replaces the tokenizer's own template.
        mask: rule for trained tokens. `generation`: tokens that the template writes inside `{% generation %}`;
            `assistant_turns`: tokens that each assistant turn adds to the conversation before it, for templates without
            that tag; `all`: every token.
        control_tokens: `refuse` conversations whose text spells a special token of the tokenizer, or `allow` them:
            such text then becomes the token itself, so a user who writes the end of a turn has ended the turn.
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
            raise ConfigError("no tokenizer is named", where="tokenizer.name", fix="name a tokenizer folder or hub id")
        require_numbers(self, "tokenizer", "vocab_size", lowest=MIN_VOCAB_SIZE)
        require_choice(self.mask, MASK_RULES, setting="tokenizer.mask")
        require_choice(self.control_tokens, ("refuse", "allow"), setting="tokenizer.control_tokens")


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
        self.mask_rule = config.mask
        self._hf = _load(self.name)
        self._backend = self._hf.backend_tokenizer
        # A tokenizer.json may carry settings of the program that wrote it.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        if config.chat_template:
            try:
                self._hf.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                what, fix = f"the template cannot be read: {error}", "check tokenizer.chat_template"
                raise ConfigError(what, where=config.chat_template, fix=fix) from error
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
        return end_tokens(self._hf)

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
                begins = any(character in message.content for character in self._control_begins)
                if begins and (match := self._control.search(message.content)):
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


def token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> UInt8Array:
    """Mask the tokens with characters inside the spans.

    A token covers everything since the token before it, even if its own offsets leave white space out.

    Args:
        offsets: [L] first and past-the-end character of each token.
        spans: first and past-the-end character of each trained part.

    Returns:
        uint8 [L], token-aligned.
    """
    # Twice as fast as an array made of pairs.
    starts, ends = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2).T
    starts = np.minimum(starts, np.concatenate([np.zeros(1, np.int64), np.maximum.accumulate(ends)])[: len(starts)])
    mask = np.zeros(len(starts), np.uint8)
    for start, end in spans:
        mask |= (starts < end) & (ends > start)
    return mask


def mask_of_encoding(encoding: Any, num_tokens: int, text: str, spans: Sequence[Span]) -> UInt8Array:
    """Compute `token_mask` of an encoding by the tokenizers library, mostly without reading every token's offsets.

    Reading all offsets costs up to a third of tokenizing.

    Args:
        encoding: of `text`, with `num_tokens` tokens.

    Returns:
        uint8 [num_tokens], token-aligned.
    """
    mask = np.zeros(num_tokens, np.uint8)
    for start, end in spans:
        tokens = _tokens_of(encoding, num_tokens, len(text), start, end)
        if tokens is None:
            return token_mask(encoding.offsets, spans)
        mask[tokens] = 1
    return mask


def _tokens_of(encoding: Any, num_tokens: int, num_characters: int, start: int, end: int) -> slice | None:
    """Return the tokens of a span that begins and ends at token boundaries; None if it does not."""
    first = encoding.char_to_token(start)
    if start >= end or first is None:
        return None
    following = num_tokens if end == num_characters else encoding.char_to_token(end)
    # No character may be left out between the span and the next token: that token would cover it.
    if following is None or encoding.char_to_token(end - 1) is None:
        return None
    if following < num_tokens and encoding.token_to_chars(following)[0] != end:
        return None
    # Nor may there be a token without characters.
    last = encoding.token_to_chars(following - 1) if following > first else None
    return slice(first, following) if last is not None and last[0] < end else None


def train_bpe(texts: Iterable[str], folder: Path, *, vocab_size: int) -> None:
    """Train a tokenizer and save it as a Hugging Face tokenizer folder; the same texts give the same tokenizer.

    Args:
        texts: training text.
        folder: receives tokenizer.json and tokenizer_config.json, which holds the chat template.
        vocab_size: number of tokens, including three special ones; a small text gives fewer.

    Raises:
        PrepError: there are no texts.
        ConfigError: the `tokenizers` library is missing.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    except ImportError as error:
        raise ConfigError("training a tokenizer needs the `tokenizers` library", fix=INSTALL_FIX) from error
    remaining = iter(texts)
    first = next(remaining, None)
    if first is None:
        raise PrepError("there is no text to train a tokenizer on", fix="check source.path and the bad records")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain([first], remaining), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def end_tokens(tokenizer: Any) -> list[int]:
    """Return the ids that end an answer: the end token of a transformers tokenizer, and those of common templates."""
    marks = [tokenizer.eos_token, "<|im_end|>", "<|eot_id|>", "</s>"]
    vocabulary = tokenizer.get_vocab()
    return sorted({vocabulary[mark] for mark in marks if mark in vocabulary})


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


def _load(name: str) -> Any:
    try:
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
