"""Checks of one step: its loss and the norm of its gradients against a model that trains one conversation at a time."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any

from harness.conformance.kit import LOSS_TOLERANCE, NORM_TOLERANCE, Failed, Kit, Mistakes, check, conversations
from harness.conformance.model import Reference
from harness.conformance.target import NotSupported, Tokens

_PACK = 96
# Short and long conversations, so that a mean of means differs from the mean.
_UNEVEN = (8, 60, 12, 40)


@check("huggingface/transformers#31629", "huggingface/trl#3526")
def packed_equals_unpacked(kit: Kit) -> str:
    """Train several conversations in one packed row, and compare loss and gradients with the same ones unpacked.

    Packing should only save time. Attention across a boundary, labels that are shifted across one, or positions that
    continue change what is trained, and the loss curve still looks plausible.
    """
    data = conversations((20, 35, 9, 28))
    return kit.compare_step(data, _leaks(kit, data), pack_size=_PACK)


@check("huggingface/trl#3526", "OpenRLHF/OpenRLHF#377")
def attention_boundaries(kit: Kit) -> str:
    """Keep one conversation of a packed row and change the others; its loss must stay the same.

    The others train one token each, because trainers may omit conversations without trained tokens; the reference tells
    how much these tokens change the loss of the row. The weights do not change, so any other difference comes from
    attention across a boundary.
    """
    data = conversations((20, 35, 28))
    others = [{name: [n if n < 0 else (n + 7) % 256 for n in values] for name, values in one.items()} for one in data]
    for place in range(len(data)):
        losses, expected = [], []
        for version in (data, others):
            batch = [{**one, "labels": [-100] * (len(one["labels"]) - 1) + one["labels"][-1:]} for one in version]
            batch[place] = data[place]
            losses.append(kit.build(batch, pack_size=_PACK)(batch)[0])
            expected.append(kit.reference.step(batch)[0])
        moved = losses[1] - losses[0] - (expected[1] - expected[0])
        if not abs(moved) <= LOSS_TOLERANCE * abs(losses[0]):  # NaN too
            what = f"different neighbor tokens change the loss of conversation {place + 1} by {moved:+.6f}"
            raise Failed(f"{what}: attention, a mask or a label crosses a boundary")
    return f"{len(data)} conversations, none sees another"


@check("huggingface/transformers#44836", "NVIDIA-NeMo/Automodel#2131", model="scans")
def scan_boundaries(kit: Kit) -> str:
    """Pack conversations for a model with linear attention (Qwen3.5), and compare with the loss of each one alone.

    Such layers pass a state and the window of a convolution from token to token. Unless their kernels receive the
    boundaries of a packed row, both leak into the next conversation, which no attention mask prevents.
    """
    data = conversations((20, 35, 28))
    joined = {name: [value for one in data for value in one[name]] for name in data[0]}
    got = kit.build(data, pack_size=_PACK)(data)[0]
    tokens = [sum(label != -100 for label in one["labels"][1:]) for one in data]
    alone = [kit.build([one])([one])[0] for one in data]
    expected = sum(loss * count for loss, count in zip(alone, tokens, strict=True)) / sum(tokens)
    leaked = kit.build([joined])([joined])[0]
    if abs(leaked - expected) < 1e-3 * abs(expected):
        raise Failed(f"the loss is {leaked:.6f} with and without boundaries: it does not depend on them")
    return kit.compare((got, None), (expected, 0.0), {"one row without boundaries": (leaked, 0.0)})


@check("huggingface/transformers#31629")
def labels_at_boundaries(kit: Kit) -> str:
    """Train all tokens of packed conversations; the first token of one must not be predicted from the one before.

    Data often has a label for every token. If a packed row keeps the label of a conversation's first token, the model
    learns to continue a conversation with the beginning of an unrelated one.
    """
    whole = [{**one, "labels": list(one["input_ids"])} for one in conversations((20, 35, 28), trained=1.0)]
    return kit.compare_step(whole, _leaks(kit, whole), pack_size=_PACK)


@check("open-jarvis/OpenJarvis#521")
def padding_changes_nothing(kit: Kit) -> str:
    """Train conversations of very different lengths in one padded microbatch, and compare with each one alone."""
    data = conversations((5, 80, 17))
    return kit.compare_step(data, _misplaced(kit, data))


@check("axolotl-ai-cloud/axolotl#3982", "ml-explore/mlx-lm#1413", "meta-pytorch/torchtune#1875")
def token_mean_over_microbatches(kit: Kit) -> str:
    """Accumulate gradients over microbatches with few and with many trained tokens; all must have the same weight.

    If a trainer divides each microbatch by its own number of tokens and averages the microbatches, tokens of short
    answers weigh more, and the result depends on the number of accumulation steps.
    """
    data = conversations(_UNEVEN)
    groups = {"rows": [data[:2], data[2:]], "conversations": [[one] for one in data]}
    return kit.compare_step(data, _means(kit, groups), microbatches=2)


@check("NVIDIA-NeMo/RL#213")
def token_mean_over_packed_rows(kit: Kit) -> str:
    """Accumulate gradients over two packed rows, one with few trained tokens; all tokens must have the same weight."""
    data = [*conversations((40, 48), trained=0.8), *conversations((44, 46), trained=0.1, seed=1)]
    return kit.compare_step(data, _means(kit, {"rows": [data[:2], data[2:]]}), microbatches=2, pack_size=_PACK)


@check("huggingface/transformers#34242", "huggingface/transformers#34373", ranks=2)
def token_mean_over_ranks(kit: Kit) -> str:
    """Train few tokens on one data-parallel rank and many on another; all tokens must have the same weight.

    Data-parallel gradients are averaged over ranks. Unless each rank divides by the trained tokens of all ranks,
    tokens on a rank with short answers weigh more.
    """
    data = conversations(_UNEVEN)
    groups = {"ranks": [data[::2], data[1::2]], "ranks, in order": [data[:2], data[2:]]}
    return kit.compare_step(data, _means(kit, groups))


@check("modelscope/ms-swift#8373", "PrimeIntellect-ai/prime-rl#2032")
def conversation_mean(kit: Kit) -> str:
    """Average the loss by conversation, over two microbatches; all conversations must have the same weight."""
    data = conversations(_UNEVEN)
    by_token = {"the mean over tokens": kit.reference.step(data)}
    return kit.compare_step(data, by_token, average="conversation", microbatches=2)


@check("modelscope/ms-swift#8373", "PrimeIntellect-ai/prime-rl#2032", ranks=2)
def conversation_mean_over_ranks(kit: Kit) -> str:
    """Average the loss by conversation, where three share the packed row of one rank and another rank has one.

    Unless each rank divides by the conversations of all ranks, those on a rank with few of them weigh more.
    """
    data = conversations(_UNEVEN)
    by_token = {"the mean over tokens": kit.reference.step(data)}
    return kit.compare_step(data, by_token, average="conversation", pack_size=_PACK)


@check("huggingface/transformers#39241", "huggingface/transformers#24839", "NVIDIA/Megatron-LM#7207")
def evaluation_mean(kit: Kit) -> str:
    """Evaluate batches with few and with many trained tokens; the reported loss must be the mean over all tokens.

    A mean of batch means depends on the evaluation batch size, so that runs with different sizes cannot be compared.
    """
    kit.require("evaluate")
    data = conversations(_UNEVEN)
    kit.build(data)
    means = {name: (loss, 0.0) for name, (loss, _) in _means(kit, {"batches": [[one] for one in data]}).items()}
    return kit.compare((kit.target.evaluate(data), None), kit.reference.step(data), means)


@check("huggingface/transformers#31629", model="experts")
def experts_packed_equal_unpacked(kit: Kit) -> str:
    """Train a mixture of experts on a packed row, without a router loss, and compare with unpacked conversations."""
    data = conversations((20, 35, 9, 28))
    return kit.compare_step(data, _leaks(kit, data), pack_size=_PACK)


@check("NVIDIA/Megatron-LM#2121", "huggingface/transformers#28505", model="experts")
def router_ignores_padding(kit: Kit) -> str:
    """Train a mixture of experts with a balancing loss in rows of two sizes; more padding must change nothing.

    If padding reaches the router, it counts as tokens and changes the balancing loss, and so what the experts learn.
    """
    data = conversations((20, 35, 9, 28))
    kit.compare_step(data, {}, pack_size=_PACK)
    first, second = (kit.build(data, pack_size=size, router_loss=0.5)(data) for size in (_PACK, 2 * _PACK))
    plain = kit.reference.step(data)
    if first[1] is None or abs(first[1] - plain[1]) <= NORM_TOLERANCE * plain[1]:
        raise NotSupported("the loss of the router changes no gradient that is reported")
    return kit.compare(second, (first[0], first[1]), {})


@check("NVIDIA/Megatron-LM#6205", "NVIDIA/Megatron-LM#7278", "NVIDIA-NeMo/Megatron-Bridge#6103", model="further")
def mtp_ignores_padding(kit: Kit) -> str:
    """Train a layer that predicts the token after the next (MTP) on a packed row, and compare with one at a time.

    Its tokens, labels and masks move by one once more. Where that move takes padding or another conversation for what
    follows, or no mask comes along, it trains wrong tokens; the reported loss often leaves this layer out, and only
    the gradients show it. A trainer may divide by the tokens that the layer trains, or by those of the model.
    """
    return _compare_further(kit, dp_size=1)


@check("NVIDIA/Megatron-LM#6205", "NVIDIA/Megatron-LM#7278", ranks=2, model="further")
def mtp_with_tensor_parallel_equals_one_rank(kit: Kit) -> str:
    """Divide such a model (MTP) over two tensor-parallel ranks; loss and gradients must be those of one rank.

    Sequence parallelism pads each conversation to a multiple of the ranks, so that a packed row has padding between
    them, where labels must stop at the real end and places are counted by the padded one.
    """
    return _compare_further(kit, dp_size=1, tp_size=2)


def _compare_further(kit: Kit, **sizes: int) -> str:
    data, share = conversations((20, 35, 9, 28)), 0.5
    # Where all is trained, what follows the end of a conversation in a row is trained too.
    data[1::2] = [{**one, "labels": [-100, *one["input_ids"][1:]]} for one in data[1::2]]
    got = kit.build(data, pack_size=_PACK, mtp_loss=share, **sizes)(data)
    if got[1] is None:
        raise NotSupported("no norm of gradients is reported, which alone shows what the layer trains")
    accepted = kit.reference.step_further(data, share)
    for figures in accepted:
        with suppress(Failed):
            return kit.compare(got, figures, {})
    joined = {name: [value for one in data for value in one[name]] for name in data[0]}
    mistakes = {
        "the model without the layer": kit.reference.step(data),
        "untrained tokens predicted by the layer": kit.reference.step_further(data, share, masked=False)[0],
        "one row without boundaries": kit.reference.step_further([joined], share)[0],
    }
    return kit.compare(got, accepted[0], mistakes)


@check("pytorch/torchtitan#1750", "meta-pytorch/torchtune#2641", ranks=2)
def tensor_parallel_equals_one_rank(kit: Kit) -> str:
    """Divide a dense model between two tensor-parallel ranks; loss and gradients must equal those of one rank."""
    return kit.compare_step(conversations(_UNEVEN), {}, pack_size=_PACK, dp_size=1, tp_size=2)


@check("pytorch/pytorch#160285", ranks=2, model="experts")
def expert_parallel_equals_one_rank(kit: Kit) -> str:
    """Divide experts between two data-parallel ranks; loss and gradients must equal those of one rank."""
    return kit.compare_step(conversations(_UNEVEN), {}, pack_size=_PACK, dp_size=2, ep_size=2)


@check("NVIDIA/Megatron-LM#5916", ranks=2, model="experts")
def experts_with_tensor_parallel_equal_one_rank(kit: Kit) -> str:
    """Divide a model with experts between two tensor-parallel ranks; expert gradients must be summed over both.

    With sequence parallelism, each rank sees half of the tokens. If every rank holds all experts and their gradients
    are not summed, each rank trains the experts on its half.
    """
    return kit.compare_step(conversations(_UNEVEN), {}, pack_size=_PACK, dp_size=1, tp_size=2)


@check("huggingface/peft#1836", "huggingface/trl#386")
def lora_equals_merged(kit: Kit) -> str:
    """Train adapters, evaluate, and merge them; the merged weights must give the loss that was evaluated.

    If the merge uses another scale or omits projections, the served model is not the trained one.
    """
    kit.require("evaluate", "merge")
    data = conversations((20, 35, 28))
    step = kit.build(data, lora_rank=4, learning_rate=1e-2)
    for _ in range(3):
        step(data)
    loss = kit.target.evaluate(data)
    kit.target.merge(kit.folder / "merged")
    whole = Reference(kit.folder / "merged")
    if other := [name for name in kit.reference.differing(whole) if "_proj" not in name]:
        raise Failed(f"the merged weights have another {other[0]} than the base: not only adapters are trained")
    base, merged = kit.reference.step(data), whole.step(data)
    if abs(merged[0] - base[0]) <= LOSS_TOLERANCE * base[0]:
        raise Failed(f"the merged weights have the loss of the base, {base[0]:.6f}; with adapters it is {loss:.6f}")
    return kit.compare((loss, None), merged, {"the loss of the base": base})


def _means(kit: Kit, groups: dict[str, Any]) -> Mistakes:
    return {f"the mean of the means of {name}": kit.reference.mean_of_means(each) for name, each in groups.items()}


def _leaks(kit: Kit, data: list[Tokens]) -> Mistakes:
    """Return the figures of one long conversation in place of several, and of the labels at its joints alone."""
    joined = {name: [value for one in data for value in one[name]] for name in ("input_ids", "labels")}
    cut = {**joined, "labels": [value for one in data for value in [-100, *one["labels"][1:]]]}
    joints = []
    for one, other in pairwise(data):
        labels = [-100] * len(one["labels"]) + other["labels"][:1]
        joints.append({"input_ids": [*one["input_ids"], other["input_ids"][0]], "labels": labels})
    return {
        "the first token of each conversation predicted from the one before": kit.reference.step([*data, *joints]),
        "one row without boundaries": kit.reference.step([joined]),
        "attention over boundaries": kit.reference.step([cut]),
        **_misplaced(kit, data),
    }


def _misplaced(kit: Kit, data: list[Tokens]) -> Mistakes:
    """Return the figures of labels, and of masks, that are a token late or early."""
    moved: dict[str, list[Tokens]] = {}
    for one in data:
        ids, labels = one["input_ids"], one["labels"]
        late, early = [-100, *labels], [*labels[1:], -100]
        of = {"labels that are not shifted": ([*ids, 0], late), "labels that are shifted twice": (ids, early)}
        for name, mask in (("late", late), ("early", early)):
            kept = [token if flag != -100 else -100 for token, flag in zip(ids, mask, strict=False)]
            of[f"a mask that is a token {name}"] = ids, kept
        for name, (tokens, targets) in of.items():
            moved.setdefault(name, []).append({"input_ids": tokens, "labels": targets})
    return {name: kit.reference.step(each) for name, each in moved.items()}
