"""Write `configs/README.md`: every setting of every recipe, from the dataclasses and the composed YAML files.

python tests/docs/settings_page.py > configs/README.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from harness.recipes.parity import ParityConfig

from harness.checks import LARGEST
from harness.config import compose_config
from harness.launch.cluster import SubmitConfig
from harness.plan import PretrainConfig, RunConfig, SftConfig
from harness.prep import PrepareConfig
from harness.settings import CONFIGS, Setting, explain_settings, to_plain

INTRODUCTION = """# Settings

This page is generated from the dataclasses of the code: `python tests/docs/settings_page.py > configs/README.md`.

Every setting is `key=value` on the command line, with the same dotted name in every command. Choose a file of a group
with `group=file`:

```shell
harness prepare source.path=chats.jsonl data.pack_size=4096 --cfg
harness train sft model=qwen3_0_6b parallel=data_distributed optimizer.warmup_ratio=0.05 --cfg
```

`--cfg` prints all settings as they are composed, with explanations, and starts nothing. An unknown key is refused with
the nearest known one, and the name of a setting in TRL, axolotl, LLaMA-Factory, Megatron-Bridge or ms-swift with ours.
Lists are written `'[a, b]'`, an empty optional setting `null`.

Settings are composed from the defaults of the dataclasses, the files of the groups, the file of the recipe (such as
`configs/sft.yaml`), the experiment and the command line; later ones win. For an experiment of your own see
[recipes/README.md](../recipes/README.md).

Commands with settings of their own (`plan`, `compare`, `convert`, `import`, `repack`, `live produce`,
`indexed convert`, `chat`, `bench`) print them with `--help` or `--cfg`.
"""


def write_page() -> str:
    run = {setting.key for setting in explain_settings(RunConfig)}
    sections = [INTRODUCTION, *_describe_groups()]
    for title, recipe, schema, skip in (
        ("`harness prepare`", "prepare", PrepareConfig, set()),
        ("`harness train sft` and `harness train pretrain`", "sft", SftConfig, set()),
        ("`harness train pretrain`: its own data settings", "pretrain", PretrainConfig, run),
        ("`harness submit`", "submit", SubmitConfig, set()),
        ("`harness parity`", "parity", ParityConfig, set()),
    ):
        settings = [setting for setting in explain_settings(schema) if setting.key not in skip]
        values = dict(_flatten(to_plain(compose_config(recipe, schema))))
        sections += [f"\n## {title}", *_tables(settings, values)]
    return "\n".join(sections) + "\n"


def _describe_groups() -> Iterator[str]:
    yield "\n## Groups\n"
    yield "| `group=file` | |\n|---|---|"
    for path in sorted(CONFIGS.glob("*/*.yaml")):
        comment = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("# ")]
        first = next((line for line in comment if not line.startswith("@package")), "")
        yield f"| `{path.parent.name}={path.stem}` | {_cell(first)} |"


def _tables(settings: Iterable[Setting], values: dict[str, Any]) -> Iterator[str]:
    """Yield one table for each group of settings: those with the same first part of the key."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(setting.key.partition(".")[0] if "." in setting.key else "", []).append(setting)
    for name, group in groups.items():
        yield (f"\n### `{name}`\n" if name else "") + "\n| setting | type | default | meaning |\n|---|---|---|---|"
        for setting in group:
            default = _value(values.get(setting.key, setting.default))
            yield f"| `{setting.key}` | {_type(setting)} | {default} | {_cell(setting.text)} |"


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield prefix + key, value
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")


def _type(setting: Setting) -> str:
    """Return the type with the bounds of numbers; where none is set on purpose, the highest one is left out."""
    bounds = setting.bounds
    if bounds is None:
        return setting.type
    return f"{setting.type}, {replace(bounds, highest=None) if bounds.highest == LARGEST else bounds}"


def _value(value: Any) -> str:
    if isinstance(value, list | dict):
        text = str(value) if value else ""
    else:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{_cell(text)}`" if 0 < len(text) <= 60 else "" if not text else "see the file"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(write_page(), end="")
