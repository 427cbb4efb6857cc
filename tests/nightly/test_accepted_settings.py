"""Every value that a setting accepts is run: it does what it says, or ends with an error that names what is wrong.

Values are tried one at a time on small runs. The settings and their bounds come from the dataclasses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from corpora import VOCAB, write_corpus
from counted_calls import Commands, Ran
from harness.recipes.parity import make_dataset
from live_streams import write_chats
from small_packs import TINY

from harness.plan import PretrainConfig, SftConfig
from harness.prep import PrepareConfig
from harness.settings import Setting, explain_settings

from ..distributed.conftest import read_metrics

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]
PATIENCE_S = 240
# A setting that asks for more must be refused by name, and must not take the machine with it.
MOST_MEMORY = 12 << 30
SCHEMAS: dict[str, type[Any]] = {"prepare": PrepareConfig, "sft": SftConfig, "pretrain": PretrainConfig}
BASE: dict[str, tuple[str, ...]] = {
    "sft": (
        *TINY,
        *("loader.global_batch_size=4", "loader.num_workers=0", "schedule.max_tokens_per_rank=512", "trainer.steps=2"),
        "trainer.device=cpu",
    ),
    "pretrain": (
        *TINY,
        *(f"model.vocab_size={VOCAB}", "loader.global_batch_size=4", "loader.num_workers=0", "data.sequence_length=32"),
        *("data.split='90,10,0'", "trainer.steps=2", "trainer.eval_batches=1", "trainer.device=cpu"),
    ),
    "prepare": ("tokenizer.vocab_size=300", "data.num_workers=0", "data.pack_size=256", "data.packed_storage=parquet"),
}
# Runs that may last, until they are killed.
LONG = ("trainer.steps=2147483647", "model.num_layers=10000", "model.num_experts=4096")
# Limits that a run may not keep; the watchdog then ends it with its message.
SHORT, HANG = ("trainer.timeout_s=", "trainer.startup_timeout_s="), 70
VALUES = {
    "int": ("-1", "0", "1", "2"),
    "float": ("-1", "0", "0.5", "1", "2.7"),
    "bool": ("true", "false"),
    "str": ("words", "''", "'1'"),
    "path": ("words",),
}
# Values of a part.
PART = 50
ERROR = re.compile(r"^\w*Error: .+\n  where: .+\n  fix:   .+", re.MULTILINE)


def values_of(setting: Setting) -> list[str]:
    kind = setting.type.removesuffix(" or null")
    null = ["null"] if "or null" in setting.type else []
    inner = re.sub("^(list|map) of ", "", kind)
    values = [*VALUES.get(inner, ())]
    if setting.bounds is not None:
        ends = (setting.bounds.lowest, setting.bounds.highest)
        values += [str(end) for end in ends if end is not None and str(end) not in values]
    if kind.startswith("list of "):
        return ["[]", *(f"[{value}]" for value in values)]
    if kind.startswith("map of "):
        return ["{}", *(f"{{words: {value}}}" for value in values)]
    return [*values, *null]


def cases_of(recipe: str, folder: Path) -> list[dict[str, Any]]:
    """Return the runs of a recipe: one for each value of each setting."""
    base = list(BASE[recipe])
    if recipe == "sft":
        base.append(f"data.path={make_dataset(folder / 'data')}")
    elif recipe == "pretrain":
        prefix = write_corpus(folder / "corpus", 400, seed=0)
        base += [f"data.path={prefix}", f"data.path_to_cache={folder / 'cache'}"]
    else:
        base.append(f"source.path={write_chats(folder / 'chats.jsonl', 60)}")
    cases = []
    for setting in explain_settings(SCHEMAS[recipe]):
        above, is_record, name = setting.key.partition("[].")
        for value in values_of(setting):
            text = f"{above}=[{{{name}: {value}}}]" if is_record else f"{setting.key}={value}"
            place = folder / "runs" / str(len(cases))
            own = [f"data.path={place}"] if recipe == "prepare" else [f"run_dir={place}", f"runs={place}"]
            cases.append(
                {
                    "recipe": recipe,
                    "text": text,
                    "key": setting.key,
                    "place": str(place),
                    "overrides": [*base, *own, text],
                }
            )
    return cases


def parts_of(recipe: str) -> list[Any]:
    """Return one parameter for each part of a recipe's values: a part takes about two minutes."""
    count = sum(len(values_of(setting)) for setting in explain_settings(SCHEMAS[recipe]))
    parts = -(-count // PART)
    return [pytest.param(recipe, part, parts, id=f"{recipe}, part {part + 1} of {parts}") for part in range(parts)]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("commands"), "training") as server:
        server.limit_memory(MOST_MEMORY)
        yield server


@pytest.mark.parametrize(("recipe", "part", "parts"), [one for recipe in BASE for one in parts_of(recipe)])
def test_an_accepted_value_is_carried_out_or_refused_by_name(
    commands, recipe, part, parts, tmp_path, report_points
) -> None:
    wrong, codes = [], Counter[int | None]()
    # Every so many, so that the long ones of a section are spread over all parts.
    for case in cases_of(recipe, tmp_path)[part::parts]:
        ran = commands.run([f"harness.recipes.{recipe}", *case["overrides"]], root=tmp_path, patience_s=PATIENCE_S)
        codes[ran.code] += 1
        wrong += [f"{case['text']}: {why}"] if (why := find_wrong(case, ran)) else []
    assert wrong == []
    ends = f"values: {codes[0]} ran, {codes[2]} were refused"
    report_points("settings", f"{recipe}, part {part + 1}", codes.total(), of=ends, outcome="held or refused by name")


def find_wrong(case: dict[str, Any], ran: Ran) -> str:
    """Return what is wrong with a run; empty if nothing is."""
    code, output, folder = ran.code, ran.output, Path(case["place"])
    if "Traceback" in output:
        return f"a traceback: {output.strip()[-300:]}"
    if code is None:
        return "" if case["text"] in LONG else f"it did not end: {output.strip()[-300:]}"
    if code == 2 or (code == HANG and case["text"].startswith(SHORT)):
        return "" if ERROR.search(output) else f"not an error with a fix: {output.strip()[-300:]}"
    if code != 0:
        return f"exit code {code}: {output.strip()[-300:]}"
    if case["recipe"] != "prepare" and (folder / "config.yaml").exists():
        steps = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["steps"]
        if len(read_metrics(folder)) != steps:
            return f"{len(read_metrics(folder))} of {steps} steps"
    return ""
