"""Compare copies of parameters on several ranks, to name ranks whose copies have drifted apart.

Each rank digests its parameters on its device: the sum of a parameter's bits as integers, exact in any order. One
all-gather per group, of 8 bytes per parameter, and one value read by the host then compare all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from harness.errors import HarnessError
from harness.megatron.weights import global_parameters

Named = list[tuple[str, torch.Tensor]]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_MOST_NAMED = 8


def copies(chunks: Sequence[DistributedDataParallel]) -> Iterator[tuple[str, torch.distributed.ProcessGroup, Named]]:
    """Yield (kind, group, named parameters) for each group of ranks that hold copies of the same parameters.

    Parameters that tensor-parallel ranks divide have copies only on data-parallel ranks, and experts only on ranks that
    hold the same experts. Expert biases of routers, which are buffers, are included.
    """
    named = [pair for chunk in chunks for pair in global_parameters(chunk.module, adapters=True)]
    experts = [(name, values) for name, values in named if ".experts." in name]
    dense = [(name, values) for name, values in named if ".experts." not in name]

    def whole(parameters: Named) -> Named:
        return [pair for pair in parameters if not getattr(pair[1], "tensor_model_parallel", False)]

    yield "data-parallel", parallel_state.get_data_parallel_group(with_context_parallel=True), dense
    yield "tensor-parallel", parallel_state.get_tensor_model_parallel_group(), whole(dense)
    yield "expert-data-parallel", parallel_state.get_expert_data_parallel_group(), experts
    yield "expert-tensor-parallel", parallel_state.get_expert_tensor_parallel_group(), whole(experts)
    # Tied embeddings, and embeddings for MTP layers, are on the first and the last stage.
    is_shared = chunks[0].module.share_embeddings_and_output_weights or chunks[0].module.config.mtp_num_layers
    # Do not use is_rank_in_embedding_group, which remembers the ranks of an earlier layout in this process.
    group = parallel_state.get_embedding_group(check_initialized=False)
    if is_shared and group is not None:
        place = 0 if parallel_state.is_pipeline_first_stage(ignore_virtual=True) else -1
        weight = chunks[place].module.shared_embedding_or_output_weight()
        yield "embedding", group, [("embedding.word_embeddings.weight", weight)]


def check_copies(chunks: Sequence[DistributedDataParallel], step: int) -> None:
    """Raise HarnessError, with parameter and ranks, on all ranks of a group whose copies differ after `step`."""
    gathered = []
    for kind, group, parameters in copies(chunks):
        if group.size() == 1 or not parameters:
            continue
        own = torch.stack([_digest(values) for _, values in parameters])
        table = torch.empty(group.size(), len(parameters), dtype=torch.int64, device=own.device)
        torch.distributed.all_gather(list(table), own, group=group)
        gathered.append((kind, group, [name for name, _ in parameters], table))
    if not gathered or not torch.cat([(table != table[0]).any(dim=0) for *_, table in gathered]).any():
        return
    found = [
        (name, kind, torch.distributed.get_process_group_ranks(group), column.tolist())
        for kind, group, names, table in gathered
        for name, column in zip(names, table.unbind(dim=1), strict=True)
        if bool((column != column[0]).any())
    ]
    name, kind, ranks, digests = found[0]
    holders = {one: [rank for rank, other in zip(ranks, digests, strict=True) if other == one] for one in digests}
    parts = [_describe(some) for some in sorted(holders.values(), key=len, reverse=True)]
    more = f"; {len(found) - 1} more have drifted" if len(found) > 1 else ""
    what = f"after step {step}, the copies of {name} differ: {' versus '.join(parts)}{more}"
    where = f"{kind} ranks {', '.join(map(str, ranks[:_MOST_NAMED]))}{', ...' * (len(ranks) > _MOST_NAMED)}"
    fix = "resume from a checkpoint before this step; if the same rank differs again, exclude its node and test "
    fix += "its memory and links (`harness preflight`); if other ranks differ, report the layout and the model"
    raise HarnessError(what, where=where, fix=fix)


def _digest(values: torch.Tensor) -> torch.Tensor:
    flat, size = values.detach().reshape(-1), values.element_size()
    # int64 words need no conversion: 16 GB/s on one core, compared with 0.3 for sums of int16.
    return flat.view(torch.int64 if flat.numel() * size % 8 == 0 else _WORDS[size]).sum(dtype=torch.int64)


def _describe(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"
