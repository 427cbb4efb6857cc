"""Every layout of 1, 2 and 4 ranks, accepted or refused by the settings' own checks, for small models of each kind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from harness.recipes.parity import ParityConfig
from small_packs import VOCAB

from harness.config import compose_config
from harness.errors import ConfigError
from harness.plan import SftConfig
from harness.schedule import DYNAMIC, ScheduleConfig
from harness.schedule.batch import largest_share

RANKS = (1, 2, 4)
# Of models with an encoder, which is trained, and their data.
MEDIA = ("audio", "omni", "image", "image_mrope", "image_deep", "image_deep_moe")
# Adapters stand on experts too. Those of `LATER` differ from others in few operations.
KINDS = (
    *("dense", "lora", "qwen3_moe", "deepseek_like", "lora qwen3_moe", "hybrid", "hybrid_moe", "delta", "delta_moe"),
    *MEDIA[:-1],
)
LATER = (
    *("olmoe", "gpt_oss_like", "lora deepseek_like", "lora hybrid", "lora hybrid_moe"),
    *("lora delta", "lora delta_moe", "lora omni", "frozen audio", "frozen image", "frozen image_mrope"),
    *("lora image_mrope", "lora image_deep", "frozen image_deep", "image_deep_moe"),
    *("lora image_deep_moe", "frozen image_deep_moe"),
)
# Losses that are means over conversations, of tokens with weights, and of experts balanced over sequences, on two
# ranks alone.
AVERAGED = (
    *("dense conversation", "lora deepseek_like conversation", "deepseek_like conversation"),
    *("dense weighted", "deepseek_like weighted", "qwen3_moe weighted conversation"),
    # Steps that clip and decay, packs that are divided among ranks, routers and adapters of other kinds.
    *("dense clipped balanced", "qwen3_moe unnormalized clipped", "lora narrow balanced", "audio clipped balanced"),
    *("image conversation partly", "omni conversation", "image_deep partly"),
    # Layers of which the first is computed again, and shared experts that are computed while tokens travel.
    *(
        *("qwen3_moe partly", "lora partly", "hybrid partly", "deepseek_like overlapped", "hybrid_moe overlapped"),
        "delta_moe overlapped sequences",
    ),
    # Rows of which each is computed together with the one before it, while tokens travel.
    *(
        *("qwen3_moe combined weighted", "deepseek_like combined model.mtp_layers=0 conversation"),
        "deepseek_like combined model.mtp_layers=0 model.recompute=selective model.recompute_modules=[shared_experts]",
        "qwen3_moe combined model.aux_loss=0.1 model.aux_loss_scope=sequence",
        *("gpt_oss_like combined", "lora qwen3_moe combined"),
    ),
)
# Also on stages with model chunks, and where ranks share rows.
COMBINED = (
    *("qwen3_moe combined", "deepseek_like combined model.mtp_layers=0"),
    "deepseek_like combined model.mtp_layers=0 model.aux_loss=0.1 model.aux_loss_scope=sequence shared",
)
SEQUENCES = ("qwen3_moe sequences", "deepseek_like sequences")
# Every sequence on as many data-parallel ranks as hold it, the longest on all of them. The balancing loss of experts is
# that of sequences, because rows have others on each layout.
SHARED = (
    *("dense shared", "deepseek_like sequences shared", "hybrid shared", "delta shared"),
    *("hybrid_moe sequences shared", "delta_moe sequences shared", "qwen3_moe sequences shared", "lora shared"),
    *("gpt_oss_like sequences shared", "lora deepseek_like sequences conversation shared"),
    *("dense weighted shared", "image_mrope shared", "omni sequences shared", "audio shared", "image_deep shared"),
)
# Values of settings that the kinds above have one value of; several in a kind where they do not meet.
OTHER_VALUES = (
    "dense model.rope_scaling=llama3 model.rope_scaling_factor=8 model.rotary_base=500000 optimizer.beta1=0.9 "
    "optimizer.beta2=0.9 loader.shuffle=false loader.seed=7",
    "dense model.family=qwen2 model.rope_scaling=linear model.rope_scaling_factor=4 optimizer.decay=linear "
    "optimizer.warmup_steps=1 optimizer.decay_steps=2 loader.block_packs=2 loader.window_blocks=2 "
    "loader.drop_last=true",
    "dense model.family=qwen3 model.rope_scaling=yarn model.rope_scaling_factor=4 model.rope_original_positions=64 "
    "model.head_dim=24 optimizer.decay=cosine optimizer.min_lr_ratio=0.5 loader.num_workers=1",
    "qwen3_moe parallel.expert_dispatcher=allgather model.freeze_router=true model.experts_per_token=3",
    "qwen3_moe model.family=mixtral model.experts_per_token=4 parallel.overlap_gradients=false",
    "qwen3_moe model.family=glm4_moe model.router_score=sigmoid model.expert_bias=true model.router_scale=2.5 "
    "model.shared_ffn_hidden_size=48 model.dense_layers=1 model.tie_embeddings=false model.mtp_layers=1 "
    "model.qk_norm=true",
    "deepseek_like parallel.expert_dispatcher=allgather model.mtp_loss=0.4 model.rope_mscale=0.8 "
    "parallel.overlap_weights=false",
    "dense model.recompute=selective model.recompute_modules=[core_attn,mlp]",
    "lora qwen3_moe model.recompute=selective model.recompute_modules=[moe]",
    "deepseek_like model.recompute=selective model.recompute_modules=[mlp,shared_experts]",
    "hybrid_moe model.recompute=selective model.recompute_modules=[core_attn,moe]",
    "hybrid_moe model.expert_latent_size=24",
    "lora hybrid_moe model.expert_latent_size=24",
    "dense model.family=mistral optimizer.decay=inverse-square-root optimizer.warmup_steps=1 "
    "schedule.name=cost_balanced",
    "deepseek_like model.family=glm4_moe_lite model.rope_scaling=none model.rope_scaling_factor=1 "
    "model.rope_original_positions=4096 model.rope_mscale_all_dim=0",
    "delta_moe model.family=qwen3_5_moe_text",
    "qwen3_moe model.family=glm4_moe model.qk_norm=false model.router_score=sigmoid model.expert_bias=true "
    "model.tie_embeddings=false",
    "deepseek_like model.family=deepseek_v2 model.router_score=softmax model.expert_bias=false model.mtp_layers=0 "
    "model.router_groups=null model.router_top_groups=null model.router_normalize=false",
)
# What `drawn` combines: words of the kinds above, and values of settings.
WORDS = (
    *("", "conversation", "weighted", "clipped", "balanced", "partly", "sequences", "shared", "unnormalized", "lora"),
    "combined",
)
VALUES = {
    "model.tie_embeddings": "true false",
    "model.rotary_base": "500000",
    "model.rope_scaling": "none llama3 linear yarn",
    "model.rope_scaling_factor": "2",
    "model.head_dim": "24",
    "model.sliding_window": "16",
    "model.qk_norm": "true false",
    # Larger than the delta kinds have: a smaller one multiplies the rounding of outputs that are nearly zero.
    "model.norm_epsilon": "0.02",
    "model.recompute": "none selective full",
    "model.recompute_modules": "[core_attn] [mlp] [moe] [core_attn,shared_experts]",
    "model.recompute_layers": "1 2",
    "model.train_encoder": "true false",
    "model.experts_per_token": "1 3",
    "model.shared_ffn_hidden_size": "0 48",
    "model.dense_layers": "0 1",
    "model.router_score": "softmax sigmoid",
    "model.router_scale": "1.5",
    "model.expert_bias": "true false",
    "model.freeze_router": "true",
    "model.aux_loss": "0 0.05",
    "model.aux_loss_scope": "row sequence",
    "model.z_loss": "0 0.01",
    "model.mtp_layers": "0 1",
    "model.mtp_loss": "0.5",
    "parallel.expert_dispatcher": "alltoall allgather",
    "parallel.overlap_gradients": "false",
    "parallel.overlap_weights": "false",
    "parallel.overlap_shared_experts": "true",
    "schedule.name": "as_packed dp_balanced cost_balanced",
    "loader.num_workers": "1",
    "loader.shuffle": "false",
    "loader.drop_last": "true",
    "loader.block_packs": "2",
    "loader.window_blocks": "2",
    "optimizer.decay": "linear cosine inverse-square-root",
    "optimizer.beta1": "0.9",
    "optimizer.weight_decay": "0.3",
    "optimizer.clip_grad": "0 0.1",
    "trainer.loss_average": "token conversation",
}
_LONGEST = 80
# Four layers for four stages; heads, groups and experts for four ranks. Rows are packs, of which the last step has
# three: with four data-parallel ranks, one has a row of zero loss.
SETTINGS = (
    *("model.num_layers=4", "model.hidden_size=64", "model.ffn_hidden_size=128"),
    *("model.num_attention_heads=8", "model.num_query_groups=4"),
    *("loader.global_batch_size=4", "loader.num_workers=0", "schedule=as_packed", "schedule.max_tokens_per_rank=256"),
    # A step that is smooth in the gradient, whose first moment is the gradient itself; a norm that never clips.
    *("optimizer.beta1=0", "optimizer.eps=1", "optimizer.lr=0.02", "optimizer.decay=constant"),
    *("optimizer.warmup_steps=0", "optimizer.clip_grad=1000000", "trainer.device=cpu", "trainer.steps=2"),
    f"model.vocab_size={VOCAB}",
)
NUM_PACKS = 7
_FEW_EXPERTS = {"num_experts": 4, "experts_per_token": 2}
# Layers on stages, or model chunks, of different sizes, by their number; the last of four has the loss alone.
UNEVEN = {2: "Et|t*3{m}L", 4: "Et*2|t|t|{m}L"}


@dataclass(frozen=True)
class Layout:
    """A kind of model on a layout, by the settings of `parallel` that are searched; `refused` is None if accepted."""

    kind: str
    ranks: int
    parallel: dict[str, Any]
    config: SftConfig | None
    refused: ConfigError | None

    @property
    def values(self) -> set[tuple[str, str, Any]]:
        return {(self.kind, name, value) for name, value in {**self.parallel, "ranks": self.ranks}.items()}

    def __str__(self) -> str:
        sizes = {name.removesuffix("_parallel_size"): value for name, value in self.parallel.items()}
        return " ".join(
            [f"{self.kind}, {self.ranks} ranks:", *(f"{n}={v}" for n, v in sizes.items() if v not in (1, None, False))]
        )


@functools.cache
def _settings_of_kinds() -> dict[str, str]:
    return compose_config("parity", ParityConfig).kinds


@functools.cache
def config_of(kind: str) -> SftConfig:
    """Return the settings of a small model of a kind, on one rank."""
    known = _settings_of_kinds()
    settings = [setting for name in kind.split() for setting in known.get(name, name if "=" in name else "").split()]
    config = compose_config("sft", SftConfig, [*SETTINGS, *settings])
    model = config.model
    if model.num_experts:
        groups = {"router_groups": 2, "router_top_groups": 1} if model.router_groups else {}
        few = {name: value for name, value in _FEW_EXPERTS.items() if f"model.{name}=" not in kind}
        model = replace(model, **few, **groups)
    if model.kv_lora_rank:
        model = replace(model, kv_lora_rank=26)  # with 6 rotated numbers, a multiple of four ranks
    if "lora" in kind.split():
        model = replace(model, lora_rank=4, lora_alpha=4.0, mtp_layers=0, train_encoder=False)
    if "frozen" in kind.split():
        model = replace(model, train_encoder=False)
    if "unnormalized" in kind.split():
        model = replace(model, router_normalize=False)
    if "narrow" in kind.split():
        model = replace(model, lora_targets=["linear_qkv", "linear_fc2"])
    if "clipped" in kind.split():
        config = replace(config, optimizer=replace(config.optimizer, clip_grad=0.1, weight_decay=0.2))
    if "balanced" in kind.split():
        config = replace(config, schedule=ScheduleConfig("dp_balanced", max_tokens_per_rank=256))
    if "partly" in kind.split():
        model = replace(model, recompute="full", recompute_layers=1)
    if "sequences" in kind.split():
        # Layers are computed again while other rows are on their way through a pipeline.
        model = replace(model, aux_loss=0.1, aux_loss_scope="sequence", recompute="full")
    if "conversation" in kind.split():
        config = replace(config, trainer=replace(config.trainer, loss_average="conversation"))
    return replace(config, model=model)


def layouts_of(kind: str, num_ranks: Iterable[int] = RANKS) -> Iterator[Layout]:
    """Yield every combination of sizes and switches, with what the checks of a run say of it.

    Sizes that do not divide the ranks are tried without switches alone.
    """
    config = config_of(kind)
    for ranks in num_ranks:
        sizes = [size for size in RANKS if size <= ranks]
        dimensions = {
            **{f"{name}_parallel_size": sizes for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")},
            "virtual_pipeline_parallel_size": (None, 2, 4),
            **dict.fromkeys(("sequence_parallel", "distributed_optimizer", "static_rows"), (False, True)),
            "pipeline_layout": (None, UNEVEN),
        }
        for values in itertools.product(*dimensions.values()):
            parallel, run, refused = dict(zip(dimensions, values, strict=True)), None, None
            tensor, stages, context, expert, expert_tensor, *switches = values
            if (ranks % (tensor * stages * context) or ranks % (expert * expert_tensor * stages)) and any(switches):
                continue
            if parallel["static_rows"] and stages == 1:
                continue  # a GPU has them for stages alone
            if parallel["pipeline_layout"]:
                if stages == 1 or parallel["static_rows"] or not parallel["distributed_optimizer"]:
                    continue  # neither depends on the sizes of stages
                chunks = stages * (parallel["virtual_pipeline_parallel_size"] or 1)
                text = UNEVEN.get(chunks, UNEVEN[2])  # which is refused for more
                parallel["pipeline_layout"] = text.format(m="m" * config.model.mtp_layers)
            if "overlapped" in kind.split():
                parallel["overlap_shared_experts"] = True
            if "combined" in kind.split() and ranks > 1:  # one rank has all experts
                parallel["overlap_experts"] = True
            try:
                run = replace(config, parallel=replace(config.parallel, **parallel))
                if "shared" in kind.split():
                    most = largest_share(run.parallel.dp_size(ranks))
                    longest = _LONGEST + 16 * bool(set(MEDIA) & set(kind.split()))
                    tokens = -(-longest // most // 4) * 4
                    name = DYNAMIC if ranks > 1 else "cost_balanced"
                    run = replace(run, schedule=ScheduleConfig(name, max_tokens_per_rank=tokens))
                run.check(ranks)
            except ConfigError as error:
                refused = error
            yield Layout(kind, ranks, parallel, run, refused)


def accepted(kinds: Iterable[str], num_ranks: Iterable[int] = RANKS) -> list[Layout]:
    return [layout for kind in kinds for layout in layouts_of(kind, num_ranks) if layout.refused is None]


def an_eighth(layouts: list[Layout], seed: int = 30) -> list[Layout]:
    """Return an eighth of the layouts, in which every kind has every value of every dimension that it can have."""
    shuffled = random.Random(seed).sample(layouts, len(layouts))
    seen: set[tuple[str, str, Any]] = set()
    chosen = []
    for layout in shuffled:
        if layout.values - seen:
            chosen.append(layout)
            seen |= layout.values
    rest = (layout for layout in shuffled if layout not in chosen)
    return [*chosen, *itertools.islice(rest, max(0, len(layouts) // 8 - len(chosen)))]


def drawn(count: int, ranks: int, seed: int) -> list[Layout]:
    """Return accepted layouts of kinds with settings drawn together, as `VALUES` lists them."""
    chosen = random.Random(seed)
    found: list[Layout] = []
    while len(found) < count:
        base = chosen.choice([*KINDS, *LATER])
        words = chosen.sample([word for word in WORDS if word != "weighted" or base.split()[-1] not in MEDIA], 1)
        names = chosen.sample(list(VALUES), chosen.choice([2, 4, 6, 8]))
        kind = " ".join([base, *words, *(f"{name}={chosen.choice(VALUES[name].split())}" for name in names)])
        with contextlib.suppress(ConfigError):
            config = config_of(kind)
            rows_are_packs = config.schedule.name == "as_packed" and "shared" not in words
            # A balancing loss of rows depends on the layout where rows do.
            if rows_are_packs or not config.model.num_experts or config.model.aux_loss_scope == "sequence":
                found += chosen.sample(made := accepted([kind], [ranks]), min(1, len(made)))
    return found
