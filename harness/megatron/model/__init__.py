"""Build Megatron-Core's GPTModel from a `ModelConfig` (`gpt.py`), with packed attention, RMSNorm, router and LoRA."""
