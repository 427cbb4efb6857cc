"""Train a step, or evaluate, with Megatron-Core's own schedules, optimizer and learning-rate scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from harness.errors import ConfigError
from harness.loader import RankBatch, RankLayout
from harness.loader.datasets import Sources
from harness.megatron.batch import RowsAhead, RowTensors, run_row, sum_loss, to_device
from harness.megatron.compat import make_ring_stream
from harness.megatron.data.feed import together
from harness.megatron.drift import check_copies
from harness.megatron.model.gpt import build_model
from harness.megatron.model.mtp import predicted_losses
from harness.megatron.model.router import expert_metrics, routers, show_sources
from harness.megatron.unproven.moments import moment_settings
from harness.megatron.unproven.row_graph import RowGraph
from harness.megatron.unproven.user_buffers import open_user_buffers
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.plan.layout import fp8_row_multiple
from harness.schedule.batch import largest_share
from harness.thd import ThdBatch, loss_weights, pad_row, static_row
from harness.train import Evaluation, StepResult

# Runs one microbatch through one chunk; returns its output, and the function that computes the loss from it.
ForwardStep = Callable[[RowsAhead, Any], tuple[torch.Tensor, Any]]
# Decay steps of a learning rate that does not decay, because Megatron requires a number.
_NO_DECAY = 1 << 31


def _build_optimizer(
    chunks: list[DistributedDataParallel], settings: OptimizerConfig, parallel: ParallelConfig, device: torch.device
) -> tuple[Any, OptimizerParamScheduler]:
    """Return the optimizer of these chunks, and its learning-rate scheduler."""
    config, overlaps = get_model_config(chunks[0]), chunks[0].ddp_config.overlap_param_gather
    assert settings.lr is not None
    assert settings.warmup_steps is not None
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.lr * settings.min_lr_ratio,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=parallel.distributed_optimizer,
            overlap_param_gather=overlaps,
            overlap_param_gather_with_optimizer_step=overlaps and parallel.overlap_weights_with_step,
            **moment_settings(settings, device),
        ),
        chunks,
    )
    decay, decay_steps = settings.decay, settings.decay_steps
    if decay_steps is None:
        decay_steps, decay = _NO_DECAY, decay if decay == "inverse-square-root" else "constant"
    return optimizer, OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        # Megatron requires the warm-up to end before the decay does.
        lr_warmup_steps=min(settings.warmup_steps, decay_steps - 1),
        lr_decay_steps=decay_steps,
        lr_decay_style=decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        # A resumed run uses its current settings from the step that it has reached, not the settings of the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _shared_groups(layout: RankLayout) -> dict[int, Any]:
    """Return the process groups of data-parallel ranks that share rows with this one, by size."""
    if not layout.shares_rows:
        return {}
    make_ring_stream()
    groups, size = {1: parallel_state.get_context_parallel_group()}, 2
    while size <= largest_share(layout.dp_size):
        groups[size] = parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)
        size *= 2
    return groups


class MegatronStep:
    """Train and evaluate a model on this rank's rows. Omit `optimizer` for the default settings.

    Args:
        vocab_size: vocabulary size of the tokenizer; a row with a larger token id is refused.
        pad_rows_to: pad every row to this many tokens; None to leave the length of rows unchanged.
        max_sequences: most sequences in a row; `parallel.cuda_graphs` requires it and `pad_rows_to`.
        fill: replaces the random weights, before the optimizer copies them.
        loss_average: `TrainerConfig.loss_average`.

    Attributes:
        sources: the datasets of a blend; losses, and the tokens that routers send to experts, are also summed for each
            of them. None if there is no blend.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        layout: RankLayout,
        *,
        device: torch.device,
        vocab_size: int,
        optimizer: OptimizerConfig | None = None,
        pad_rows_to: int | None = None,
        max_sequences: int | None = None,
        fill: Callable[[list[GPTModel]], None] | None = None,
        loss_average: str = "token",
    ) -> None:
        if parallel.overlap_tensor_parallel:
            assert pad_rows_to is not None  # as settings require (`parallel.static_rows`)
            open_user_buffers(model, parallel, device, tokens=pad_rows_to)
        self.chunks = chunks = build_model(model, parallel, vocab_size=vocab_size, device=device, fill=fill)
        self.layout, self.device, self.group_size = layout, device, parallel.group_size
        self.vocab_size, self.pad_rows_to, self.loss_average = vocab_size, pad_rows_to, loss_average
        self.config = get_model_config(chunks[0])
        self._row_multiple = fp8_row_multiple(self.config.fp8_recipe if self.config.fp8 else "off", parallel)
        settings = (optimizer or OptimizerConfig()).resolved(model, None)
        self.optimizer, self.scheduler = _build_optimizer(chunks, settings, parallel, device)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.has_experts = self.config.num_moe_experts is not None
        self.mtp_layers: int = self.config.mtp_num_layers or 0
        self.num_layers: int = self.config.num_layers + self.mtp_layers
        self.forward_backward = get_forward_backward_func()
        self.sources: Sources | None = None
        self._graph: RowGraph | None = None
        if parallel.cuda_graphs:
            assert pad_rows_to is not None
            assert max_sequences is not None
            self._graph = RowGraph(self, partial(static_row, total=pad_rows_to, num_sequences=max_sequences))
        self._shared_groups = _shared_groups(layout)
        self.copies = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def train(self, batch: RankBatch | Sequence[ThdBatch]) -> StepResult:
        """Take one optimizer step on this rank's rows of a global batch; every rank of the job takes part."""
        rows = batch if isinstance(batch, Sequence) else self._rows_of(batch)
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
            chunk.module.predicted = 0  # sums of MTP layers
        for router in routers(self.chunks):
            router.reset()
        self.optimizer.zero_grad()
        if self.config.moe_aux_loss_coeff or self.config.moe_z_loss_coeff:
            self._weigh_tokens(rows)
        if self._graph is not None:
            sums = self._graph.run_rows(rows)
        else:
            reports = self.run_rows(self._padded(rows), self.forward_row, forward_only=False)
            sums = self._sum(reports, num_sources=len(self.source_names))
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        updated, grad_norm, _zeros = self.optimizer.step()
        if updated:
            self.scheduler.step(increment=1)
        total, divisor, tokens, *of_sources = self._reduce(sums)
        totals, weights = of_sources[: len(of_sources) // 2], of_sources[len(of_sources) // 2 :]
        by_source = zip(self.source_names if of_sources else (), totals, weights, strict=True)
        experts, loads = self._expert_metrics(self.source_names)
        mtp_losses, mtp_tokens = predicted_losses(self.chunks, self.mtp_layers, self.device)
        return StepResult(
            loss=total / max(divisor, 1),
            trained_tokens=int(tokens),
            grad_norm=float(grad_norm) if grad_norm is not None else float("nan"),
            learning_rate=learning_rate,
            skipped=not updated,
            experts=experts,
            source_losses={name: summed / weight for name, summed, weight in by_source if weight > 0},
            source_expert_loads=loads,
            mtp_losses=mtp_losses,
            mtp_tokens=mtp_tokens,
        )

    @property
    def source_names(self) -> Sequence[str]:
        return () if self.sources is None else self.sources.names

    def _rows_of(self, batch: RankBatch) -> list[ThdBatch]:
        """Return the rows of a batch; for a blend, with the dataset of each sequence."""
        if self.sources is None or self._graph is not None:
            return batch.rows
        pairs = zip(batch.rows, batch.sequence_ids, strict=True)
        return [replace(row, sources=self.sources.of(sequences)) for row, sequences in pairs]

    def gather_weights(self) -> None:
        """Gather the weights of the last step on every rank; every rank takes part.

        If the next forward pass would gather them, a checkpoint may need them before that.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def check_drift(self, number: int) -> None:
        """Raise HarnessError if copies of a parameter differ between ranks after step `number`; all ranks take part."""
        self.gather_weights()
        together(lambda: check_copies(self.chunks, number), device=self.device)

    def _weigh_tokens(self, rows: Sequence[ThdBatch]) -> None:
        """Make the routers' losses means over the real tokens of the global batch, whatever divides its loss."""
        # A row that ranks share is counted once.
        own = [row for row in rows if self.layout.dp_rank % row.shared_by == 0]
        divisor = sum(loss_weights(row, self.loss_average)[1] for row in own)
        real = sum(int(np.count_nonzero(~row.padding_mask)) for row in own)
        counts = torch.tensor([divisor, real], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(counts, group=parallel_state.get_data_parallel_group())
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:  # middle stages do not compute the divisor
            stages = parallel_state.get_pipeline_model_parallel_group()
            torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX, group=stages)
        for router in routers(self.chunks):
            router.token_weight = counts[0] / counts[1].clamp(min=1.0)

    def evaluate(self, batches: Iterable[RankBatch]) -> Evaluation:
        """Return the mean loss over `batches`, computed without gradients."""
        for chunk in self.chunks:
            chunk.eval()
        for router in routers(self.chunks):
            router.reset()
        sums = self._sum([])
        with torch.no_grad():
            for batch in batches:
                sums += self._sum(self.run_rows(self._padded(batch.rows), self.forward_row))
        total, divisor, tokens = self._reduce(sums)
        experts, _ = self._expert_metrics()
        return Evaluation(loss=total / max(divisor, 1), trained_tokens=int(tokens), expert_load=experts.get("load"))

    def _expert_metrics(self, names: Sequence[str] = ()) -> tuple[dict[str, float], dict[str, float]]:
        return expert_metrics(self.chunks, self.num_layers, self.device, names) if self.has_experts else ({}, {})

    def _padded(self, rows: Sequence[ThdBatch]) -> Sequence[ThdBatch]:
        """Return rows of `pad_rows_to` tokens; raise ScheduleError for a longer one."""
        size = self.pad_rows_to
        return rows if size is None else [pad_row(row, size * row.shared_by) for row in rows]

    def _sum(self, reports: list[torch.Tensor], *, num_sources: int = 0) -> torch.Tensor:
        """Return the sum of the rows' reports; zeros on a stage that computes no loss."""
        if not reports:
            return torch.zeros(3 + 2 * num_sources, dtype=torch.float64, device=self.device)
        return torch.stack(reports).sum(dim=0)

    def run_rows(self, rows: Sequence[ThdBatch], forward: ForwardStep, *, forward_only: bool = True) -> list[Any]:
        """Run rows through the model with Megatron's schedule; return each report of `forward`'s loss function.

        For a model with FP8 matrix products, rows are padded to whole blocks.
        """
        multiples = [self._row_multiple * row.shared_by for row in rows]
        sizes = [math.ceil(len(row) / multiple) * multiple for row, multiple in zip(rows, multiples, strict=True)]
        rows = [pad_row(row, size) for row, size in zip(rows, sizes, strict=True)]
        iterators = [RowsAhead(rows, self.copy_row, self.copies) for _ in self.chunks]
        reports: list[Any] = self.forward_backward(
            forward_step_func=forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(rows),
            seq_length=max(len(row) // row.shared_by for row in rows),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return reports

    def copy_row(self, row: ThdBatch, *, is_static: bool = False) -> RowTensors:
        layout, ranks = self.layout, row.shared_by
        return to_device(
            row,
            self.device,
            cp_size=layout.cp_size * ranks,
            cp_rank=layout.cp_rank if ranks == 1 else layout.dp_rank % ranks,
            cp_group=self._shared_groups.get(ranks),
            mtp_layers=self.mtp_layers,
            is_static=is_static,
            loss_average=self.loss_average,
        )

    def forward_row(self, rows: RowsAhead, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        """Run the next row through a chunk; return its losses, and the function that sums them over trained tokens.

        For `parallel.overlap_experts`, return Megatron's schedule plan of the pass, which it runs next, instead.
        """
        arrays, row = rows.take()
        self.check_tokens(arrays)
        number = len(self.source_names)
        if row.sources is not None and self.has_experts:
            show_sources(model, row.sources, number)
        summed = partial(sum_loss, row.loss_mask, row.divisor, sources=row.sources, num_sources=number)
        if not return_schedule_plan:
            return run_row(model, row), summed
        for router in routers([model]):
            # The plan calls parts of layers, without hooks of the layers and without the mask of padding.
            router.row = row.packed_seq_params
        return run_row(model, row, forward=model.build_schedule_plan), summed

    def check_tokens(self, arrays: ThdBatch) -> None:
        if arrays.tokens.max() >= self.vocab_size or arrays.labels.max() >= self.vocab_size:
            what = f"a token id is {max(arrays.tokens.max(), arrays.labels.max())}, but the model has "
            what += f"{self.vocab_size} tokens"
            fix = "set it to the vocabulary size of the dataset's tokenizer"
            raise ConfigError(what, where="model.vocab_size", fix=fix)

    def _reduce(self, sums: torch.Tensor) -> list[float]:
        """Return the sums of `sum_loss` over the whole job; only the last pipeline stage has computed them."""
        torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        share_last_stage(sums)
        return cast(list[float], sums.tolist())


def share_last_stage(values: torch.Tensor) -> None:
    """Broadcast the values of the last pipeline stage to all stages."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(values, src=last, group=parallel_state.get_pipeline_model_parallel_group())
