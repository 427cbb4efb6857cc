"""Fine-tune with Megatron-Bridge's own `pretrain` on CPUs; run by the Python of Bridge's environment under torchrun.

    torchrun bridge_pretrain.py SETTINGS.json

Every rank writes what its model received and the loss of each step into the folder `out` of the settings.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import cuda_stand_ins

cuda_stand_ins.install(after=cuda_stand_ins.MEGATRON_CORE)

import numpy as np
import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import config, gpt_step
from megatron.bridge.training.callbacks import CallbackManager
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.moe.router import TopKRouter

from harness.integrations.megatron_bridge import HarnessDataset, forward_step
from harness.megatron import compat
from harness.megatron.job.runtime import start
from harness.megatron.model import gpt
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.plan.layout import padded_vocab_size

VOCAB = 300
MODEL = {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64, "init_std": 0.06}
OPTIMIZER = OptimizerConfig(lr=2e-3, warmup_steps=5, decay_steps=10)


def model_provider(
    model: ModelConfig, parallel: ParallelConfig, *, seq_length: int, own_routers: bool = False
) -> GPTModelProvider:
    """Return Bridge's provider of the model that `recipes.sft` trains, with its weights.

    With `own_routers`, the routers of experts are Megatron's.
    """

    def layers(made: GPTModelProvider, vp_stage: int | None = None) -> Any:
        block = gpt._layers(model, made, transformer_engine=False, vp_stage=vp_stage)
        if not own_routers:
            return block
        return replace(block, layer_specs=[compat.with_router(layer, TopKRouter) for layer in block.layer_specs])

    ours = gpt.transformer_config(model, parallel, torch.device("cpu"))
    known = GPTModelProvider.__dataclass_fields__
    shared = {name: value for name, value in vars(ours).items() if name in known and known[name].init}
    provider = GPTModelProvider(
        **shared,
        transformer_layer_spec=layers,
        vocab_size=padded_vocab_size(VOCAB),
        seq_length=seq_length,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        share_embeddings_and_output_weights=model.tie_embeddings,
    )

    def with_our_weights(chunks: list[Any]) -> list[Any]:
        made = gpt.build_chunks(model, parallel, vocab_size=VOCAB, device=torch.device("cpu"))
        for chunk, ours in zip(chunks, made, strict=True):
            chunk.load_state_dict(ours.state_dict())
        return chunks

    provider.register_pre_wrap_hook(with_our_weights)
    return provider


def container(settings: dict[str, Any]) -> config.ConfigContainer:
    parallel = ParallelConfig(**settings.get("parallel", {}))
    model = ModelConfig(**{**MODEL, **settings.get("model", {})})
    checkpoints = settings.get("checkpoints")
    return config.ConfigContainer(
        train=config.TrainingConfig(
            micro_batch_size=settings.get("micro_batch_size", 1),
            global_batch_size=settings["global_batch_size"],
            train_iters=settings["steps"],
            **settings.get("train", {}),
        ),
        validation=config.ValidationConfig(
            **{"eval_iters": 0, "eval_interval": 1000, **settings.get("validation", {})}
        ),
        model=model_provider(model, parallel, seq_length=256, own_routers=settings.get("own_routers", False)),
        optimizer=config.OptimizerConfig(
            optimizer="adam",
            lr=OPTIMIZER.lr,
            min_lr=2e-4,
            weight_decay=OPTIMIZER.weight_decay,
            adam_beta1=OPTIMIZER.beta1,
            adam_beta2=OPTIMIZER.beta2,
            adam_eps=OPTIMIZER.eps,
            clip_grad=OPTIMIZER.clip_grad,
            use_distributed_optimizer=False,
        ),
        scheduler=config.SchedulerConfig(
            lr_decay_style=OPTIMIZER.decay,
            lr_warmup_iters=OPTIMIZER.warmup_steps,
            lr_decay_iters=OPTIMIZER.decay_steps,
            start_weight_decay=OPTIMIZER.weight_decay,
            end_weight_decay=OPTIMIZER.weight_decay,
            override_opt_param_scheduler=True,
        ),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False),
        dataset=HarnessDataset(num_workers=1, pin_memory=False, **settings["dataset"]),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1),
        checkpoint=config.CheckpointConfig(
            save=checkpoints, load=checkpoints, save_interval=settings.get("save_interval"), fully_parallel_save=False
        ),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        rng=config.RNGConfig(seed=1),
    )


def take_from_recipe(made: config.ConfigContainer, recipe: str) -> None:
    """Run the text of a recipe up to its training, and take its dataset and what it sets beside it."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import finetune

    taken: list[tuple[config.ConfigContainer, Any]] = []
    # Weights and sizes of the model would come from Hugging Face's hub.
    published = mock.MagicMock()
    published.to_megatron_provider.return_value = made.model
    with (
        mock.patch.object(AutoBridge, "from_hf_pretrained", return_value=published),
        mock.patch.object(finetune, "finetune", lambda given, step: taken.append((given, step))),
    ):
        small = vars(made.model).copy()
        made.model.calculate_per_token_loss = False
        exec(compile(recipe, "recipe", "exec"), {})
        assert made.model.calculate_per_token_loss
        vars(made.model).update(small)
    ((given, step),) = taken
    assert step is forward_step
    assert given.train.micro_batch_size == 1
    given.dataset.pin_memory = False
    made.dataset = given.dataset


class Record:
    """Keeps what the model receives in every forward pass, and the loss of every step."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self.rows: list[dict[str, np.ndarray[Any, Any]]] = []
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[int] = []

    def step(self, state: Any, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        first = self

        def keep(module: Any, arguments: Any, named: dict[str, Any], output: Any) -> None:
            packed = named["packed_seq_params"]
            row = {
                **{name: named[name] for name in ("input_ids", "position_ids", "labels")},
                "cu_seqlens": packed.cu_seqlens_q,
                "cu_seqlens_padded": packed.cu_seqlens_q_padded,
                "max_seqlen": packed.max_seqlen_q,
                "padding_mask": named.get("padding_mask"),
            }
            first.rows.append({name: np.asarray(value) for name, value in row.items() if value is not None})

        hook = model.register_forward_hook(keep, with_kwargs=True)  # after that of `forward_step`
        try:
            output, loss_function = self._forward(state, data_iterator, model, return_schedule_plan)
        finally:
            hook.remove()
        if loss_function.args[0] is not None:  # on the last stage of a pipeline
            self.rows[-1]["loss_mask"] = np.asarray(loss_function.args[0])
        return output, loss_function

    def end(self, context: Any) -> None:
        if "lm loss" in context.loss_dict:  # on the last stage of a pipeline
            loss = float(context.loss_dict["lm loss"])
            self.steps.append({"step": context.state.train_state.step + 1, "loss": loss})


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    out = Path(settings["out"])
    record = Record(gpt_step.forward_step if settings.get("forward_step") == "gpt_step" else forward_step)
    callbacks = CallbackManager()
    callbacks.register("on_train_step_end", record.end)
    with start("cpu") as runtime, cuda_stand_ins.bridge_like_a_gpu():
        made = container(settings)
        if settings.get("of_bridge"):
            made.dataset = config.MockGPTDatasetConfig(
                random_seed=1,
                seq_length=256,
                reset_position_ids=False,
                reset_attention_mask=False,
                eod_mask_loss=False,
                num_workers=0,
                persistent_workers=False,
                dataloader_type="single",
            )
        if "recipe" in settings:
            take_from_recipe(made, settings["recipe"])
        pretrain(made, record.step, callbacks=callbacks)
        rank = runtime.rank
    np.savez(
        out / f"rank{rank}.npz",
        **{f"{number}.{name}": value for number, row in enumerate(record.rows) for name, value in row.items()},
    )
    (out / f"rank{rank}.json").write_text(json.dumps({"steps": record.steps, "num_rows": len(record.rows)}))


if __name__ == "__main__":
    main()
