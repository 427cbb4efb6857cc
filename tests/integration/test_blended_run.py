"""A fine-tuning run on a blend trains the packs of the blend, over a stop and on other formats."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from harness.recipes.sft import main

from harness.errors import ConfigError, LoaderError
from harness.loader import DataConfig, open_datasets
from harness.loader.blend import BlendOrder
from harness.loader.datasets import BlendSource
from harness.plan.settings import SftConfig

FORMATS = (("parquet", "memmap", "jsonl"), ("binidx", "npy", "parquet"))


@pytest.fixture
def blends(tmp_path: Path, write_packs) -> list[DataConfig]:
    """The same three sources twice, in other formats: 9 packs, 6 packs, and 4 that are read twice at most."""
    made = []
    for formats in FORMATS:
        sources = []
        for number, (format, count, weight) in enumerate(zip(formats, (9, 6, 4), (5.0, 3.0, 2.0), strict=True)):
            folder = tmp_path / f"{number}-{format}"
            write_packs(folder, count, format=format, seed=number, tokenizer="t" * 16)
            sources.append(BlendSource(str(folder), weight, 2 if number == 2 else None))
        made.append(DataConfig(path="", blend=sources))
    return made


def settings(data: DataConfig, folder: Path, *, steps: int, size: int, **changes: object) -> SftConfig:
    made = SftConfig(data=data, run_dir=str(folder))
    made.model.hidden_size, made.model.ffn_hidden_size, made.model.num_layers = 32, 64, 1
    made.schedule.max_tokens_per_rank = 64
    made.trainer.device, made.trainer.steps, made.trainer.record_digests = "cpu", steps, True
    made.loader.num_workers, made.loader.global_batch_size = 2, size
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def sequences_of(data: DataConfig, config: SftConfig, num_packs: int) -> list[list[int]]:
    """Sequence ids of each of the first packs of the blend, by the pure order."""
    opened = open_datasets(data)
    order = config.loader
    packs = BlendOrder(order, opened.blend)
    found = [
        pack
        for step in itertools.islice(opened.blend.steps(order, epoch=0, packs_consumed=0), num_packs)
        for pack in packs.packs(step).tolist()
    ]
    offsets = opened.train.pack_offsets
    return [list(range(offsets[pack], offsets[pack + 1])) for pack in found[:num_packs]]


def test_a_blend_is_trained_in_its_order_over_a_stop_and_in_other_formats(tmp_path, blends) -> None:
    folder = tmp_path / "run"
    main(settings(blends[0], folder, steps=3, size=4))
    main(settings(blends[1], folder, steps=7, size=6, resume="true"))
    lines = [json.loads(line) for line in (folder / "digests.jsonl").read_text().splitlines()]
    trained = [sorted(one for row in line["rows"] for one in row["sequences"]) for line in lines]
    due = sequences_of(blends[0], settings(blends[0], folder, steps=1, size=4), 36)
    cuts = [0, 4, 8, 12, 18, 24, 30, 36]
    assert trained == [sorted(itertools.chain(*due[start:stop])) for start, stop in itertools.pairwise(cuts)]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["packs_consumed"] for line in metrics] == cuts[1:]


def test_other_weights_are_refused_on_resume_and_too_few_epochs_before_training(tmp_path, blends) -> None:
    folder = tmp_path / "run"
    # The last source has 8 packs and a fifth of each batch.
    with pytest.raises(ConfigError, match=r"trains 48 packs, but .*2-parquet \(2 epochs of 4 packs\)"):
        main(settings(blends[1], folder, steps=12, size=4))
    assert not folder.exists()
    main(settings(blends[0], folder, steps=1, size=4))
    blends[1].blend[0].weight = 4.0
    with pytest.raises(
        LoaderError, match=r"the order was '.*weights=5\.0,3\.0,2\.0.* and is '.*weights=4\.0,3\.0,2\.0"
    ):
        main(settings(blends[1], folder, steps=2, size=4, resume="true"))
