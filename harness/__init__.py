"""Packed SFT data for Megatron-Core: stored in any format, fed to training, and proven to be the same."""
