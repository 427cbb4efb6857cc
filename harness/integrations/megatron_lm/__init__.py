"""Megatron-LM: the data path in its own training loop.

Stored data, with `pretrain` of `megatron.training` and `--dataloader-type external`: give it
`train_valid_test_datasets_provider` (or what `datasets_provider` returns) and `forward_step`, or call `get_batch` in a
forward step of one's own. The position in the data is saved in Megatron's checkpoints, and resumes on any number of
data-parallel ranks.

Streams of sequences of unknown lengths: `data_schedule` and `data_schedule_utils` have the names of Megatron's packing
scheduler, and take its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.doors import names_on_first_use

if TYPE_CHECKING:
    from harness.integrations.megatron_lm.data_loader import (
        ExternalLoader,
        datasets_provider,
        train_valid_test_datasets_provider,
    )
    from harness.integrations.megatron_lm.forward import forward_step, get_batch, loss_function

__all__ = [
    "ExternalLoader",
    "datasets_provider",
    "forward_step",
    "get_batch",
    "loss_function",
    "train_valid_test_datasets_provider",
]

# Imported at first use: a program prepares its process before Megatron-Core is imported.
__getattr__ = names_on_first_use(
    __name__,
    data_loader="ExternalLoader datasets_provider train_valid_test_datasets_provider",
    forward="forward_step get_batch loss_function",
)
