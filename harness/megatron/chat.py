"""Chat with a run's model in a terminal: the checkpoint is exported, and transformers generates."""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.megatron.export.folder import export_checkpoint
from harness.prep import ChatTokenizer, TokenizerConfig
from harness.prep.tokenize.recorded import end_tokens
from harness.printing import open_console, print_text

# Of whole models, and of LoRA adapters, which transformers loads with their base model.
ADAPTER_FILE = "adapter_config.json"
_MODEL_FILES = ("config.json", ADAPTER_FILE)


class Chat:
    """A conversation with a model.

    Args:
        folder: an exported model: weights, config.json and a tokenizer with a chat template.
        temperature: 0 always chooses the most likely token.
    """

    def __init__(self, folder: Path, *, max_tokens: int = 128, temperature: float = 0.0, seed: int = 0) -> None:
        import transformers
        from safetensors import SafetensorError

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        try:
            # A prompt has no mask: any rule that works with every template will do.
            self._prompts = ChatTokenizer(TokenizerConfig(name=str(folder), mask="all"))
            self._tokenizer = self._prompts.hf
        except ConfigError as error:
            raise ConfigError(
                f"no tokenizer with a chat template: {error.what}",
                where=str(folder),
                fix="`harness export` the run, add the tokenizer of its data to the export, and use that folder",
            ) from None
        if (folder / ADAPTER_FILE).is_file() and find_spec("peft") is None:
            raise ConfigError(
                "the package peft, which loads adapters, is not installed",
                where=str(folder),
                fix="pip install peft, or `harness export` the run without --adapter",
            )
        try:
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, trust_remote_code=False, weights_only=True
            ).eval()
        except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
            raise ConfigError(
                f"the model cannot be loaded: {str(error).strip().splitlines()[0]}",
                where=str(folder),
                fix="run `harness verify` on the folder; use a model of transformers whose weights have the "
                "shapes of its config.json, in safetensors; code in the folder is not run",
            ) from None
        settings = self._model.generation_config
        # For adapters the model's own settings are those of the base model.
        with suppress(OSError):
            settings = transformers.GenerationConfig.from_pretrained(folder, trust_remote_code=False)
        named = settings.eos_token_id
        # The tokens that end and pad an answer: those that the folder names, and those of its template.
        ends = {*end_tokens(self._tokenizer), *(named if isinstance(named, list) else [named])} - {None}
        pads = (settings.pad_token_id, self._tokenizer.pad_token_id, min(ends, default=None))
        pad = next((id for id in pads if id is not None), None)
        self._ends = {"eos_token_id": sorted(ends) or None, "pad_token_id": pad}
        self._room = int(self._model.config.max_position_embeddings) - max_tokens
        if self._room < 1:
            raise ConfigError(
                f"answers of {max_tokens:,} tokens do not fit into {self._room + max_tokens:,} positions",
                where="max_tokens",
                fix="lower it",
            )
        self._draw = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        self._max_tokens = max_tokens
        self._messages: list[dict[str, str]] = []
        transformers.set_seed(seed)

    def answer(self, text: str, *, live: bool = False) -> str:
        """Return the model's answer to `text` after the conversation so far; `live` prints it as it is generated.

        Turns that no longer fit are dropped, the oldest first.

        Raises:
            ConfigError: `text` alone does not fit.
        """
        import torch
        from transformers import TextStreamer

        class Printed(TextStreamer):  # type: ignore[misc]  # transformers has no types
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                open_console().print(text, end="\n" if stream_end else "", soft_wrap=True)

        self._messages.append({"role": "user", "content": text})
        while len(prompt := self._prompts.prompt(*self._messages)) > self._room:
            if len(self._messages) == 1:
                self._messages.clear()
                raise ConfigError(
                    f"the message has {len(prompt):,} tokens, but there is room for {self._room:,}",
                    where="the prompt",
                    fix="shorten it, or reduce max_tokens",
                )
            del self._messages[:2]
        streamer = Printed(self._tokenizer, skip_prompt=True, skip_special_tokens=True) if live else None
        ids = torch.tensor([prompt])
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **self._draw,
            **self._ends,
            max_new_tokens=self._max_tokens,
            streamer=streamer,
        )
        answer = str(self._tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True))
        self._messages.append({"role": "assistant", "content": answer})
        return answer


@contextmanager
def exported(source: Path) -> Iterator[Path]:
    """Yield a folder with the weights of a run, of one of its checkpoints, or of an exported model."""
    if any((source / name).is_file() for name in _MODEL_FILES):
        yield source
        return
    with tempfile.TemporaryDirectory() as place:
        export_checkpoint(source, Path(place) / "model")
        yield Path(place) / "model"


def talk(chat: Chat) -> None:
    """Answer lines from standard input until it ends; each line is a turn."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            text = input("you: " if is_terminal else "").strip()
        except EOFError:
            return
        if not text:
            continue
        if is_terminal:
            print_text("model: ", end="", flush=True)
        chat.answer(text, live=True)
