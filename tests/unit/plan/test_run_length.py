"""The learning rate and the length of a run follow from what it trains, unless they are given."""

from __future__ import annotations

import pytest

from harness.config import compose_config
from harness.errors import ConfigError
from harness.loader import CorpusConfig
from harness.plan import ModelConfig, OptimizerConfig, PretrainConfig, SftConfig
from harness.plan.settings import TrainerConfig

RANDOM, PRETRAINED = ModelConfig(), ModelConfig(init_from="weights")
ADAPTERS = ModelConfig(init_from="weights", lora_rank=8)


@pytest.mark.parametrize(("model", "lr"), [(RANDOM, 2e-3), (PRETRAINED, 1e-5), (ADAPTERS, 2e-4)])
def test_the_learning_rate_is_that_of_the_kind_of_training_unless_it_is_given(model, lr) -> None:
    assert OptimizerConfig().resolved(model, 100).lr == lr
    assert OptimizerConfig(lr=3e-4).resolved(model, 100).lr == 3e-4


@pytest.mark.parametrize(
    ("settings", "steps", "warmup", "decay"),
    [
        *(({}, 1000, 30, 1000), ({}, 60, 2, 60), ({}, 1, 0, 1), ({}, None, 5, None)),
        *(({"warmup_ratio": ratio}, 100, steps, 100) for ratio, steps in ((0.07, 7), (1, 99), (0, 0))),
        ({"warmup_steps": 12}, 100, 12, 100),
        *(({"decay_steps": 200}, steps, 6, 200) for steps in (100, None)),
    ],
)
def test_the_warm_up_is_a_share_of_the_decay_which_is_as_long_as_the_run(settings, steps, warmup, decay) -> None:
    resolved = OptimizerConfig(**settings).resolved(RANDOM, steps)
    assert (resolved.warmup_steps, resolved.decay_steps) == (warmup, decay)
    assert resolved.resolved(PRETRAINED, steps) == resolved


def test_the_old_name_of_the_final_rate_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'optimizer\.min_lr'") as error:
        compose_config("sft", SftConfig, ["optimizer.min_lr=1e-6"])
    assert error.value.fix.startswith("optimizer.min_lr_ratio is the final learning rate as a fraction of optimizer.lr")


def test_a_run_is_one_epoch_of_pretrained_weights_and_sixty_steps_of_random_ones() -> None:
    made = [SftConfig(model=RANDOM), SftConfig(model=PRETRAINED), PretrainConfig(model=PRETRAINED)]
    assert [(c.with_steps().trainer.steps, c.with_steps().trainer.epochs) for c in made] == [
        (60, None),
        (None, 1),
        (60, None),
    ]
    given = SftConfig(model=PRETRAINED, trainer=TrainerConfig(steps=7)).with_steps()
    assert (given.trainer.steps, given.trainer.epochs) == (7, None)
    live = compose_config("sft", SftConfig, ["data=live", "schedule=as_packed"])
    assert live.with_steps().trainer.steps is None


def test_steps_and_epochs_together_and_epochs_of_data_without_them_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.steps is 7, and trainer\.epochs is 2"):
        compose_config("sft", SftConfig, ["trainer.steps=7", "trainer.epochs=2"])
    assert compose_config("sft", SftConfig, ["trainer.steps=null", "trainer.epochs=2"]).trainer.epochs == 2
    with pytest.raises(ConfigError, match=r"trainer\.epochs is 2, but only packed datasets support epochs"):
        compose_config("sft", SftConfig, ["data=live", "schedule=as_packed", "trainer.epochs=2"])
    with pytest.raises(ConfigError, match=r"trainer\.epochs is 2, but only packed datasets support epochs"):
        PretrainConfig(data=CorpusConfig(), trainer=TrainerConfig(epochs=2))
