"""Ask one version of Transformer Engine which attention it would choose on an H100; see `engine_backends.py`.

    LD_PRELOAD=gpu.so PYTHONPATH=FOLDER python engine_question.py < questions.json > answers.json

Its own Python code and its own library decide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import types
from typing import Any

import torch

with contextlib.redirect_stdout(sys.stderr):
    import engine_extension  # noqa: F401 - before Transformer Engine


def main() -> None:
    h100 = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H100 80GB HBM3")
    torch.cuda.get_device_properties = lambda *_: h100
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: 0
    with contextlib.redirect_stdout(sys.stderr):
        import transformer_engine.pytorch
        from packaging.version import Version
        from transformer_engine.pytorch.attention.dot_product_attention import utils

    known = {field.name for field in dataclasses.fields(utils.AttentionParams)}

    def choose(ask: dict[str, Any]) -> str:
        values = {**ask, "qkv_dtype": getattr(torch, ask["qkv_dtype"]), "window_size": tuple(ask["window_size"])}
        given = {name: value for name, value in values.items() if name in known}
        flash, _, fused, _, unfused, _ = utils.get_attention_backend(utils.AttentionParams(**given))
        return "flash" if flash else "fused" if fused else "unfused" if unfused else "none"

    asks = json.load(sys.stdin)
    # The package flash-attn cannot be installed here, and only its version counts.
    flash_attn = utils.FlashAttentionUtils
    answers: dict[str, dict[str, str]] = {name: {} for name in asks}
    for name, ask in asks.items():
        answers[name]["plain"] = choose(ask)
        answers[name]["deterministic"] = choose({**ask, "deterministic": True})
    flash_attn.version = Version("2.7.4.post1")
    flash_attn.set_flash_attention_version()
    for name, ask in asks.items():
        answers[name]["with flash-attn"] = choose(ask)
        answers[name]["deterministic, with flash-attn"] = choose({**ask, "deterministic": True})
    cudnn = ".".join(map(str, utils.get_cudnn_version()))
    json.dump({"version": transformer_engine.__version__, "cudnn": cudnn, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
