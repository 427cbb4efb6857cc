"""Read and balance pipeline layouts with stages of different sizes, in Megatron-Core's notation."""

from __future__ import annotations

import math
import re
from functools import lru_cache

from harness.errors import ConfigError

_WHERE = "parallel.pipeline_layout"
# `(x)*n`, then `x*n`, in the order in which Megatron-Core's `PipelineParallelLayerLayout` expands them.
_REPEATED = (r"\(([^)]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})")
_MOST_LETTERS = 100_000


@lru_cache(maxsize=1024)
def read_stages(layout: str) -> tuple[str, ...]:
    """Return the letters of each chunk of a pipeline, in model order; raise ConfigError for an invalid layout.

    `Et|(tt|)*2mL` becomes `Et`, `tt`, `tt` and `mL`: E is the embedding, t a layer, m an MTP layer, and L the loss.
    """
    letters = layout.replace(",", "")
    for pattern in _REPEATED:
        size = len(letters) + sum(len(found[1]) * int(found[2]) for found in re.finditer(pattern, letters))
        if size > _MOST_LETTERS:
            what = f"pipeline_layout {layout!r} has {size:,} letters, and the most are {_MOST_LETTERS:,}"
            raise ConfigError(what, where=_WHERE, fix="one t for each layer of the model")
        letters = re.sub(pattern, lambda found: found[1] * int(found[2]), letters)
    chunks = tuple(letters.split("|"))
    wanted = ("Et*", *["t+"] * (len(chunks) - 2), "t*m*L")
    for number, (chunk, pattern) in enumerate(zip(chunks, wanted, strict=False)):
        if re.fullmatch(pattern, chunk) is None:
            what = f"stage {number} of {len(chunks)} of pipeline_layout {layout!r} is {chunk!r}"
            fix = "E and layers (t) in the first stage, layers in the stages between, and layers, MTP layers (m) and "
            fix += "L in the last, with | between stages, such as Et*3|t*4|t*4|t*3L"
            raise ConfigError(what, where=_WHERE, fix=fix)
    return chunks


def balance_stages(
    num_layers: int, chunks: int, *, mtp_layers: int = 0, loss_layers: float = 0.0, least: int = 0
) -> str | None:
    """Return the layout of these layers that minimizes the largest chunk; None if there are too few layers.

    The embedding counts as no work. If the other chunks cannot all have the same size, the first ones are smaller,
    because they keep more activations.

    Args:
        chunks: number of chunks of the pipeline, at least 2.
        loss_layers: work of the loss and the MTP layers in the last chunk, as a number of layers.
        least: minimum number of layers in the last chunk.
    """
    choices = range(least, num_layers - (chunks - 1) + 1)
    if not choices:
        return None
    last = min(choices, key=lambda own: (max(own + loss_layers, math.ceil((num_layers - own) / (chunks - 1))), -own))
    sizes = [(num_layers - last + number) // (chunks - 1) for number in range(chunks - 1)]
    layers = ["" if size == 0 else "t" if size == 1 else f"t*{size}" for size in (*sizes, last)]
    return f"E{'|'.join(layers)}{'m' * mtp_layers}L"
