"""Short jobs on the data path of each trainer, which record what a model is given.

    torchrun --nproc-per-node 2 -m tests.integrations.probes JOB.json

`test_global_batches` runs them. A probe reads the steps of its job through one integration, as a user would,
and returns the rows of each step with the position after the last one. A new integration is one function here and one
line in PROBES.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from harness.errors import exit_on_error
from harness.integrations import RankStream
from harness.integrations.dialects import IGNORED, HuggingFaceRow, Row
from harness.loader import LoaderConfig
from harness.schedule import ScheduleConfig
from harness.thd import ThdBatch, rows_from_model_tokens, zero_loss_row
from harness.train.digests import FIELDS, sequence_digests

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

    class Recorder(lightning.LightningModule):
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

    class Recorder(PackedTraining, trainer_class):
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


Read = Callable[[ProbeJob], tuple[Steps, Position]]
# Each returns the rows of each step, as a model is given them, and the position after the last.
PROBES: Mapping[str, Read] = MappingProxyType(
    {
        "torch": read_torch,
        "torchdata": read_torchdata,
        "accelerate": read_accelerate,
        "lightning": read_lightning,
        "huggingface": read_huggingface,
        "trl": read_trl,
    }
)


def passes(rows: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from rows


def group_rows(rows: Iterator[ThdBatch], counts: list[int]) -> Steps:
    return [list(islice(rows, count)) for count in counts]


def content_digest(rows: Iterable[ThdBatch | npt.NDArray[np.uint64]]) -> str:
    """Return 32 hexadecimal digits over the sequences of a global batch, in any placement on ranks and rows.

    For data that left the loader, where ids of packs and sequences are not known. Padding does not count, nor does a
    sequence of one untrained token 0, which is the row of a rank without sequences.

    Args:
        rows: of all ranks, or what `sequence_digests` returned for them.
    """
    tables = [row if isinstance(row, np.ndarray) else sequence_digests(row) for row in rows]
    table = np.concatenate([np.zeros((0, 1 + len(FIELDS)), np.uint64), *tables])
    table = table[(table != sequence_digests(zero_loss_row())).any(axis=1)]
    table = table[np.lexsort(table.T[::-1])]
    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(table, dtype="<u8").tobytes()))


def trained_part(row: ThdBatch) -> ThdBatch:
    """Return the row without the labels that are not trained, which some trainers replace."""
    return replace(row, labels=np.where(row.loss_mask > 0, row.labels, 0))


def main(path: str) -> None:
    """Run the probe of a job on this rank, and write `rank-N.json`: digests of the sequences of each step."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    job = ProbeJob(**json.loads(Path(path).read_text()), rank=rank, world_size=world_size)
    steps, position = PROBES[job.integration](job)
    digests = [[sequence_digests(trained_part(row)).tolist() for row in rows] for rows in steps]
    written = json.dumps({"steps": digests, "position": dict(position)})
    (Path(path).parent / f"rank-{rank}.json").write_text(written)


if __name__ == "__main__":
    with exit_on_error():
        main(sys.argv[1])
