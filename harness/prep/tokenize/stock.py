"""Published chat templates of model families, identified by hash, and the parts of their text that are trained.

The rules match the marks in TRL's training variants of the same templates; the tests compare them token by token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StockRule:
    """Trained parts of the turns of one published template.

    The trained part of a turn starts after one of the texts `opens` in the generation prompt, or with it if
    `inclusive`: the rest of the prompt, such as an opened reasoning block, is trained, too. Without `opens`, the whole
    prompt comes from the server. `skips` are headers that the template repeats after a tool's result and a server does
    not; they are not trained. `ends` are tokens that end a turn in addition to those that the template writes last.
    `last_ends` end a last answer and a last tool call if the template writes no end.
    """

    name: str
    opens: tuple[str, ...] = ()
    inclusive: bool = False
    skips: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    last_ends: tuple[str, ...] = ()

    def start(self, prompt: str) -> int | None:
        """Return the character of a generation prompt where the trained part starts; None if it has no header."""
        if not self.opens:
            return len(prompt)
        place, text = max(((prompt.rfind(text), text) for text in self.opens), default=(-1, ""))
        return None if place < 0 else place if self.inclusive else place + len(text)


_CHATML = ("<|im_start|>assistant\n",)
_CHANNELS = ("<|start|>assistant",)
_DEEPSEEK = ("<\uff5cAssistant\uff5c>", "<\uff5ctool\u2581outputs\u2581end\uff5c>")
_GEMMA = ("<|turn>model\n",)
# Keyed by the first 16 hex digits of the SHA-256 of the text, without surrounding white space.
_RULES: dict[str, StockRule] = {
    "90c33aee14aa2a22": StockRule("Cohere Aya Expanse"),
    "2147c474f41b522b": StockRule("Cohere 2"),
    "56a1447ad31926fd": StockRule("DeepSeek-R1-Distill"),
    "563b1ce7d61d50a9": StockRule("DeepSeek-V3", opens=_DEEPSEEK, inclusive=True),
    "9aeb7eac68ad87bb": StockRule("DiffusionGemma", skips=_GEMMA),
    "ecd6ae513fe103f0": StockRule("Gemma and Gemma 2"),
    "8d9e3a3c114fb205": StockRule("Gemma 3"),
    "33204f1acb5bd000": StockRule("Gemma 4", skips=_GEMMA),
    "55572b8d3c834204": StockRule("Gemma 4, second revision", skips=_GEMMA),
    "781d10940fbc44be": StockRule("Gemma 4, third revision", skips=_GEMMA),
    "2f1b4d75d067bae3": StockRule("Gemma 4, fourth revision", skips=_GEMMA),
    "603a42db292c2527": StockRule("Gemma 4, fifth revision", skips=_GEMMA),
    "44f815868bf02fa4": StockRule(
        "GLM-4.5 MoE", ends=("<|user|>", "<|observation|>", "<|system|>"), last_ends=("<|user|>", "<|observation|>")
    ),
    "a4c9919cbbd4acdd": StockRule("gpt-oss", opens=_CHANNELS, inclusive=True, ends=("<|end|>",)),
    "0d7e56ca41705b79": StockRule("Idefics 3"),
    "cef187400d62a595": StockRule("LFM2"),
    "6d65c8804847ad74": StockRule("LFM2.5"),
    "c5b67247c9f736f6": StockRule("LFM2.5, second revision"),
    "7822d3aa6f6eac57": StockRule("LFM2.5-VL"),
    "5504d163d879bfb6": StockRule("LFM2, second revision"),
    "ba03a121d097859c": StockRule("Llama 3"),
    "93c0e9aa3629bbd7": StockRule("Llama 3.1"),
    "d82792f95932f1c9": StockRule("Llama 3.2"),
    "2c17243a977fd064": StockRule("LLaVA-NeXT"),
    "6cd0e94d9b489fdb": StockRule("Muse Glimmer", opens=_CHANNELS, inclusive=True),
    "58933db77d3099b4": StockRule("Nemotron 3.5 Lightning", opens=_CHATML),
    "43a92aacc2e169bb": StockRule("Nemotron 3 Nano", opens=_CHATML),
    "3b74d76d8b903752": StockRule("Nemotron 3 Super", opens=_CHATML),
    "82753bef5cedc493": StockRule("Nemotron 3 Ultra", opens=_CHATML),
    "dcaee66df77bfbb7": StockRule("Phi-3"),
    "78d976a442bcde2f": StockRule("Phi-3.5"),
    "55b2f4a26ac9ee71": StockRule("Qwen2.5"),
    "a0bc6f6fc7a29a80": StockRule("Qwen2.5-VL"),
    "a55ee1b1660128b7": StockRule("Qwen3"),
    "273d8e0e683b8850": StockRule("Qwen3.5, not thinking", opens=_CHATML),
    "a4aee8afcf2e0711": StockRule("Qwen3.5, thinking", opens=_CHATML),
    "e84f32a23fdda276": StockRule("Qwen3.6", opens=_CHATML),
    "c3cf9e34abf4f9e3": StockRule("Qwen3.8", opens=_CHATML),
    "64f85b198065d0fb": StockRule("Qwen3-Instruct-2507"),
    "9d879ef91075acbf": StockRule("Qwen3-VL"),
    "830005085ddd94ce": StockRule("SmolVLM"),
}


def stock_rule(template: str) -> StockRule | None:
    """Return the rule of a published template; None for any other text."""
    return _RULES.get(hashlib.sha256(template.strip().encode()).hexdigest()[:16])
