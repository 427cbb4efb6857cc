"""Everything that touches torch.distributed, Megatron-Core or Transformer Engine."""
