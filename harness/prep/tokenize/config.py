"""Settings of tokenizing."""

from __future__ import annotations

from dataclasses import dataclass

from harness.checks import CheckedSettings, bounded, one_of
from harness.errors import ConfigError

MASK_RULES = ("auto", "generation", "assistant_turns", "all")
HISTORY_RULES = ("as_served", "kept")
TRAINED_TURNS = ("all_assistant", "last_turn", "marked", "weighted")
# Every byte is a token of its own before any merge.
MIN_VOCAB_SIZE = 256 + 3
# Of a rendered conversation.
MAX_CHARACTERS = 64 << 20
# Exit codes of the process that renders.
OUT_OF_MEMORY, OUT_OF_CHARACTERS = 71, 72
INSTALL_FIX = "pip install 'megatron-sft-harness[tokenize]'"


@dataclass
class TokenizerConfig(CheckedSettings, section="tokenizer"):
    """Tokenizer, chat template and mask rule.

    Attributes:
        kind: `bpe` trains a byte-level BPE on the source if no name is given, `huggingface` requires a name.
        name: a Hugging Face tokenizer folder or hub id.
        vocab_size: number of tokens of a trained tokenizer; not used with `name`.
        chat_template: a Jinja file, or the name of a built-in template, that replaces the tokenizer's own template. A
            trained tokenizer gets the special tokens of the template.
        mask: rule for trained tokens. `auto` chooses by the template, and reports its choice: marks where the template
            has them, an audited rule where it is a known one, else the text that the model has to generate after the
            prompt of each turn. `generation`: tokens that the template writes inside `{% generation %}`;
            `assistant_turns`: tokens that each assistant turn adds to the conversation before it; `all`: every token.
        history: for templates that write earlier turns without their reasoning. `as_served` makes a sequence of its
            own for each assistant turn that a server would render differently, with only that turn trained; `kept`
            makes one sequence of a conversation, in which every turn is written as it is generated, with its
            reasoning: by the template's switch for it if there is one. Later turns are then trained after text that a
            server would leave out, which `--preview` shows.
        train_on: `all_assistant` turns, only the `last_turn`, the messages that the record has `marked` with a
            weight, or all assistant turns `weighted`: the loss of each token counts by the `weight` of its message, or
            of its part of the content, a number from 0 to 1 with at most two decimals; without one it counts by 1.
        train_reasoning: train the reasoning of trained turns.
        train_tool_calls: train the tool calls of trained turns.
        train_end_of_turn: train the token that ends a turn, from which the model learns to stop.
        end_of_last_turn: special token, such as `<|endoftext|>`, that is added to a trained turn, and trained, where
            the chat template writes no end; empty refuses such a conversation. GLM-4.5 has its own without this.
        control_tokens: `refuse` conversations whose text spells a special token of the tokenizer, or `allow` them:
            such text then becomes the token itself, so a user who writes the end of a turn has ended the turn.
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
            raise ConfigError("no tokenizer is named", where="tokenizer.name", fix="name a tokenizer folder or hub id")
        if self.mask in ("assistant_turns", "all"):
            defaults = TokenizerConfig()
            names = ["train_reasoning", "train_tool_calls", "train_end_of_turn", "history"]
            names += ["train_on"] if self.mask == "all" else []
            unused = [name for name in names if getattr(self, name) != getattr(defaults, name)]
            if unused:
                raise ConfigError(
                    f"tokenizer.{unused[0]}={getattr(self, unused[0])} does nothing with tokenizer.mask={self.mask}",
                    where=f"tokenizer.{unused[0]}",
                    fix="set tokenizer.mask=auto, or omit the other setting",
                )


def refuse_weighted(config: TokenizerConfig, where: str) -> None:
    """Raise ConfigError for settings, of the user or of the dataset of a tokenizer, that give weights to tokens."""
    if config.train_on == "weighted":
        what = "train_on is weighted, and live data has no weights of tokens"
        fix = "use stored data, or name a tokenizer folder that is not that of a dataset with weights"
        raise ConfigError(what, where=where, fix=fix)
