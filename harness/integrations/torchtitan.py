"""A dataset of the harness in torchtitan: `dataloader=HarnessDataLoader.Config(dataset_path=...)` in `Trainer.Config`.

Every stored pack is one row of `training.seq_len` tokens. Positions begin again with every sequence, from which
torchtitan makes its document masks, and labels that are not trained have its ignored index. The position is saved in
torchtitan's checkpoint; unlike its own loaders', it is loaded on any number of ranks.

torchtitan runs the same number of microbatches in every step, so only `as_packed` fits; balanced schedules need another
number in each.

Written for torchtitan 0.3.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from harness.errors import ConfigError
from harness.formats import open_dataset
from harness.integrations import FixedRows, RankStream, as_packed_rows, require, require_as_packed
from harness.loader import LoaderConfig, RankLayout

require("torchtitan")

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX


class HarnessDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Yields microbatches of this rank, across epochs; torchtitan builds it from its Config.

    Args:
        dp_world_size, dp_rank: of the data-parallel mesh.
        seq_len: tokens that every row is padded to.
        local_batch_size: rows of a microbatch.
        others: what torchtitan gives to every loader, such as a tokenizer, and a dataset of tokens does not need.

    Raises:
        HarnessError: a batch size or `seq_len` that does not fit, or a dataset that cannot be read.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Settings of `HarnessDataLoader`; `dataset_path` of torchtitan names the dataset, as `open_dataset` takes it.

        Attributes:
            global_batch_size: that of `training`: packs of one step. Also as there, -1 for one microbatch a rank.
            infinite: read epoch after epoch; false ends with the first, for validation.
            schedule: as_packed; others need a number of microbatches that torchtitan does not know.
            seed, shuffle, block_packs, window_blocks, drop_last, num_workers, prefetch_factor, allow_other_data: as in
                `LoaderConfig`.
            pin_memory: return tensors in pinned memory.
        """

        global_batch_size: int = -1
        infinite: bool = True
        schedule: str = "as_packed"
        seed: int = 0
        shuffle: bool = True
        block_packs: int = 64
        window_blocks: int = 16
        drop_last: bool = False
        num_workers: int = 2
        prefetch_factor: int = 2
        allow_other_data: bool = False
        pin_memory: bool = False

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **others: Any
    ) -> None:
        require_as_packed(config.schedule, trainer="torchtitan", setting="dataloader.schedule")
        if config.dataset or not config.dataset_path:
            what = f"a dataset of torchtitan is set: {config.dataset}" if config.dataset else "no dataset is set"
            fix = "set only dataloader.dataset_path, to a dataset of `harness prepare`"
            raise ConfigError(what, where="dataloader.dataset, dataloader.dataset_path", fix=fix)
        rows_of_microbatch = local_batch_size * dp_world_size
        size = rows_of_microbatch if config.global_batch_size < 0 else config.global_batch_size
        if size < 1 or size % rows_of_microbatch:
            what = f"a global batch of {size} packs cannot be divided into microbatches of {local_batch_size} on "
            what += f"{dp_world_size} ranks"
            fix = f"set it, and training.global_batch_size, to a multiple of {rows_of_microbatch}"
            raise ConfigError(what, where="dataloader.global_batch_size", fix=fix)
        own, known = self.Config.__annotations__, LoaderConfig.__dataclass_fields__
        shared = {name: getattr(config, name) for name in own if name in known}
        settings = LoaderConfig(**{**shared, "global_batch_size": size})
        reader = open_dataset(config.dataset_path)
        layout = RankLayout(dp_rank=dp_rank, dp_size=dp_world_size)
        schedule = as_packed_rows(
            reader.pack_offsets, reader.sequence_lengths, layout, pad_rows_to=seq_len, setting="training.seq_len"
        )
        stream, count = RankStream(reader, settings, schedule=schedule, layout=layout), size // dp_world_size
        self._rows = FixedRows(stream, rows_per_step=count, pad_rows_to=seq_len, one_epoch=not config.infinite)
        self._local_batch_size, self._pin_memory = local_batch_size, config.pin_memory and torch.cuda.is_available()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield `input` and `positions`, int64 [B, L], and labels, int64 [B, L], of one microbatch of this rank."""
        while rows := list(islice(self._rows, self._local_batch_size)):
            trained = [np.where(row.loss_mask > 0, row.labels, IGNORE_INDEX) for row in rows]
            arrays = ([row.tokens for row in rows], [row.position_ids for row in rows], trained)
            tokens, positions, labels = (torch.from_numpy(np.stack(each)) for each in arrays)
            if self._pin_memory:
                tokens, positions, labels = tokens.pin_memory(), positions.pin_memory(), labels.pin_memory()
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the steps so far; raise LoaderError if a step was read in part."""
        return self._rows.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Move to a position that `state_dict` returned, on any number of ranks; see `RankStream.load_state_dict`."""
        self._rows.load_state_dict(state_dict)

    def close(self) -> None:
        """End the workers."""
        self._rows.close()
