"""ms-swift's own pipelines: they train from a converted dataset the stored packs, and their caches are packed here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from stock_templates import tokenizer_for
from trainers import Trainer

from harness.formats import open_dataset
from harness.formats.foreign import export_to_swift
from harness.formats.layouts.jsonl import labels_of_pack
from harness.prep import prepare

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
PROGRAM = "swift_cache.py"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture
def swift(trainer: Callable[[str], Trainer]) -> Trainer:
    return trainer("ms-swift")


def test_ms_swift_trains_the_packs_of_a_converted_dataset(swift: Trainer, dataset: Path, tmp_path: Path) -> None:
    written = export_to_swift(dataset / "train", tmp_path / "cache")
    out = tmp_path / "batches.json"
    model = tokenizer_for(CHATML, tmp_path / "model")
    swift.run(PROGRAM, {"model": str(model), "arguments": written.arguments, "out": str(out)})

    received = {tuple(batch["input_ids"]): batch for batch in json.loads(out.read_text())}
    packs = list(open_dataset(dataset / "train"))
    assert len(received) == len(packs) == written.num_packs
    for pack in packs:
        batch = received[tuple(pack.input_ids.tolist())]
        assert batch["labels"] == labels_of_pack(pack).tolist()
        starts = np.repeat(pack.seq_start_id, np.diff(pack.seq_start_id, append=len(pack)))
        assert batch["position_ids"] == (np.arange(len(pack)) - starts).tolist()


def test_a_cache_of_ms_swift_is_packed_with_the_tokens_of_its_template(swift: Trainer, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    with chats.open("w") as file:
        for number in range(30):
            turns = [("user", f"What is {number} + {number}?"), ("assistant", f"{number + number}.")] * (1 + number % 2)
            messages = [{"role": role, "content": content} for role, content in turns]
            print(json.dumps({"messages": messages}), file=file)
    model = tokenizer_for(CHATML, tmp_path / "model")
    out, cache = tmp_path / "rows.json", tmp_path / "cache"
    swift.run(PROGRAM, {"model": str(model), "chats": str(chats), "cache": str(cache), "out": str(out)})

    settings = {"pack_size": 256, "validation_fraction": 0.0}
    prepare(cache / "train", model, tmp_path / "data", progress=lambda stage, done, total: None, **settings)
    ours = {}
    for pack in open_dataset(tmp_path / "data" / "train"):
        labels, starts = labels_of_pack(pack).tolist(), pack.seq_start_id.tolist()
        for start, stop in itertools.pairwise([*starts, len(pack)]):
            ours[tuple(pack.input_ids[start:stop].tolist())] = labels[start:stop]
    theirs = {tuple(row["input_ids"]): row["labels"] for row in json.loads(out.read_text())}
    assert len(ours) == 30
    (line_break,) = {ids[-1] for ids in theirs}
    # ms-swift trains the line break after an answer, too.
    untrained = {ids: [-100 if label == line_break else label for label in labels] for ids, labels in theirs.items()}
    assert ours == untrained
