"""Checks of the order of data: what an epoch trains, with workers and ranks, and after a resume."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.conformance.kit import LOSS_TOLERANCE, Failed, Kit, check, conversations, first_line, trained_pairs
from harness.conformance.target import NotSupported, Tokens

_PACK = 64
# Rows trained before the checkpoint beside it.
_TRAINED = "trained.json"


def _corpus(count: int = 23) -> list[Tokens]:
    return conversations([int(each) for each in np.random.default_rng(2).integers(8, 40, size=count)])


@check("huggingface/trl#3526", "meta-pytorch/torchtune#875")
def positions_restart(kit: Kit) -> str:
    """Read the position ids of packed rows; they must restart at 0 in each conversation.

    If positions continue, models with absolute or scaled positions are trained differently, and attention kernels that
    derive the boundaries from positions find none. Rows without `position_ids` are not checked.
    """
    data = _corpus()
    lengths = {tuple(one["input_ids"][:3]): len(one["input_ids"]) for one in data}
    rows = _flat(kit.rows_of(data, pack_size=_PACK))
    if not any("position_ids" in row for row in rows):
        raise NotSupported("rows have no position_ids")
    found, wrong = 0, 0
    for row in rows:
        ids, positions = row["input_ids"], row.get("position_ids", [])
        for place in range(len(ids)):
            if length := lengths.get(tuple(ids[place : place + 3])):
                found += 1
                wrong += positions[place : place + length] != list(range(length))
    if wrong or not found:
        raise Failed(f"{wrong} of {found} conversations have positions other than 0, 1, 2, ...")
    return f"{found} conversations have the positions 0, 1, 2, ..."


@check("axolotl-ai-cloud/axolotl#3849")
def epoch_is_complete(kit: Kit) -> str:
    """Train one epoch of packed rows; every token with a label must be trained exactly once, including the last."""
    return _judge_epoch(kit, _corpus(), pack_size=_PACK, microbatches=2)


@check("NVIDIA-NeMo/Automodel#2257", "Lightning-AI/pytorch-lightning#19987")
def epoch_is_complete_unpacked(kit: Kit) -> str:
    """Train one epoch of padded rows with an incomplete last step; every token must be trained exactly once."""
    return _judge_epoch(kit, _corpus(), microbatches=4)


@check("huggingface/accelerate#490", "huggingface/accelerate#2316", ranks=2)
def epoch_is_complete_on_ranks(kit: Kit) -> str:
    """Train an epoch that two ranks cannot divide evenly; together they must train every token exactly once."""
    return _judge_epoch(kit, _corpus(), microbatches=2)


@check("NVIDIA-NeMo/RL#169", "huggingface/trl#467")
def long_conversation_is_kept(kit: Kit) -> str:
    """Train a conversation longer than a packed row; it must be trained completely or refused, never dropped.

    Splitting it over rows loses the context of its later parts; cutting it loses its end, including the token that
    ends the answer.
    """
    data = [*_corpus(6), *conversations((2 * _PACK + 10,), seed=9)]
    kit.rows_of(data[:-1], pack_size=_PACK)  # an error of any other kind is no refusal
    try:
        rows = kit.rows_of(data, pack_size=_PACK)
    except (NotSupported, TimeoutError):
        raise
    except Exception as error:
        return f"refused: {first_line(error)}"
    return _judge(data[-1:], _flat(rows), others=data[:-1])


@check("dreamzero0/dreamzero#91")
def shuffle_ignores_workers(kit: Kit) -> str:
    """Shuffle an epoch without loader workers and with two; the order of the rows must be the same."""
    data = _corpus()
    orders = [_order(kit.rows_of(data, shuffle=True, num_workers=workers)) for workers in (0, 2)]
    if _order(kit.rows_of(data)) == orders[0]:
        raise Failed("the shuffled order is the order of the data")
    if orders[0] != orders[1]:
        raise Failed(_first_difference(*orders))
    return f"{sum(map(len, orders[0]))} steps in the same order"


@check("huggingface/transformers#11389", "mosaicml/llm-foundry#1676")
def shuffle_follows_the_seed(kit: Kit) -> str:
    """Shuffle an epoch twice with one seed and once with another; only the first two orders must be equal."""
    data = _corpus()
    first, again, other = (_order(kit.rows_of(data, shuffle=True, seed=seed)) for seed in (1, 1, 2))
    if first != again:
        raise Failed(f"two epochs of one seed differ: {_first_difference(first, again)}")
    if first == other:
        raise Failed("another seed gives the same order")
    return "equal for one seed, different for another"


@check("huggingface/accelerate#2016", "huggingface/accelerate#4233")
def resume_within_an_epoch(kit: Kit) -> str:
    """Save in the middle of a shuffled epoch, rebuild the trainer and resume; it must train exactly what was left."""
    return _judge_resume(kit, steps=3)


@check("meta-pytorch/data#1437", "verl-project/verl#7401")
def resume_at_the_end_of_an_epoch(kit: Kit) -> str:
    """Save after the last step of an epoch and resume; no token of that epoch may be trained again."""
    return _judge_resume(kit, steps=None)


@check("alibaba/TorchEasyRec#544", "PrimeIntellect-ai/prime-rl#3332")
def resume_with_workers(kit: Kit) -> str:
    """Save in the middle of an epoch, when two loader workers have read ahead, and resume; no data may be lost."""
    return _judge_resume(kit, steps=3, num_workers=2)


@check("PrimeIntellect-ai/prime-rl#1035", ranks=2)
def resume_on_ranks(kit: Kit) -> str:
    """Save in the middle of an epoch on two ranks and resume on two; both must continue where they stopped."""
    return _judge_resume(kit, steps=2)


@check("meta-pytorch/torchft#292", after="resume-on-ranks")
def resume_on_one_rank(kit: Kit) -> str:
    """Resume on one rank what `resume-on-ranks` saved on two; in total, the epoch must be trained exactly once.

    A job may resume with fewer nodes. A position that counts steps, or that each rank stores for itself, then refers to
    other data.
    """
    return _continue_epoch(kit, "resume-on-ranks", microbatches=2)


@check("pytorch/torchtitan#409", "NVIDIA-NeMo/Automodel#2730", ranks=2, after="resume-within-an-epoch")
def resume_on_more_ranks(kit: Kit) -> str:
    """Continue on two ranks what `resume-within-an-epoch` saved on one; the epoch must be trained exactly once in all.

    A rank that was not there has no file of its own, and must neither be refused nor begin again.
    """
    return _continue_epoch(kit, "resume-within-an-epoch", microbatches=1)


@check("huggingface/transformers#33336", "CodefyUI/CodefyUI#147")
def resume_restores_the_optimizer(kit: Kit) -> str:
    """Train a step, save, and train two more; after a resume, these two must have the same losses and norms.

    The first step shows whether the weights were restored; the second shows whether the optimizer's moments were.
    """
    kit.require("save", "load")
    data, folder, losses = conversations((20, 35)), kit.folder / "saved", []
    for is_resumed in (False, True):
        step = kit.build(data, learning_rate=1e-2)
        if is_resumed:
            kit.target.load(folder)
        else:
            step(data)
            kit.target.save(folder)
        losses.append([step(data), step(data)])
    (first, second), (again, following) = losses
    if abs(first[0] - second[0]) <= LOSS_TOLERANCE * abs(first[0]):
        raise Failed(f"a step with learning rate 0.01 leaves the loss at {first[0]:.6f}")
    kit.compare(again, (first[0], first[1] or 0.0), {"the loss of the initial weights": kit.reference.step(data)})
    return kit.compare(following, (second[0], second[1] or 0.0), {})


@check("pytorch/pytorch#126952", "pytorch/pytorch#28858")
def damaged_checkpoint_is_refused(kit: Kit) -> str:
    """Flip one bit in the middle of the largest file of a checkpoint; loading it must be refused.

    Disks and copies corrupt files. If nothing detects it, training continues from a wrong weight, and the loss jumps.
    """
    kit.require("rows", "save", "load")
    data, whole, damaged = _corpus(), kit.folder / "saved", kit.folder / "damaged"
    kit.rows_of(data, steps=1)
    kit.target.save(whole)
    shutil.copytree(whole, damaged)
    files = [path for path in damaged.rglob("*") if path.is_file()]
    if not files:
        raise Failed("the checkpoint has no file")
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 64
    largest.write_bytes(content)
    kit.build(data)
    kit.target.load(whole)
    kit.build(data)
    name = largest.relative_to(damaged)
    try:
        kit.target.load(damaged)
    except NotSupported:
        raise
    except Exception as error:
        return f"{name} is refused: {first_line(error)}"
    raise Failed(f"a flipped bit in {name} ({len(content):,} bytes) is loaded without an error")


def _judge_epoch(kit: Kit, data: Sequence[Tokens], **layout: Any) -> str:
    return _judge(data, _flat(kit.rows_of(data, **layout)))


def _flat(ranks: list[list[list[Tokens]]]) -> list[Tokens]:
    return [row for steps in ranks for step in steps for row in step]


def _judge(data: Sequence[Tokens], rows: Sequence[Tokens], *, others: Sequence[Tokens] = ()) -> str:
    """Compare trained tokens with those of the data; `others` may be trained too."""
    expected, got = Counter(trained_pairs(data)), Counter(trained_pairs(rows))
    for pair in trained_pairs(others):
        del got[pair]
    lost, surplus = expected - got, got - expected
    twice = sum(count for pair, count in surplus.items() if pair in expected)
    foreign = surplus.total() - twice
    if lost or surplus:
        found = {"not trained": lost.total(), "trained again": twice, "trained that the data does not have": foreign}
        figures = ", ".join(f"{count} {name}" for name, count in found.items() if count)
        raise Failed(f"of {expected.total()} trained tokens: {figures}")
    return f"{expected.total()} trained tokens, each once"


def _judge_resume(kit: Kit, *, steps: int | None, **layout: Any) -> str:
    kit.require("save", "load")
    data, folder, layout = _corpus(), kit.folder / "saved", {"shuffle": True, "microbatches": 2, **layout}
    whole = kit.rows_of(data, **layout)
    first = kit.rows_of(data, steps, **layout)
    if not all(trained_pairs(_flat([steps])) for steps in whole):
        raise Failed("a rank trains nothing in an epoch")
    kit.target.save(folder)
    kit.gather("saved")
    if kit.rank == 0:
        (kit.folder / _TRAINED).write_text(json.dumps(_flat(first)))
    kit.build(data, **layout)
    kit.target.load(folder)
    # At the end of an epoch a trainer may train nothing more, or begin the next one.
    rest = kit.gather(kit.target.rows(1 if steps is None else None))
    if steps is None:
        if any(step in _order(whole)[0] for step in _order(rest)[0]):
            raise Failed("a step of the epoch is trained again")
        return "the epoch is not trained again"
    joined = [one + other for one, other in zip(_order(first), _order(rest), strict=True)]
    if joined != _order(whole):
        raise Failed(_first_difference(_order(whole), joined))
    return f"{len(joined[0])} steps as without an interruption"


def _continue_epoch(kit: Kit, name: str, *, microbatches: int) -> str:
    """Continue on other ranks what another check saved, and judge the whole epoch."""
    kit.require("rows", "save", "load")
    saved = sorted(kit.folder.parent.parent.glob(f"*/{name}/{_TRAINED}"))
    if not saved:
        raise NotSupported(f"{name} saved nothing")
    data = _corpus()
    kit.build(data, shuffle=True, microbatches=microbatches)
    try:
        kit.target.load(saved[-1].parent / "saved")
        rows = kit.target.rows(None)
    except (NotSupported, KeyboardInterrupt):
        raise
    except BaseException as error:  # as those of torch.distributed.checkpoint are
        raise Failed(f"what other ranks saved is refused: {first_line(error)}") from error
    rest = kit.gather(rows)
    return _judge(data, [*json.loads(saved[-1].read_text()), *_flat(rest)])


def _order(ranks: list[list[list[Tokens]]]) -> list[list[list[list[tuple[int, int]]]]]:
    """Return the trained tokens of each row by rank and step."""
    return [[[sorted(trained_pairs([row])) for row in step] for step in steps] for steps in ranks]


def _first_difference(expected: list[Any], got: list[Any]) -> str:
    for rank, (one, other) in enumerate(zip(expected, got, strict=True)):
        if len(one) != len(other):
            return f"rank {rank} trains {len(other)} steps, expected {len(one)}"
        for step, (rows, others) in enumerate(zip(one, other, strict=True), start=1):
            if rows != others:
                return f"step {step} of rank {rank} trains other tokens"
    return "no difference"
