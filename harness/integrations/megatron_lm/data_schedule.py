"""Megatron-LM's packing scheduler, by the names of its `megatron.core.datasets.data_schedule`.

Put this module in place of Megatron's. Streams of sequences whose lengths are not known in advance need it; for a
stored dataset every rank plans from stored lengths and reads its own part, which exchanges nothing.

`wrap_data_iterator` runs once per global batch, and `get_batch_on_this_rank_for_sequence_packing` once per microbatch.
An error of one rank is raised on every rank.

Differences from Megatron's: rows may be empty where it fails with "Not enough samples to move" (they train nothing), a
sequence longer than a row is refused, `cost_balanced` balances ranks by cost, and attention gets the real bounds of
sequences beside the padded ones. A row of more than `thd_max_packed_sequences` is refused, not divided. With dynamic
context parallelism, ranks that share a sequence are those of the schedule `dynamic_context`. Not supported, and refused
by name: contiguous partitions, a least size of dynamic context parallelism, and fixed lengths of packed rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from harness.errors import ConfigError, LoaderError, ScheduleError
from harness.integrations.megatron_lm.data_schedule_utils import (
    FIELDS,
    broadcast_scalars,
    broadcast_tensor,
    broadcast_to_pp_group,
    build_packed_microbatches,
    create_data_iterator,
    device_of,
    get_batch_and_global_seqlens,
    padding_mask,
    raise_together,
    reroute_samples_to_dcp_ranks,
)
from harness.megatron.compat import packed_seq_params
from harness.plan.layout import DTYPE_BYTES
from harness.plan.work import FLOPS_PER_BYTE
from harness.schedule import SequenceCost, schedule
from harness.schedule.batch import largest_share
from harness.thd import context_parallel_indices, padding_multiple, visible_bounds

_BOUNDS = ("cu_seqlens", "cu_seqlens_padded")
_OF_FIRST_STAGE, _OF_LAST_STAGE = ("tokens", "position_ids"), ("labels", "loss_mask")
_SIZE = "local_cp_size"
_FAILED = -1  # in place of a row's number of bounds
_PHASE_2 = "get_batch_on_this_rank_for_sequence_packing"
# Settings of newer configs, and the values with which rows are what this module makes.
_NEEDED: dict[str, tuple[object, ...]] = {
    "min_dynamic_context_parallel_size": (1, None),
    "cp_partition_mode": ("zigzag", None),
    "linear_cp_layout": ("zigzag", None),
    "attention_cp_layout": ("zigzag", None),
    "pad_packed_seq_alignment": (None,),
}

Groups = Sequence[Sequence[Sequence[int]]]
GroupOf = Callable[[int], ProcessGroup | None]
_Field = torch.Tensor | None
Microbatch = tuple[_Field, _Field, _Field, None, _Field, PackedSeqParams, torch.Tensor]


@dataclass(eq=False)
class BasePackingScheduler:
    """Fetches a global batch, schedules it, and gives every rank its rows.

    A subclass has the name of a schedule of the harness, or its own `get_groups_and_subsamples`; put it into
    `scheduler_map` under the name that `config.sequence_packing_scheduler` has. Where `shares_rows` is True, any power
    of two of neighbors in the data- and context-parallel group may share a row.

    Args:
        max_seqlen_per_dp_cp_rank: tokens that one rank holds; a row holds cp_size times as many.
        microbatch_group_size_per_vp_stage: the number of microbatches becomes a multiple of this; None without virtual
            pipeline stages.
        max_num_seqs: the most sequences of a row; None for any number.

    Attributes:
        cost: of training a sequence; `wrap_data_iterator` replaces the default by that of the config's transformer.
    """

    name: ClassVar[str]
    shares_rows: ClassVar[bool] = False
    cost = SequenceCost()
    _parts = MappingProxyType[str, Any]({})  # arguments of `padding_multiple`; `run` has those of the layout

    max_seqlen_per_dp_cp_rank: int
    cp_size: int
    dp_size: int
    microbatch_group_size_per_vp_stage: int | None
    max_num_seqs: int | None = None

    def get_required_sample_keys(self) -> list[str]:
        """Return the entries that every sample needs."""
        return [*FIELDS, "original_seq_len", "padded_seq_len"]

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
        """Schedule a global batch, the (id, padded tokens) of every sample: a pure function, the same on every rank.

        Returns:
            By microbatch, then rank of the data- and context-parallel group: ids in the order of their row.

        Raises:
            ScheduleError: no row holds a sample, or a row gets more than `max_num_seqs` of them. Megatron would begin
                another row.
        """
        numbers, lengths = np.asarray(sample_id_seqlens, dtype=np.int64).reshape(-1, 2).T
        ranks, cp_size = self.dp_size * self.cp_size, 1 if self.shares_rows else self.cp_size
        # Samples arrive padded: those that are for all ranks can be shared by any number of them.
        most_padded = padding_multiple(cp_size=largest_share(ranks), **self._parts)
        placed = schedule(
            self.name,
            lengths,
            dp_size=ranks // cp_size,
            cp_size=cp_size,
            max_tokens_per_rank=self.max_seqlen_per_dp_cp_rank,
            group_size=self.microbatch_group_size_per_vp_stage or 1,
            cost=self.cost,
            pads_further=not (lengths % most_padded).any(),
        )
        steps = range(placed.num_microbatches)
        most = max(len(placed.row(step, rank)) for step in steps for rank in range(placed.dp_size))
        if self.max_num_seqs is not None and most > self.max_num_seqs:
            what = f"a row contains {most:,} sequences, more than the maximum of {self.max_num_seqs:,}"
            fix = f"set it to {most:,} or more, or lower config.max_seqlen_per_dp_cp_rank"
            raise ScheduleError(what, where="config.thd_max_packed_sequences", fix=fix)
        return [[numbers[placed.row(step, rank // cp_size)].tolist() for rank in range(ranks)] for step in steps]

    def run(
        self,
        data_iterator: Any,
        num_microbatches: int,
        dp_group: ProcessGroup,
        tp_group: ProcessGroup,
        pp_group: ProcessGroup,
        dp_cp_group: ProcessGroup,
        dev: torch.device,
        config: Any,
    ) -> tuple[Any, int, float, float]:
        """Fetch, schedule, route, pack and broadcast; returns and raises as `wrap_data_iterator` does."""
        if isinstance(data_iterator, (list, tuple)):  # one per virtual pipeline stage, all of the same data
            data_iterator = next((one for one in data_iterator if one is not None), None)
        sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        parts = self._parts = MappingProxyType({"tp_size": tp_group.size(), "sequence_parallel": sequence_parallel})
        error: Exception | None = None
        batch, placed = None, []
        if data_iterator is not None:
            try:
                batch = get_batch_and_global_seqlens(data_iterator, num_microbatches, dp_group)
                placed = self.get_groups_and_subsamples(batch[1])
                self._check(placed, dict(batch[1]), dict(parts))
            except StopIteration:
                batch = None
            except Exception as raised:
                error = raised
        raise_together(error, (dp_cp_group, tp_group, pp_group))

        rows, scalars = None, list[Any]((0, 0.0, 0.0))
        if batch is not None:
            samples, id_lengths, ids, offsets, lengths = batch
            # All at both ends of the pipeline, as in Megatron, and none between them.
            is_end = pp_group.rank() in (0, pp_group.size() - 1)
            fields = tuple(FIELDS) if is_end or getattr(config, "mtp_num_layers", None) else ()
            needed = (*fields, "original_seq_len", "padded_seq_len")
            kept = [{name: sample[name] for name in needed} for sample in samples]
            mine = reroute_samples_to_dcp_ranks(
                kept, ids, id_lengths, placed, offsets, dp_group, dp_cp_group=dp_cp_group
            )
            rank = dp_cp_group.rank()
            own = [[mine[i] for i in group[rank]] for group in placed]
            multiple = padding_multiple(cp_size=1 if self.shares_rows else self.cp_size, **parts)
            rows = build_packed_microbatches(own, dev, fields=fields, pad_to_multiple=multiple)
            if self.shares_rows:
                for row, group in zip(rows, placed, strict=True):
                    row[_SIZE] = torch.tensor(_sizes(group)[rank], dtype=torch.int32, device=dev)
            scalars = [len(rows), float(sum(lengths)), float(sum(length * length for length in lengths))]
        if tp_group.rank() == 0:
            rows, *scalars = broadcast_to_pp_group(rows, scalars[0], scalars[1], scalars[2], pp_group, dev)
        count, total, squared = broadcast_scalars(scalars, tp_group, dev)
        if not count:
            raise StopIteration
        return create_data_iterator(rows, pp_group, tp_group, config), int(count), float(total), float(squared)

    def _check(self, placed: Groups, lengths: dict[int, int], parts: dict[str, Any]) -> None:
        """Check a schedule of samples by their padded tokens, on a layout of these `parts` of `padding_multiple`.

        ScheduleError unless every sample is in one row, the same on the neighbors that share it; LoaderError if a
        sample cannot be cut as its row is.
        """
        ranks, found, multiples = self.dp_size * self.cp_size, list[int](), dict[int, int]()
        is_shared = all(len(group) == ranks for group in placed)
        for group in placed if is_shared else []:
            sizes = _sizes(group) if self.shares_rows else [self.cp_size] * ranks
            for rank, (row, size) in enumerate(zip(group, sizes, strict=True)):
                first = rank - rank % size
                is_shared &= list(row) == list(group[first]) and (not self.shares_rows or size & (size - 1) == 0)
                found += row if rank == first else []
                multiples |= dict.fromkeys(row, padding_multiple(cp_size=size, **parts))
        size = self.microbatch_group_size_per_vp_stage or 1
        if sorted(found) != sorted(lengths) or not is_shared or not placed or len(placed) % size:
            lost = sorted(lengths.keys() - found)
            neighbors = "a power of two of" if self.shares_rows else "context-parallel"
            raise ScheduleError(
                f"{type(self).__name__} placed {len(found):,} of {len(lengths):,} samples in {len(placed)} microbatches"
                + (f"; sample {lost[0]} was not placed" if lost else ""),
                where="get_groups_and_subsamples",
                fix=f"place every sample once, in a multiple of {size} microbatches of {ranks} ranks, of which "
                f"{neighbors} neighbors share a row",
            )
        if wrong := sorted(number for number, multiple in multiples.items() if lengths[number] % multiple):
            number, multiple = wrong[0], math.lcm(*multiples.values())
            what = f"sample {number} of the global batch has a padded_seq_len of {lengths[number]}, but the layout "
            what += f"requires multiples of {multiples[number]} (affects {len(wrong):,} of {len(lengths):,} samples)"
            fix = f"pad samples to a multiple of {multiple} (harness.thd.padding_multiple)"
            raise LoaderError(what, where="the data iterator", fix=fix)


class DpBalancedScheduler(BasePackingScheduler):
    """Fills rows in the order of samples, then splits the last ones until every rank has the same number."""

    name = "dp_balanced"


class CostBalancedScheduler(BasePackingScheduler):
    """Balances the cost of rows and ranks; Megatron has none of this name."""

    name = "cost_balanced"


class DefaultDynamicCPScheduler(BasePackingScheduler):
    """Lets as few ranks share a sequence as hold it, and balances the cost of ranks."""

    name, shares_rows = "dynamic_context", True


# Changeable, as Megatron's is: a scheduler of one's own is added here.
scheduler_map: dict[str, type[BasePackingScheduler]] = {
    "default_dynamic_cp": DefaultDynamicCPScheduler,
    **{kind.name: kind for kind in (DpBalancedScheduler, CostBalancedScheduler)},
}


def _cost_of(config: Any) -> SequenceCost:
    """Return the cost of a sequence in a layer of the config's transformer; by default where its layers are others."""
    others = ("multi_latent_attention", "is_hybrid_model", "experimental_attention_variant")
    if any(getattr(config, name, None) for name in others) or not getattr(config, "num_attention_heads", None):
        return SequenceCost()
    queries, keys = (config.kv_channels * count for count in (config.num_attention_heads, config.num_query_groups))
    middle, is_sparse = config.ffn_hidden_size, config.moe_layer_freq
    if config.num_moe_experts:
        share = sum(is_sparse) / len(is_sparse) if isinstance(is_sparse, list) else 1 / is_sparse
        experts = config.moe_router_topk * config.moe_ffn_hidden_size
        middle += share * (experts + (config.moe_shared_expert_intermediate_size or 0) - middle)
    weights = config.hidden_size * (2 * (queries + keys) + (2 + config.gated_linear_unit) * middle)
    return SequenceCost(2.0 * weights, 2.0 * queries, FLOPS_PER_BYTE * 2 * keys * DTYPE_BYTES["bfloat16"])


def _groups(collection: Any, *names: str) -> list[ProcessGroup]:
    """Return process groups of a collection; of Megatron's parallel state where that is None."""
    if collection is None:
        collection = ProcessGroupCollection.use_mpu_process_groups(list(names))
    return [getattr(collection, name) for name in names]


def wrap_data_iterator(
    data_iterator: Any, config: Any, num_microbatches: int, pg_collection: Any = None
) -> tuple[Any, int, float, float]:
    """Run phase 1, once per global batch, on every rank of the job: fetch samples, schedule, send and pack them.

    Args:
        data_iterator: the samples of this data-parallel rank, the same on all ranks that share it (see
            `get_batch_and_global_seqlens`), or a list of such with virtual pipeline stages. None on tensor-parallel
            ranks other than the first; also on middle stages of a pipeline, which need no data.
        config: a TransformerConfig with `sequence_packing_scheduler` and `max_seqlen_per_dp_cp_rank`; read are
            also `virtual_pipeline_model_parallel_size`, `microbatch_group_size_per_vp_stage`, `sequence_parallel`,
            `mtp_num_layers` and `thd_max_packed_sequences`.
        num_microbatches: items that each data-parallel rank fetches.
        pg_collection: process groups `dp`, `tp`, `pp` and `dp_cp`; None for those of Megatron's parallel state.

    Returns:
        Over this rank's rows, an iterator (None where they come by broadcast; a list with virtual pipeline stages);
        the number of microbatches after scheduling; and the sums of the global batch's padded lengths and of their
        squares, which count FLOPs. All but the first are the same on every rank.

    Raises:
        StopIteration: on every rank, when the streams have ended.
        ConfigError: the config asks for what is not supported (see the module).
        HarnessError: on every rank, where any rank's stream or the schedule fails.
    """
    _check_config(config)
    dp_cp_group, dp_group, tp_group, pp_group = _groups(pg_collection, "dp_cp", "dp", "tp", "pp")
    name, tokens = config.sequence_packing_scheduler, config.max_seqlen_per_dp_cp_rank
    if name not in scheduler_map:
        what = f"packing scheduler {name!r} does not exist"
        fix = f"choose one of {', '.join(scheduler_map)}"
        raise ConfigError(what, where="config.sequence_packing_scheduler", fix=fix)
    if not tokens:
        what = f"config.max_seqlen_per_dp_cp_rank is {tokens}"
        raise ConfigError(what, where="config", fix="set it to the maximum number of tokens per rank in a microbatch")
    # Under its name or the earlier one; a config without it leaves it to the scheduler.
    dynamic = [getattr(config, f"{kind}_context_parallel", None) for kind in ("dynamic", "hybrid")]
    if dynamic != [None, None] and any(dynamic) != scheduler_map[name].shares_rows:
        what = f"{name} {'needs' if scheduler_map[name].shares_rows else 'does not use'} dynamic context parallelism"
        fix = "set config.dynamic_context_parallel=True for default_dynamic_cp alone"
        raise ConfigError(what, where="config.dynamic_context_parallel", fix=fix)
    stages, most = config.virtual_pipeline_model_parallel_size, getattr(config, "thd_max_packed_sequences", None)
    group = None if stages is None else config.microbatch_group_size_per_vp_stage
    # A scheduler of an earlier version does not know it.
    further = {} if most is None else {"max_num_seqs": most}
    cp_size = dp_cp_group.size() // dp_group.size()
    scheduler = scheduler_map[name](tokens, cp_size, dp_group.size(), group, **further)
    if scheduler.cost is BasePackingScheduler.cost:
        scheduler.cost = _cost_of(config)
    return scheduler.run(
        data_iterator, num_microbatches, dp_group, tp_group, pp_group, dp_cp_group, device_of(dp_group), config
    )


def get_batch_on_this_rank_for_sequence_packing(
    data_iterator: Iterator[Any] | None,
    vpp_size: int | None = None,
    mtp_on_this_rank: bool = False,
    vp_stage: int | None = None,
    pg_collection: Any = None,
    *,
    config: Any = None,
    dynamic_cp: bool = False,
    dynamic_cp_group_func: Any = None,
    return_context_parallel_batch: bool = False,
) -> Microbatch:
    """Run phase 2, once per microbatch: share the slice of a row with the tensor-parallel ranks.

    Args:
        data_iterator: from `wrap_data_iterator` (that of this virtual stage); None on tensor-parallel ranks other than
            the first.
        vpp_size, vp_stage: virtual pipeline stages of each rank, and the one that asks; None without them.
        mtp_on_this_rank: this chunk predicts several tokens, so it reads tokens and labels wherever it is.
        pg_collection: process groups `tp`, `pp` and `cp`; None for those of Megatron's parallel state.
        config: the model's TransformerConfig, in which only what is not supported is looked for; None for none.
        dynamic_cp: rows have their own context-parallel size, and packed_seq_params its group.
        dynamic_cp_group_func: returns the group of `group_size` neighbors; None for Megatron's parallel state.
        return_context_parallel_batch: of newer versions; only its default works.

    Returns:
        tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params and padding_mask. Tensors are
        [1, T / cp] of this rank's context-parallel slice. Tokens and positions are None beyond the first chunk of the
        pipeline, labels and mask before the last, and the attention mask everywhere: the bounds in packed_seq_params
        take its place. The padding mask (bool, True at padding) is on every chunk; a chunk of a model with experts
        takes it, after the first one with sequence parallelism its tensor-parallel part alone.

    Raises:
        ConfigError: an argument or the config asks for what is not supported (see the module).
        LoaderError: a row lacks what this chunk reads, or its length does not fit its bounds.
    """
    if return_context_parallel_batch or isinstance(pg_collection, bool):
        name = "return_context_parallel_batch" if return_context_parallel_batch else f"pg_collection={pg_collection}"
        fix = "pass arguments after vp_stage by name, because their order differs between versions, and omit those "
        fix += "of newer ones: the tuple is returned"
        raise ConfigError(f"{name} is not supported", where=_PHASE_2, fix=fix)
    if config is not None:
        _check_config(config)
    tp_group, pp_group, cp_group = _groups(pg_collection, "tp", "pp", "cp")
    if vp_stage is not None and vpp_size is None:
        vpp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    is_first = pp_group.rank() == 0 and vp_stage in (None, 0)
    is_last = pp_group.rank() == pp_group.size() - 1 and vp_stage in (None, (vpp_size or 1) - 1)
    fields = (*_OF_FIRST_STAGE * (is_first or mtp_on_this_rank), *_OF_LAST_STAGE * (is_last or mtp_on_this_rank))
    group_of = partial(_dynamic_group, dynamic_cp_group_func) if dynamic_cp else lambda _: cp_group
    return _share_row(data_iterator, fields, tp_group, group_of, dynamic_cp)


def _share_row(
    rows: Iterator[Any] | None, fields: Sequence[str], tp_group: ProcessGroup, group_of: GroupOf, is_dynamic: bool
) -> Microbatch:
    """Take the next row on the first tensor-parallel rank, and give all of the group its slice."""
    values: dict[str, torch.Tensor] = {}
    header, device = [0, 0, 0, 0, 0], device_of(tp_group)
    error: Exception | None = None
    if tp_group.rank() == 0:
        try:
            values = _own_slice(rows, fields, group_of, device, is_dynamic)
            real, padded = (values[name] for name in _BOUNDS)
            is_padded = not torch.equal(real, padded)
            header = [len(real), int(values["max_seqlen"]), int(padded[-1]), int(is_padded), int(values[_SIZE])]
        except Exception as raised:
            error, header = raised, [_FAILED, 0, 0, 0, 0]
    ends, max_seqlen, total, has_padding, ranks = map(int, broadcast_scalars(header, tp_group, device, torch.int64))
    if ends == _FAILED:
        raise_together(error, (tp_group,))
    cp_group, source = group_of(ranks), torch.distributed.get_process_group_ranks(tp_group)[0]

    def shared(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = values[name].contiguous() if name in values else torch.empty(shape, dtype=dtype, device=device)
        broadcast_tensor(tensor, source, tp_group)
        return tensor

    bounds, padded_bounds = (shared(name, (ends,), torch.int32) for name in _BOUNDS)
    size = (1, total // (1 if cp_group is None else cp_group.size()))
    row = {name: shared(name, size, FIELDS[name]) for name in fields}
    mask = shared("padding_mask", size, torch.bool)
    sizes: dict[str, Any] = {"max_seqlen": max_seqlen, "is_padded": bool(has_padding)}
    sizes |= {"cp_group": cp_group} if is_dynamic else {}
    params = packed_seq_params(cu_seqlens=bounds, cu_seqlens_padded=padded_bounds, **sizes)
    if is_dynamic:
        params.local_cp_size = ranks
    return row.get("tokens"), row.get("labels"), row.get("loss_mask"), None, row.get("position_ids"), params, mask


def _own_slice(
    rows: Iterator[Any] | None, fields: Sequence[str], group_of: GroupOf, device: torch.device, is_dynamic: bool
) -> dict[str, torch.Tensor]:
    """Return the bounds of the next row and this rank's slice of its fields and of its padding mask, [1, T / cp]."""
    if rows is None:
        fix = "pass the result of wrap_data_iterator; with virtual pipeline stages, the entry of this stage"
        raise LoaderError("the first tensor-parallel rank has no data iterator", where=_PHASE_2, fix=fix)
    row = next(rows, None)
    if row is None:
        fix = "run as many microbatches as wrap_data_iterator returned, then call it again for the next global batch"
        raise LoaderError("the iterator of this global batch is exhausted", where=_PHASE_2, fix=fix)
    needed = (*fields, *_BOUNDS, "max_seqlen", *[_SIZE] * is_dynamic)
    if _SIZE in row and not is_dynamic:
        fix = "pass dynamic_cp=True to match config.dynamic_context_parallel"
        raise LoaderError("a row has its own context-parallel size", where=_PHASE_2, fix=fix)
    if missing := [name for name in needed if row.get(name) is None]:
        what = f"a row is missing {', '.join(missing)}; it contains {', '.join(row)}"
        fix = "iterate over the result of wrap_data_iterator for this pipeline stage"
        raise LoaderError(what, where="the data iterator", fix=fix)
    size = torch.as_tensor(row.get(_SIZE, 1))
    cp_group = group_of(int(size))
    # Rows of another scheduler may have padding only at their end.
    real, padded = visible_bounds(*(row[name].cpu().reshape(-1) for name in _BOUNDS))
    values = {name: torch.from_numpy(bounds).to(device) for name, bounds in zip(_BOUNDS, (real, padded), strict=True)}
    total, keep = int(padded[-1]), None
    if cp_group is not None and cp_group.size() > 1:
        own = context_parallel_indices(padded, cp_size=cp_group.size(), cp_rank=cp_group.rank())
        keep = torch.from_numpy(own).to(device)
    whole = dict(row)
    if row.get("padding_mask") is None:  # a row of another scheduler, all of whose sequences are somebody's
        whole["padding_mask"] = padding_mask(*values.values())
    for name in (*fields, "padding_mask"):
        value = whole[name].reshape(-1).to(device, FIELDS.get(name, torch.bool))
        if value.shape[0] != total:
            what = f"a row has {value.shape[0]:,} {name}, but its sequences end at {total:,}"
            fix = "the last cu_seqlens_padded of a row must be its length"
            raise LoaderError(what, where="the data iterator", fix=fix)
        values[name] = (value if keep is None else value.index_select(0, keep)).unsqueeze(0)
    return values | {"max_seqlen": torch.as_tensor(row["max_seqlen"]), _SIZE: size}


def _sizes(group: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks that share the row of each rank; a row without samples is its own."""
    counts = Counter(row[0] for row in group if row)
    return [counts[row[0]] if row else 1 for row in group]


def _dynamic_group(given: Callable[..., ProcessGroup] | None, size: int) -> ProcessGroup | None:
    """Return the group of neighbors that share a row; None where a rank has its own."""
    if size == 1:
        return None
    names = (f"get_{kind}_data_context_parallel_groups" for kind in ("dynamic", "hybrid"))  # the second is the earlier
    get: Any = given or next(getattr(parallel_state, name) for name in names if hasattr(parallel_state, name))
    return get(group_size=size)  # type: ignore[no-any-return]


def _check_config(config: Any) -> None:
    for name, values in _NEEDED.items():
        value = getattr(config, name, None)
        if value not in values:
            what = f"config.{name} = {value!r} is not supported"
            raise ConfigError(what, where="config", fix=f"set it to {values[0]!r}")
