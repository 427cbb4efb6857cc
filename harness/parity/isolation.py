"""Check that documents of a packed row do not affect each other, on any layout, by changing one of them.

A row is trained once, once more for every document with that document's tokens changed, and once with other tokens in
its padding. On every stage, at every layer, forward and backward, all values of unchanged documents must remain equal
bit for bit: layer outputs, logits, losses, and the gradients of layer outputs. Before that, the fields of the batch on
every rank are compared with a slow reference that is built from the documents: an error inside a document, such as a
wrong position or a mask shifted by one, crosses no boundary and is visible only in this comparison.

`python -m harness.recipes.parity check=isolation` runs this on many layouts, `harness.recipes.isolation` on one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config

from harness.megatron.batch import RowTensors, run_row, to_device
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model.gpt import build_model
from harness.parity.cells import ISOLATION_FILE
from harness.plan import SftConfig
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch

Prepare = Callable[..., RowTensors]
# A layer of a model chunk, forward or backward, and its values for one row: [tokens on this rank, ...].
Observation = tuple[str, torch.Tensor]
PADDING = -1
_VOCABULARY = 256
# Larger than in training, so that a leak changes more than the last bits.
_INIT_STD = 0.2
_DOCUMENT_TOKENS = (10, 38, 3, 21)


def check_isolation(config: SftConfig) -> list[str]:
    """Check the model and layout of a run's settings with random weights; every rank of the job calls this.

    Rank 0 writes one line per turn to `isolation.jsonl` in `config.run_dir`: `{"turn": ..., "findings": [...]}`. The
    result contains the findings of all ranks; it is empty if every document is isolated.
    """
    findings, config = [], runtime.settle(config)
    with runtime.start(config.trainer.device, timeout_s=config.trainer.timeout_s) as job:
        config.check_layout(job.world_size)
        folder = None if config.run_dir is None else Path(config.run_dir)
        if folder is not None:
            runtime.on_rank_0(lambda: folder.mkdir(parents=True, exist_ok=True))
        for turn, new in IsolationCheck(config, job).turns():
            findings += new
            if job.rank == 0 and folder is not None:
                with (folder / ISOLATION_FILE).open("a") as file:
                    file.write(json.dumps({"turn": turn, "findings": new}) + "\n")
    return findings


class IsolationCheck:
    """Isolation check of a run's model with random weights; every rank of the job must make the same calls.

    The row has four documents of different lengths with random tokens and masks, the same every time.

    Attributes:
        chunks: model chunks from `build_model`.
        pad_to_multiple: each document is padded to a multiple of this many tokens.
    """

    def __init__(self, config: SftConfig, job: runtime.Runtime) -> None:
        # Expert biases that are updated after a pass would change the next pass.
        still: dict[str, Any] = {"expert_bias_rate": 0.0} if config.model.num_experts else {}
        model = replace(config.model, init_std=_INIT_STD, **still)
        self.parallel, self.device, self.vocab_size = config.parallel, job.device, model.vocab_size or _VOCABULARY
        self.layout = join(self.parallel, job.world_size)
        self.chunks = build_model(model, self.parallel, vocab_size=self.vocab_size, device=job.device)
        # At least 4, so that there is padding to change on every layout.
        self.pad_to_multiple = int(np.lcm(self.parallel.pad_to_multiple, 4))
        rng = np.random.default_rng(3)
        self.sequences: list[SequenceView] = []
        for length in _DOCUMENT_TOKENS:
            mask = np.ones(length, dtype=np.uint8)
            mask[rng.integers(0, length, size=length // 3)] = 0
            mask[-1] = 0
            ids = rng.integers(0, self.vocab_size - 1, size=length).astype(np.int32)
            self.sequences.append(SequenceView(ids, mask))
        self.row = build_thd_batch(self.sequences, pad_to_multiple=self.pad_to_multiple)

    def run(self, prepare: Prepare = to_device) -> list[str]:
        """Return the findings of all ranks; `prepare` makes this rank's tensors of a row; tests plant defects in it."""
        return [finding for _, findings in self.turns(prepare) for finding in findings]

    def turns(self, prepare: Prepare = to_device) -> Iterator[tuple[str, list[str]]]:
        """Yield each turn of the check with the findings of all ranks."""
        before = self._train(self.row, prepare)
        owners = self._owners()
        # Kernels that sum in a different order each time would look like leaks.
        pairs = zip(before, self._train(self.row, prepare), strict=True)
        unequal = [place for (place, values), (_, again) in pairs if not torch.equal(values, again)]
        findings = [f"{place}: two equal passes differ, so isolation cannot be shown" for place in unequal]
        yield "equal passes", _of_all_ranks(findings)
        yield "batch", _of_all_ranks(self._check_fields(prepare))
        for changed in [*range(len(self.sequences)), PADDING]:
            findings = []
            if (owners == changed).any():
                after = self._train(self._with_changed(changed), prepare)
                for (place, values), (_, others) in zip(before, after, strict=True):
                    held = self._part_of_rank(owners, values.shape[0])
                    differ = (values != others).flatten(1).any(dim=1).cpu().numpy()
                    # Values at padding belong to no document, so they may change.
                    leaked = np.unique(held[differ & (held != changed) & (held != PADDING)])
                    if leaked.size:
                        names = ", ".join(map(str, leaked))
                        findings.append(f"{place}: changing {_describe(changed)} changed document(s) {names}")
            yield _describe(changed), _of_all_ranks(findings)

    def _owners(self) -> npt.NDArray[np.int64]:
        """Return the document of each token of the row, or PADDING, as int64 [T]."""
        bounds = self.row.cu_seqlens_padded
        owners = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        owners[self.row.padding_mask] = PADDING
        return owners

    def _with_changed(self, changed: int) -> ThdBatch:
        if changed == PADDING:
            return replace(self.row, tokens=np.where(self.row.padding_mask, self.vocab_size - 1, self.row.tokens))
        sequences = list(self.sequences)
        old = sequences[changed]
        sequences[changed] = replace(old, input_ids=(old.input_ids + 1) % self.vocab_size)
        return build_thd_batch(sequences, pad_to_multiple=self.pad_to_multiple)

    def _part_of_rank(self, whole: npt.NDArray[Any], tokens: int) -> npt.NDArray[Any]:
        """Return this rank's part, of `tokens` tokens, of a row's [T] field, by slow slicing."""
        held = _slice_for_rank(whole, self.row.cu_seqlens_padded, self.layout.cp_size, self.layout.cp_rank)
        if held.shape[0] == tokens:
            return held
        return np.split(held, self.parallel.tensor_parallel_size)[self.layout.tp_rank]  # sequence parallelism

    def _check_fields(self, prepare: Prepare) -> list[str]:
        """Compare the batch on this rank with one made document by document."""
        layout, pad_to_multiple = self.layout, self.pad_to_multiple
        columns: dict[str, list[npt.NDArray[Any]]] = {}
        real, padded = [0], [0]
        for sequence in self.sequences:
            length = len(sequence) - 1
            room = -(-length // pad_to_multiple) * pad_to_multiple
            fields: dict[str, npt.NDArray[Any]] = {"tokens": sequence.input_ids[:-1], "labels": sequence.input_ids[1:]}
            fields |= {"position_ids": np.arange(room), "loss_mask": sequence.loss_mask[:-1]}
            for name, values in fields.items():
                columns.setdefault(name, []).append(np.pad(values, (0, room - len(values))))
            real.append(real[-1] + length)
            padded.append(padded[-1] + room)
        bounds = np.asarray(padded)
        got = prepare(self.row, self.device, cp_size=layout.cp_size, cp_rank=layout.cp_rank)
        findings = []
        for name, column in columns.items():
            expected = _slice_for_rank(np.concatenate(column), bounds, layout.cp_size, layout.cp_rank)
            values = getattr(got, name)[0].cpu().numpy()
            if not np.array_equal(values, expected):
                wrong = np.flatnonzero(values != expected) if values.shape == expected.shape else np.zeros(1, dtype=int)
                findings.append(f"field {name}: {wrong.size} value(s) differ, the first at {wrong[0]} of this rank")
        params = got.packed_seq_params
        if params is None:
            return [*findings, "field packed_seq_params: missing"]
        ends = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        for name, values, expected_bounds in (("cu_seqlens", params.cu_seqlens_q, real), ("bounds", ends, padded)):
            if values.tolist() != expected_bounds:
                findings.append(f"field {name}: {values.tolist()}, expected {expected_bounds}")
        return findings

    def _train(self, row: ThdBatch, prepare: Prepare) -> list[Observation]:
        """Run one forward and backward pass; return the values of every layer in a fixed order."""
        layout = self.layout
        mtp_layers = get_model_config(self.chunks[0]).mtp_num_layers
        further = {"mtp_layers": mtp_layers} if mtp_layers else {}
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        place: dict[str, Any] = {"cp_size": layout.cp_size, "cp_rank": layout.cp_rank, **further}
        rows = [prepare(row, self.device, **place) for _ in range(self.parallel.group_size)]
        values: dict[str, list[torch.Tensor]] = {}
        with _observe(self.chunks, values):
            reports = run_rows(self.chunks, rows, len(row))
        values["losses"] = [report["losses"].transpose(0, 1) for report in reports]
        return [(place, tensor) for place in sorted(values) for tensor in values[place]]


def run_rows(
    chunks: list[DistributedDataParallel], rows: Sequence[RowTensors], seq_length: int
) -> list[dict[str, torch.Tensor]]:
    """Run rows forward and backward with Megatron's own calls; return the loss and the token losses of each row.

    The list is empty on all pipeline stages before the last.
    """

    def forward(ready: Iterator[RowTensors], model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
        row = next(ready)

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            total = (losses.float() * row.loss_mask).sum()
            return total, row.loss_mask.sum().to(torch.int), {"loss": total.detach(), "losses": losses.detach()}

        return run_row(model, row), loss

    iterators, is_one = [iter(rows) for _ in chunks], len(chunks) == 1
    reports: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators[0] if is_one else iterators,
        model=chunks[0] if is_one else chunks,
        num_microbatches=len(rows),
        seq_length=seq_length,
        micro_batch_size=rows[0].tokens.shape[0],
        forward_only=False,
    )
    return reports


def _describe(changed: int) -> str:
    return "padding" if changed == PADDING else f"document {changed}"


def _of_all_ranks(findings: list[str]) -> list[str]:
    return [f"rank {rank}: {finding}" for rank, found in enumerate(runtime.gather(findings)) for finding in found]


@contextmanager
def _observe(chunks: list[DistributedDataParallel], values: dict[str, list[torch.Tensor]]) -> Iterator[None]:
    """Collect the outputs of layers and of the output matrix, and the gradients of these outputs."""

    def watch(place: str) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            values.setdefault(f"{place}, forward", []).append(tensor.detach().clone())
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda gradient: values.setdefault(f"{place}, backward", []).append(gradient.detach().clone())
                )

        return hook

    with ExitStack() as stack:
        for number, chunk in enumerate(chunks):
            for name, module in chunk.named_modules():
                is_last = isinstance(module, ColumnParallelLinear) and name.endswith("output_layer")
                if is_last or isinstance(module, TransformerLayer):
                    hook = watch(f"chunk {number}, {name.removeprefix('module.')}")
                    stack.callback(module.register_forward_hook(hook).remove)
        yield


def _slice_for_rank(whole: npt.NDArray[Any], bounds: npt.NDArray[Any], cp_size: int, cp_rank: int) -> npt.NDArray[Any]:
    """Return a context-parallel rank's part of a row's [T] field, cut document by document."""
    if cp_size == 1:
        return whole
    parts = []
    for start, stop in pairwise(bounds.tolist()):
        chunks = np.split(whole[start:stop], 2 * cp_size)
        parts += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
    return np.concatenate(parts)
