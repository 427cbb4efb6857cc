"""Settings of tokenization."""

from __future__ import annotations

from dataclasses import dataclass

from harness.checks import CheckedSettings, bounded, one_of
from harness.errors import ConfigError

MASK_RULES = ("auto", "generation", "assistant_turns", "all")
HISTORY_RULES = ("as_served", "kept")
TRAINED_TURNS = ("all_assistant", "last_turn", "marked", "weighted")
# Every byte is a separate token before any merge.
MIN_VOCAB_SIZE = 256 + 3
# Maximum length of a rendered conversation.
MAX_CHARACTERS = 64 << 20
# Exit codes of the rendering process.
OUT_OF_MEMORY, OUT_OF_CHARACTERS = 71, 72


@dataclass
class TokenizerConfig(CheckedSettings, section="tokenizer"):
    """Tokenizer, chat template and mask rule.

    Attributes:
        kind: `bpe` trains a byte-level BPE on the source if `name` is empty; `huggingface` requires `name`.
        name: folder or hub id of a Hugging Face tokenizer.
        vocab_size: vocabulary size of a trained tokenizer; ignored if `name` is set.
        chat_template: Jinja file or name of a built-in template that replaces the tokenizer's own template. Special
            tokens of the template are added to a trained tokenizer.
        mask: rule that selects trained tokens. `auto` selects and reports a rule by template: generation marks if the
            template has them, a verified rule for a known template, and otherwise the text that follows the generation
            prompt of each turn. `generation`: tokens inside `{% generation %}`; `assistant_turns`: tokens that each
            assistant turn appends to the conversation; `all`: every token.
        history: handling of templates that omit reasoning from earlier turns. `as_served` creates a separate sequence
            for each assistant turn whose context a server would render differently, and trains only that turn. `kept`
            creates one sequence per conversation with the reasoning of every turn, using the template's own switch if
            it has one; later turns are then trained after text that a server would omit (see `--preview`).
        train_on: turns to train: `all_assistant`, only the `last_turn`, only messages `marked` with a weight in the
            record, or `weighted`: all assistant turns, with the loss of each token scaled by the `weight` of its
            message or content part, a number from 0 to 1 with at most two decimals (default: 1).
        train_reasoning: train the reasoning of trained turns.
        train_tool_calls: train the tool calls of trained turns.
        train_end_of_turn: train the token that ends a turn, which teaches the model to stop.
        end_of_last_turn: special token, such as `<|endoftext|>`, to append to a trained turn and train if the chat
            template writes no end of turn. Empty refuses such conversations, except for GLM-4.5.
        control_tokens: `refuse` conversations whose text contains a special token of the tokenizer, or `allow` them,
            and encode it as that token: a user message that contains the end-of-turn token then ends the turn.
    """

    kind: str = one_of("bpe", ("bpe", "huggingface"))
    name: str = ""
    vocab_size: int = bounded(8192, lowest=MIN_VOCAB_SIZE, highest=100_000_000)
    chat_template: str = ""
    mask: str = one_of("auto", MASK_RULES)
    history: str = one_of("as_served", HISTORY_RULES)
    train_on: str = one_of("all_assistant", TRAINED_TURNS)
    train_reasoning: bool = True
    train_tool_calls: bool = True
    train_end_of_turn: bool = True
    end_of_last_turn: str = ""
    control_tokens: str = one_of("refuse", ("refuse", "allow"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "huggingface" and not self.name:
            raise ConfigError("no tokenizer is set", where="tokenizer.name", fix="set a tokenizer folder or hub id")
        if self.mask in ("assistant_turns", "all"):
            defaults = TokenizerConfig()
            names = ["train_reasoning", "train_tool_calls", "train_end_of_turn", "history"]
            names += ["train_on"] if self.mask == "all" else []
            unused = [name for name in names if getattr(self, name) != getattr(defaults, name)]
            if unused:
                what = f"tokenizer.{unused[0]}={getattr(self, unused[0])} has no effect with tokenizer.mask={self.mask}"
                fix = "set tokenizer.mask=auto, or omit the other setting"
                raise ConfigError(what, where=f"tokenizer.{unused[0]}", fix=fix)


def refuse_weighted(config: TokenizerConfig, where: str) -> None:
    """Raise ConfigError if the settings, given by the user or by a tokenizer's dataset, give weights to tokens."""
    if config.train_on == "weighted":
        fix = "use stored data, or the tokenizer folder of a dataset without weights"
        raise ConfigError("train_on is weighted, but live data does not support token weights", where=where, fix=fix)
