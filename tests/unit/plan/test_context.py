"""`harness plan` compares a context-parallel size for each row with one for all of them."""

from __future__ import annotations

import pytest
from long_tails import COST, TOKENS, lengths_of

from harness.config import compose_config
from harness.errors import ConfigError
from harness.plan import SftConfig
from harness.plan.run_plan import compare_context_sizes


def test_one_size_that_holds_a_million_tokens_costs_chats_more_than_a_size_for_each() -> None:
    lengths = lengths_of("a tail to 1M tokens", 5000, 1 << 20)
    found = compare_context_sizes(lengths, sequences=2000, ranks=128, max_tokens_per_rank=TOKENS, cost=COST)
    # The longest needs 64 ranks, and with 32 it has no row.
    assert list(found) == ["64", "128", "dynamic_context"]
    assert found["128"] > found["64"] > 1.4
    assert 1 <= found["dynamic_context"] < 1.1


def test_chats_that_a_rank_holds_need_no_context_parallelism() -> None:
    lengths = lengths_of("chats", 2000, TOKENS)
    found = compare_context_sizes(lengths, sequences=1000, ranks=4, max_tokens_per_rank=TOKENS, cost=COST)
    assert list(found) == ["1", "2", "4", "dynamic_context"]
    assert found["dynamic_context"] == pytest.approx(found["1"])
    assert found["1"] < found["2"] < found["4"]
    config = compose_config("sft", SftConfig, ["schedule=dynamic_context", "model.dtype=float32"])
    assert config.on("cuda").model.attention == "torch"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel=cp2"], "context_parallel_size is 2: this schedule decides for each row"),
        (["model.fp8=tensorwise"], "fp8 is tensorwise: no test has trained"),
        (["model=qwen3_30b_a3b"], "aux_loss is 0.001, and model.aux_loss_scope is row: the tokens of a row"),
        (["parallel.expert_dispatcher=allgather"], "dispatcher is allgather: no test has trained"),
        (["data.live.path=chunks"], "sequences that are still being made"),
        (["schedule.max_tokens_per_rank=4095"], "4,095, and ranks that share a sequence"),
        (["model.dtype=float32", "model.attention=transformer_engine"], "does not support float32 attention"),
    ],
)
def test_settings_that_rows_of_several_ranks_do_not_have_are_refused(settings: list[str], message: str) -> None:
    config = compose_config("sft", SftConfig, ["schedule=dynamic_context", "model.vocab_size=300", *settings])
    with pytest.raises(ConfigError, match=message):
        config.check(4)
