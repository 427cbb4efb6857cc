"""Published chat templates of model families, known by their hash, and what is trained in them.

The rules follow what TRL's training twins of the same templates mark; the tests compare them token by token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StockRule:
    """What is trained in the turns of one published template.

    Attributes:
        name: of the model family.
        opens: texts of the generation prompt after which a trained turn begins: what the prompt has after them, such
            as an opened block of reasoning, is trained too. Empty where the whole prompt is the server's.
        inclusive: the text itself is trained, too.
        ends: tokens that end a turn beside those that the template writes last.
    """

    name: str
    opens: tuple[str, ...] = ()
    inclusive: bool = False
    ends: tuple[str, ...] = ()

    def start(self, prompt: str) -> int | None:
        """Return the character of a generation prompt from which on a turn is trained; None if it has no header."""
        places = [(prompt.rfind(text), text) for text in self.opens]
        place, text = max(places, default=(-1, ""))
        return None if place < 0 else place if self.inclusive else place + len(text)


_CHATML = ("<|im_start|>assistant\n",)
_RULES: dict[str, StockRule] = {}


def stock_rule(template: str) -> StockRule | None:
    """Return the rule of a published template; None for any other text."""
    return _RULES.get(hashlib.sha256(template.strip().encode()).hexdigest()[:16])
