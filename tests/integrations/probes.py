"""Short jobs on the data path of each trainer, which record what a model is given.

    torchrun --nproc-per-node 2 tests/integrations/probes.py JOB.json

`global_batches` runs them. A probe reads the steps of its job through one integration, as a user would,
and returns the rows of each step with the position after the last one. A new integration is one function here and one
line in PROBES.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import exit_on_error
from harness.integrations import RankStream
from harness.integrations.dialects import IGNORED, HuggingFaceRow, Row
from harness.loader import LoaderConfig
from harness.schedule import ScheduleConfig
from harness.thd import ThdBatch, rows_from_model_tokens
from harness.train.digests import sequence_digests

Steps = list[list[ThdBatch]]
Position = Mapping[str, int | str]


@dataclass(frozen=True)
class ProbeJob:
    """One job of a probe on all its ranks.

    Attributes:
        integration: a key of PROBES.
        dataset: path of a dataset.
        loader: settings of `LoaderConfig`.
        schedule: settings of `ScheduleConfig`.
        first_step, last_step: the steps to read are first_step + 1 to last_step, counted from 1 through all epochs.
        folder: of both jobs; a trainer keeps its checkpoints in it.
        position: of the job before; None for the first one.
    """

    integration: str
    dataset: str
    loader: dict[str, Any]
    schedule: dict[str, Any]
    first_step: int
    last_step: int
    folder: str
    position: dict[str, int | str] | None = None
    rank: int = field(default=0, compare=False)
    world_size: int = field(default=1, compare=False)

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step

    def stream(self) -> RankStream:
        config, schedule = LoaderConfig(**self.loader), ScheduleConfig(**self.schedule)
        return RankStream(self.dataset, config, schedule=schedule, dp_rank=self.rank, dp_size=self.world_size)

    def rows_of_steps(self) -> list[int]:
        stream = self.stream()
        if self.position is not None:
            stream.load_state_dict(self.position)
        with stream:
            return [len(batch.rows) for batch in islice(stream, self.num_steps)]


@dataclass(frozen=True)
class Probe:
    """One way to read a dataset.

    Attributes:
        read: returns the rows of each step, as a model is given them, and the position after the last.
        schedules: that it can read.
        packages: that it needs beside those of the integration.
    """

    read: Callable[[ProbeJob], tuple[Steps, Position]]
    schedules: tuple[str, ...] = ("as_packed", "dp_balanced")
    packages: tuple[str, ...] = ()


def thd_of(row: Row) -> ThdBatch:
    """Return the row that `of` was given, from the values that are here now."""
    return _of_huggingface(row) if isinstance(row, HuggingFaceRow) else _of_megatron(row)


def _of_megatron(row: Row) -> ThdBatch:
    return ThdBatch(
        tokens=_array(row["tokens"])[0],
        labels=_array(row["labels"])[0],
        position_ids=_array(row["position_ids"])[0],
        loss_mask=_array(row["loss_mask"])[0],
        cu_seqlens=_array(row["cu_seqlens"]),
        cu_seqlens_padded=_array(row["cu_seqlens_padded"]),
        max_seqlen=int(row["max_seqlen"]),
        padding_mask=_array(row["padding_mask"])[0],
    )


def _of_huggingface(row: Row) -> ThdBatch:
    """Return the row without padding masks: this dialect has no padding, and marks no row as untrained."""
    input_ids, labels = _array(row["input_ids"])[0], _array(row["labels"])[0]
    bounds = _array(row["cu_seq_lens_q"]).astype(np.int64)
    is_last, is_first = np.zeros(input_ids.shape[0], np.bool_), np.zeros(input_ids.shape[0], np.bool_)
    is_last[bounds[1:] - 1] = True
    is_first[bounds[:-1]] = True
    (made,) = rows_from_model_tokens(
        [np.diff(bounds) - 1],
        tokens=input_ids[~is_last],
        labels=input_ids[~is_first],
        loss_mask=labels[~is_first] != IGNORED,
        position_ids=_array(row["position_ids"])[0][~is_last],
    )
    return made


def _array(value: Any) -> npt.NDArray[Any]:
    """Return an array of a tensor on any device, or the array itself."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def read_torch(job: ProbeJob) -> tuple[Steps, Position]:
    """Read with a plain loop over PackedDataset, in the Megatron dialect."""
    from harness.integrations.torch import PackedDataset

    data = PackedDataset(job.stream(), dialect="megatron", device="cpu")
    if job.position is not None:
        data.load_state_dict(job.position)
    steps = [[thd_of(row) for row in step.rows] for step in islice(data.steps(), job.num_steps)]
    data.close()
    return steps, data.state_dict()


def read_torchdata(job: ProbeJob) -> tuple[Steps, Position]:
    """Read with torchdata's StatefulDataLoader, whose own state is saved and loaded."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    from harness.integrations.torch import PackedDataset

    data = PackedDataset(job.stream(), dialect="huggingface")
    loader = StatefulDataLoader(data, batch_size=None)
    saved = Path(job.folder) / "loader.pt"
    if job.position is not None:
        loader.load_state_dict(torch.load(saved, weights_only=False))
    steps = group_rows((thd_of(row) for row in passes(loader)), job.rows_of_steps())
    if job.rank == 0:
        torch.save(loader.state_dict(), saved)
    data.close()
    return steps, data.state_dict()


def read_accelerate(job: ProbeJob) -> tuple[Steps, Position]:
    """Read in a loop of accelerate, whose checkpoints hold the position."""
    from accelerate import Accelerator

    from harness.integrations.torch import PackedDataset

    accelerator = Accelerator(cpu=True)
    data = PackedDataset(job.stream(), dialect="huggingface")
    accelerator.register_for_checkpointing(data)
    saved = str(Path(job.folder) / "accelerate")
    if job.position is not None:
        accelerator.load_state(saved)
    prepared = accelerator.prepare(data)
    steps = [[thd_of(row) for row in step.rows] for step in islice(prepared.steps(), job.num_steps)]
    accelerator.wait_for_everyone()
    accelerator.save_state(saved)
    accelerator.wait_for_everyone()
    data.close()
    accelerator.end_training()
    return steps, data.state_dict()


def read_lightning(job: ProbeJob) -> tuple[Steps, Position]:
    """Read with Lightning's Trainer, whose checkpoints hold the position."""
    import lightning
    import torch

    from harness.integrations.torch import PackedDataset

    class Recorder(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.rows: list[ThdBatch] = []

        def training_step(self, row: Any, index: int) -> Any:
            self.rows.append(thd_of(row))
            return self.weight * 0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saved = Path(job.folder) / f"lightning-{job.first_step}.ckpt"
    counts = job.rows_of_steps()
    trained = 0
    if job.position is not None:
        trained = torch.load(saved, weights_only=False)["global_step"]
    data, module = PackedDataset(job.stream(), dialect="huggingface"), Recorder()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=job.world_size,
        strategy="ddp" if job.world_size > 1 else "auto",
        max_steps=trained + sum(counts),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    more = {} if job.position is None else {"ckpt_path": saved, "weights_only": False}
    trainer.fit(module, data, **more)
    trainer.save_checkpoint(Path(job.folder) / f"lightning-{job.last_step}.ckpt")
    data.close()
    return group_rows(iter(module.rows), counts), data.state_dict()


def read_huggingface(job: ProbeJob) -> tuple[Steps, Position]:
    """Train a Llama of one layer with the Trainer, from and to its own checkpoints."""
    from transformers import Trainer, TrainingArguments

    return _read_trainer(job, Trainer, TrainingArguments)


def read_trl(job: ProbeJob) -> tuple[Steps, Position]:
    """Train a Llama of one layer with TRL's SFTTrainer, from and to its own checkpoints."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    named = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    return _read_trainer(job, SFTTrainer, SFTConfig, processing_class=named)


def _read_trainer(job: ProbeJob, trainer_class: Any, arguments: Any, **more: Any) -> tuple[Steps, Position]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.integrations.huggingface import PackedTraining

    given: Steps = []

    class Recorder(PackedTraining, trainer_class):  # type: ignore[misc]
        def get_batch_samples(self, *args: Any) -> Any:
            rows, num_items = super().get_batch_samples(*args)
            given.append([])
            return rows, num_items

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            given[-1].append(thd_of(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    stream = job.stream()
    args = arguments(
        job.folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=max(stream.rows_per_step() or [1]),
        max_steps=job.last_step,
        save_steps=job.last_step,
        average_tokens_across_devices=True,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, max_position_embeddings=8192, **sizes))
    trainer = Recorder(model, args=args, stream=stream, **more)
    resume = None if job.position is None else str(Path(job.folder) / f"checkpoint-{job.first_step}")
    trainer.train(resume_from_checkpoint=resume)
    stream.close()
    return given, trainer.packed.state_dict()


def read_torchtitan(job: ProbeJob) -> tuple[Steps, Position]:
    """Read with torchtitan's dataloader component; its rows are padded, and have no labels where nothing is trained."""
    from harness.integrations.torchtitan import HarnessDataLoader

    def unpadded(tokens: Any, positions: Any, labels: Any) -> ThdBatch:
        bounds = np.append(np.flatnonzero(positions == 0), tokens.shape[0])
        # Padding is zeros that begin positions of their own, after the last sequence.
        while len(bounds) > 2 and not tokens[bounds[-2] :].any() and (labels[bounds[-2] :] < 0).all():
            bounds = bounds[:-1]
        stop = int(bounds[-1])
        (row,) = rows_from_model_tokens(
            [np.diff(bounds)],
            tokens=tokens[:stop],
            labels=labels[:stop],
            loss_mask=labels[:stop] >= 0,
            position_ids=positions[:stop],
        )
        return row

    loader = HarnessDataLoader(
        HarnessDataLoader.Config(dataset_path=job.dataset, **job.loader),
        dp_world_size=job.world_size,
        dp_rank=job.rank,
        seq_len=job.schedule["max_tokens_per_rank"],
        local_batch_size=1,
    )
    if job.position is not None:
        loader.load_state_dict(job.position)
    batches = iter(loader)
    rows = (
        unpadded(inputs["input"][0].numpy(), inputs["positions"][0].numpy(), labels[0].numpy())
        for inputs, labels in batches
    )
    count = job.loader["global_batch_size"] // job.world_size
    steps = group_rows(rows, [count] * job.num_steps)
    loader.close()
    return steps, loader.state_dict()


def read_megatron_lm(job: ProbeJob) -> tuple[Steps, Position]:
    """Read with the provider of Megatron-LM's `pretrain`, whose arguments come from its own parser."""
    from harness.megatron import prepare_process

    prepare_process()
    from harness.megatron.job import runtime
    from harness.megatron.job.runtime import join
    from harness.plan import ParallelConfig

    with runtime.start("cpu"), _cuda_at_import():
        join(ParallelConfig(), job.world_size)
        from megatron.training.arguments import parse_args
        from megatron.training.global_vars import set_args

        from harness.integrations.megatron_lm import datasets_provider

        size, tokens = job.loader["global_batch_size"], job.schedule["max_tokens_per_rank"]
        flags = {"dataloader-type": "external", "micro-batch-size": 1, "global-batch-size": size, "seq-length": tokens}
        texts = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        sys.argv = ["probe", *texts, "--calculate-per-token-loss", "--eval-iters", "0"]
        args = parse_args()
        # Megatron sets these when it has checked the others.
        args.iteration, args.padded_vocab_size, args.virtual_pipeline_model_parallel_size = 0, None, None
        set_args(args)
        loader, _, _ = datasets_provider(job.dataset, loader=LoaderConfig(**job.loader))(None)
        assert loader is not None
        if job.position is not None:
            loader.restore_state(job.position)
        rows = (thd_of(row) for row in loader)
        steps = group_rows(rows, [size // job.world_size] * job.num_steps)
        loader.close()
        return steps, loader.save_state()


def read_megatron_bridge(job: ProbeJob) -> tuple[Steps, Position]:
    """Read with the dataset of Megatron-Bridge's configuration, in process groups of Megatron-Core."""
    from harness.megatron import prepare_process

    prepare_process()
    from megatron.bridge.data.base import DatasetBuildContext
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    from harness.integrations.megatron_bridge import HarnessDataset
    from harness.megatron.job import runtime
    from harness.megatron.job.runtime import join
    from harness.plan import ParallelConfig

    def thd(batch: dict[str, Any]) -> ThdBatch:
        padded = batch["cu_seqlens"][0].numpy()
        real = batch.get("cu_seqlens_unpadded", batch["cu_seqlens"])[0].numpy()
        fields = {name: batch[name][0].numpy() for name in ("tokens", "labels", "position_ids", "loss_mask")}
        is_padding = np.ones(len(fields["tokens"]), np.bool_)
        for start, length in zip(padded[:-1].tolist(), np.diff(real).tolist(), strict=True):
            is_padding[start : start + length] = False
        return ThdBatch(
            **fields,
            cu_seqlens=real,
            cu_seqlens_padded=padded,
            max_seqlen=int(batch["max_seqlen"]),
            padding_mask=is_padding,
        )

    loader = dict(job.loader)
    size, seed, workers = (loader.pop(name) for name in ("global_batch_size", "seed", "num_workers"))
    with runtime.start("cpu"):
        join(ParallelConfig(), job.world_size)
        init_num_microbatches_calculator(job.rank, None, size, 1, job.world_size)
        data = HarnessDataset(
            path=job.dataset, seed=seed, num_workers=workers, persistent_workers=True, pin_memory=False, loader=loader
        )
        rows, _, _ = data.build_datasets(DatasetBuildContext(train_samples=size, valid_samples=0, test_samples=0))
        assert rows is not None
        rows.load_state_dict(rows.save_state() if job.position is None else job.position)
        steps = group_rows(map(thd, rows), [size // job.world_size] * job.num_steps)
        return steps, rows.save_state()


@contextmanager
def _cuda_at_import() -> Iterator[None]:
    """Let modules be imported that look for a GPU when they are."""
    import torch

    available = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = available


PROBES: Mapping[str, Probe] = MappingProxyType(
    {
        "torch": Probe(read_torch),
        "torchdata": Probe(read_torchdata),
        "accelerate": Probe(read_accelerate),
        "lightning": Probe(read_lightning),
        "huggingface": Probe(read_huggingface),
        "trl": Probe(read_trl),
        "megatron_lm": Probe(read_megatron_lm, schedules=("as_packed",)),
        # Its modules import Transformer Engine, which a CPU does not have.
        "megatron_bridge": Probe(read_megatron_bridge, schedules=("as_packed",), packages=("transformer_engine",)),
        "torchtitan": Probe(read_torchtitan, schedules=("as_packed",)),
    }
)


def passes(rows: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from rows


def group_rows(rows: Iterator[ThdBatch], counts: list[int]) -> Steps:
    return [list(islice(rows, count)) for count in counts]


def trained_part(row: ThdBatch) -> ThdBatch:
    """Return the row without the labels that are not trained, which some trainers replace."""
    return replace(row, labels=np.where(row.loss_mask > 0, row.labels, 0))


def main(path: str) -> None:
    """Run the probe of a job on this rank, and write `rank-N.json`: digests of the sequences of each step."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    job = ProbeJob(**json.loads(Path(path).read_text()), rank=rank, world_size=world_size)
    steps, position = PROBES[job.integration].read(job)
    digests = [[sequence_digests(trained_part(row)).tolist() for row in rows] for rows in steps]
    written = json.dumps({"steps": digests, "position": dict(position)})
    (Path(path).parent / f"rank-{rank}.json").write_text(written)


if __name__ == "__main__":
    with exit_on_error():
        main(sys.argv[1])
