"""This project as a row of the scoreboard: its writer, loader, step and checkpoints, on one rank or two."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from harness import Loader, LoaderConfig, Pack, open_dataset, open_writer
from harness.cli.app import installed_version
from harness.conformance import Layout, NotSupported
from harness.megatron import prepare_process
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig, read_hf_config
from harness.schedule import ScheduleConfig

_LONGEST = 1024


class Trainer:
    """A target of `harness.conformance`."""

    name, version = "megatron-sft-harness", installed_version()

    def __init__(self) -> None:
        prepare_process(ParallelConfig())
        self._ranks: Any = None
        self._parallel: ParallelConfig | None = None

    def build(self, model_folder: Path, data: Path, layout: Layout) -> Any:
        from megatron.core import parallel_state

        from harness.megatron.job import runtime

        parallel = ParallelConfig(
            tensor_parallel_size=layout.tp_size,
            sequence_parallel=layout.tp_size > 1,
            expert_parallel_size=layout.ep_size,
        )
        if self._ranks is None:
            self._job = runtime.start("cpu")
            self._ranks = self._job.__enter__()
        if parallel != self._parallel:
            if self._parallel is not None:
                parallel_state.destroy_model_parallel()
            self._place = runtime.join(parallel, self._ranks.world_size)
            self._parallel = parallel
        self._layout, self._model_folder, self._folder = layout, model_folder, data.with_suffix("")
        lines = data.read_text().splitlines()
        self._reader = self._write([json.loads(line) for line in lines], self._folder / "epoch") if lines else None
        self._state: Any = None
        self._done = 0
        self._step: Any = None
        return self._train

    def _write(self, data: list[Any], folder: Path) -> Any:
        """Write conversations as packs in their order; a loss mask belongs to the token before the trained one."""
        size = self._layout.pack_size or _LONGEST
        with open_writer(folder, format="parquet", pack_size=size) as writer:
            packs: list[list[Any]] = []
            for one in data:
                count = len(one["input_ids"])
                if not self._layout.pack_size or not packs or sum(map(_length, packs[-1])) + count > size:
                    packs.append([])
                packs[-1].append(one)
            for pack in packs:
                starts = np.cumsum([0, *map(_length, pack[:-1])])
                ids = np.concatenate([one["input_ids"] for one in pack])
                mask = [[label != -100 for label in [*one["labels"][1:], -100]] for one in pack]
                writer.append(Pack(ids.astype("i4"), np.concatenate(mask).astype("u1"), starts.astype("i4")))
        return open_dataset(folder)

    def _make_step(self) -> Any:
        from harness.megatron.pretrained import find_pretrained
        from harness.megatron.step import MegatronStep

        layout, stored = self._layout, read_hf_config(self._model_folder).settings
        files = {"init_from": str(self._model_folder), "dtype": "float32", "max_sequence_length": _LONGEST}
        if stored["num_experts"]:
            stored |= {"aux_loss": layout.router_loss}
        if layout.mtp_loss:
            stored |= {"mtp_layers": 1, "mtp_loss": layout.mtp_loss}
        self._model = model = ModelConfig(**files, lora_rank=layout.lora_rank, **stored)
        weights = find_pretrained(model)
        return MegatronStep(
            model,
            self._parallel,
            self._place,
            device=self._ranks.device,
            vocab_size=weights.vocab_size,
            optimizer=OptimizerConfig(lr=layout.learning_rate or 1e-30, decay="constant", warmup_steps=0),
            fill=weights.filler(self._place),
            loss_average=layout.loss_average,
        )

    def _loader(self, reader: Any, packs: int, **options: Any) -> Loader:
        layout = self._layout
        settings = LoaderConfig(
            global_batch_size=packs,
            num_workers=layout.num_workers,
            shuffle=layout.shuffle,
            seed=layout.seed,
            block_packs=1,
        )
        schedule = ScheduleConfig("as_packed", max_tokens_per_rank=layout.pack_size or _LONGEST)
        return Loader(reader, settings, schedule=schedule, layout=self._place, **options)

    def _train(self, batch: Any) -> tuple[float, float]:
        reader = self._write(batch, self._folder / f"step-{self._done}")
        if len(reader) < self._layout.microbatches * self._layout.dp_size:
            raise NotSupported("a pack is a microbatch, and the step has fewer packs")
        self._step = self._step or self._make_step()
        batch = next(iter(self._loader(reader, len(reader))))
        result = self._step.train(batch)
        self._state, self._done = batch.state, self._done + 1
        return result.loss, result.grad_norm

    def evaluate(self, batch: Any) -> float:
        reader = self._write(batch, self._folder / "validation")
        self._step = self._step or self._make_step()
        return float(self._step.evaluate(iter(self._loader(reader, 1, num_epochs=1))).loss)

    def merge(self, folder: Path) -> None:
        from safetensors.torch import save_file

        from harness.megatron.model import lora
        from harness.megatron.weights import hf_tensors

        chunk = self._step.chunks[0].module
        lora.merge(chunk, self._model)
        folder.mkdir()
        tensors = hf_tensors(chunk, self._model, self._step.vocab_size)
        save_file({name: tensor.contiguous() for name, tensor in tensors}, folder / "model.safetensors")

    def rows(self, steps: int | None) -> list[list[Any]]:
        self._step = self._step or self._make_step()
        packs = self._layout.microbatches * self._layout.dp_size
        batches = self._loader(self._reader, packs, state=self._state, num_epochs=1)
        trained = []
        for batch in islice(batches, steps):
            self._step.train(batch)
            self._state, self._done = batch.state, self._done + 1
            trained.append([_as_labels(row) for row in batch.rows if row.loss_mask.any()])
        return trained

    def save(self, folder: Path) -> None:
        from harness.megatron.state.checkpoint import CheckpointWriter
        from harness.train import Progress

        writer = CheckpointWriter(folder, self._step, keep=1, in_background=False)
        writer.start(Progress(self._done, self._state))
        writer.finish()

    def load(self, folder: Path) -> None:
        from harness.megatron.state.checkpoint import find_newest, load_checkpoint
        from harness.train.checkpoints import read_progress

        newest, damaged = find_newest(folder)
        if damaged:
            raise damaged[0]
        self._step = self._make_step()
        load_checkpoint(newest, self._step)
        progress = read_progress(newest)
        self._state, self._done = progress.loader, progress.step

    def render(self, records: Any) -> list[Any]:
        from harness.prep.chat import parse_record
        from harness.prep.tokenize import ChatTokenizer, TokenizerConfig

        tokenizer = ChatTokenizer(TokenizerConfig(name=str(self._model_folder)))
        rendered = []
        for record in records:
            (made,) = tokenizer.encode([parse_record(record, "record")])
            ids = made.input_ids.tolist()
            trained = [False, *made.loss_mask[:-1].astype(bool).tolist()]
            labels = [token if kept else -100 for token, kept in zip(ids, trained, strict=True)]
            rendered.append({"input_ids": ids, "labels": labels})
        return rendered


def _length(one: Any) -> int:
    return len(one["input_ids"])


def _as_labels(row: Any) -> dict[str, list[int]]:
    """Return a row with a label at the trained token; a row's last token of each conversation is only a label."""
    ids, labels, positions = [], [], []
    for first, last in zip(row.cu_seqlens_padded[:-1], row.cu_seqlens_padded[1:], strict=True):
        real = ~row.padding_mask[first:last]
        tokens, targets, mask = (values[first:last][real] for values in (row.tokens, row.labels, row.loss_mask))
        if not len(tokens):
            continue
        ids += [*tokens.tolist(), int(targets[-1])]
        labels += [-100, *np.where(mask > 0, targets, -100).tolist()]
        positions += [*row.position_ids[first:last][real].tolist(), len(tokens)]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}
