"""Imported before Megatron-Core: the process of the tests is as that of a program that trains on a CPU.

Without it Megatron-Core loads PyTorch's compiler and compiles its fused functions, half a minute of processor time.
"""

from __future__ import annotations

from harness.megatron import prepare_process

prepare_process()
