"""Dense families of Llama's shape, each with at most one difference."""

from __future__ import annotations

from harness.plan.families.base import Family

# Llama 2 to 3.3.
LLAMA = Family("llama", "LlamaForCausalLM")
# Without its sliding window.
MISTRAL = Family("mistral", "MistralForCausalLM", window_setting="", write=lambda model: {"sliding_window": None})
# And Qwen2.5: biases of queries, keys and values.
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", has_qkv_bias=True, write=lambda model: {"use_sliding_window": False})
# Norms of the queries and keys of each head.
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", has_head_norms=True)
