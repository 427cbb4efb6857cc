"""Train the conversations of a run one by one, unpacked, with a plain transformers model and PyTorch's AdamW.

Comparing layouts with one rank of this project cannot reveal a fault that all layouts share. This reference shares only
the order of packs with a run: it reads the stored conversations itself, and has its own model, loss, gradient clipping
and learning rate. It has no router losses, no updates of expert biases and no MTP layers, and neither do the runs that
are compared with it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from harness.errors import ConfigError
from harness.loader import Loader, open_datasets
from harness.loader.plan import Features
from harness.plan import OptimizerConfig, SftConfig, read_hf_config
from harness.plan.encoders import MEDIA_MODELS
from harness.records import Pack
from harness.settings import to_yaml
from harness.train import DigestWriter, Evaluation, MetricsWriter, StepRecord, StepResult, is_due, merge_ranks
from harness.train.digests import rank_rows
from harness.train.folder import open_run_folder
from harness.train.loop import OWN_VALIDATION
from harness.train.metrics import step_metrics

# Values of every small model; the other values of the check `reference` are in configs/parity.yaml.
_ANY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "initializer_range": 0.1,
    "sliding_window": None,
    # The embedding of a padding token would be zeros that transformers never trains; here it is a token like others.
    "pad_token_id": None,
}


def make_model(family: str, sizes: Mapping[str, Any], folder: Path) -> list[str]:
    """Save a small random model of a family, unless `folder` has it with these sizes; return the settings of its runs.

    Raises ConfigError if transformers is not installed.
    """
    made, wanted = folder / "sizes.json", json.dumps(sizes, sort_keys=True)
    if not made.exists() or made.read_text() != wanted:
        transformers = _transformers()
        made.unlink(missing_ok=True)  # before the weights that it describes
        torch.manual_seed(8)
        if (media := MEDIA_MODELS.get(family)) is None:
            config = transformers.AutoConfig.for_model(family, **{**_ANY, **sizes})
            model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            kind = getattr(transformers, media.architecture)
            values = {**sizes, "text_config": {**_ANY, **sizes["text_config"]}}
            model = kind(kind.config_class(**values))
        with torch.no_grad():
            for weight, values in [*model.named_parameters(), *model.named_buffers()]:
                # Initially ones and zeros, which could hide a mistake.
                if any(part in weight for part in ("norm", "bias", "sinks")):
                    values.add_(0.1 * torch.randn_like(values))
        model.save_pretrained(folder)
        made.write_text(wanted)
    stored = read_hf_config(folder).settings
    texts = {name: json.dumps(value).strip('"') for name, value in stored.items() if name != "encoder"}
    model_settings = [f"model.{name}={text}" for name, text in texts.items()]
    still = ["model.expert_bias_rate=0"] if stored["num_experts"] else []
    trained = ["model.train_encoder=true"] if "encoder" in stored else []
    return [f"model.init_from={folder}", "model.max_sequence_length=1024", *model_settings, *still, *trained]


def train_reference(config: SftConfig) -> int:
    """Train the reference of a run with these settings; write its metrics and digests, as the run does.

    Raises ConfigError if transformers is not installed, or if the reference does not support a setting.
    """
    if config.model.init_from is None or config.run_dir is None or config.trainer.steps is None:
        where = "model.init_from, run_dir, trainer.steps"
        raise ConfigError("weights, a folder and a number of steps are required", where=where, fix="set all of them")
    config.optimizer = optimizer = config.optimizer.resolved(config.model, config.trainer.steps)
    trainer, data = config.trainer, open_datasets(config.data)
    name = "AutoModelForCausalLM" if config.model.media is None else config.model.media.architecture
    rules = data.media_rules
    features = None if rules is None else rules.features
    model = getattr(_transformers(), name).from_pretrained(
        config.model.init_from, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    groups: dict[float, list[torch.Tensor]] = {}
    for weight, values in model.named_parameters():
        # Sinusoids, which the encoder's class does not train; transformers 5 loses this flag when it loads weights.
        values.requires_grad_(not weight.endswith("audio_tower.embed_positions.weight"))
        # Weight decay applies to matrices, not to vectors and biases (biases of stacked experts are matrices).
        decays = values.ndim > 1 and not weight.endswith("bias")
        groups.setdefault(optimizer.weight_decay if decays else 0.0, []).append(values)
    params = [{"params": values, "weight_decay": decay} for decay, values in groups.items()]
    adam = torch.optim.AdamW(params, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)
    folder, last = Path(config.run_dir), trainer.last_step
    loader = Loader(data.train, config.loader, schedule=config.schedule, num_steps=last, features=features)
    with (
        open_run_folder(folder, settings=to_yaml(config), resumes=True),
        closing(DigestWriter(folder)) as digests,
        closing(MetricsWriter(folder, trackers=[])) as metrics,
    ):
        for number, batch in enumerate(loader, start=1):
            began = time.perf_counter()
            adam.zero_grad()
            packs = data.train.read(batch.pack_ids.tolist())
            loss, tokens = _mean_loss(model, packs, trainer.loss_average, features, backward=True)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_grad or math.inf)
            rate = _learning_rate(optimizer, number - 1)
            for group in adam.param_groups:
                group["lr"] = rate
            adam.step()
            evaluations = {}
            if data.validation is not None and is_due(number, trainer.eval_interval, last):
                stored = data.validation.read(list(range(len(data.validation))))
                with torch.no_grad():
                    found = Evaluation(*_mean_loss(model, stored, trainer.loss_average, features, backward=False))
                    evaluations[OWN_VALIDATION] = found
            own = rank_rows(batch, process=0, dp_rank=0, is_first_stage=True, is_last_stage=True)
            digests.write(merge_ranks(number, batch, [own]))
            result = StepResult(loss, tokens, float(norm), rate, skipped=False)
            step_s = time.perf_counter() - began
            metrics.write(step_metrics(StepRecord(number, batch, result, step_s, 0.0, evaluations)))
    return 0


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        what = "the reference is a model of transformers, which is not installed"
        raise ConfigError(what, where="check=reference", fix="pip install 'megatron-sft-harness[tokenize]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _learning_rate(optimizer: OptimizerConfig, done: int) -> float:
    """Return the learning rate of the step after `done` steps: linear from 0 to `lr`, then to `lr * min_lr_ratio`."""
    lr, decay_steps = optimizer.lr or 0.0, optimizer.decay_steps or 1
    warmup = min(optimizer.warmup_steps or 0, decay_steps - 1)
    if warmup and done <= warmup:
        return lr * done / warmup
    part = min(1.0, (done - warmup) / (decay_steps - warmup))
    shares = {"cosine": (1 + math.cos(math.pi * part)) / 2, "linear": 1 - part, "constant": 1.0}
    if optimizer.decay not in shares:
        fix = f"optimizer.decay={' or '.join(shares)}"
        raise ConfigError(f"the reference does not support decay {optimizer.decay}", where="optimizer.decay", fix=fix)
    return lr * (optimizer.min_lr_ratio + (1 - optimizer.min_lr_ratio) * shares[optimizer.decay])


def _mean_loss(
    model: Any, packs: Sequence[Pack], average: str, features: Features | None, *, backward: bool
) -> tuple[float, int]:
    """Return the mean loss of packs by `trainer.loss_average`, and their trained tokens; `backward` adds gradients."""
    trained = [one for pack in packs for one in pack.sequences() if one.loss_mask.any()]
    sums, mean = [int(one.loss_mask.sum()) for one in trained], 0.0
    for one, own in zip(trained, sums, strict=True):
        ids = torch.from_numpy(one.input_ids).long()
        arrays = features(one.media) if features is not None and one.media else {}
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if inputs:
            inputs["attention_mask"] = torch.ones(1, len(ids) - 1, dtype=torch.long)
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids[None, :-1] == model.config.image_token_id).int()
        logits = model(ids[None, :-1], **inputs).logits[0].float()
        each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        divisor = own * len(trained) if average == "conversation" else sum(sums)
        loss = (each * torch.from_numpy(one.loss_mask[:-1])).sum() / divisor
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
        mean += float(loss.detach())
    return mean, sum(int(one.loss_mask.astype(bool).sum()) for one in trained)
