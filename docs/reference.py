"""Generate pages of the site: the reference from the code, and the start page from the root README.

MkDocs calls `on_files` when it builds the site (`hooks` of mkdocs.yml), so no generated page is stored.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import typer
from harness.recipes.parity import ParityConfig

from harness import errors
from harness.checks import LARGEST, Condition, Rule, show_value
from harness.cli.app import app
from harness.config import compose_config
from harness.conformance import CHECKS
from harness.conformance.kit import ConformanceCheck
from harness.launch.cluster import SubmitConfig
from harness.plan import FAMILIES, PretrainConfig, RunConfig, SftConfig
from harness.plan.families import MISSING
from harness.prep import PrepareConfig
from harness.settings import CONFIGS, Setting, explain_settings, list_rules, to_plain

_ROOT = Path(__file__).resolve().parents[1]
# Pages of the site that are files of the repository's root.
_ROOT_PAGES = {
    "index.md": "README.md",
    "benchmarks.md": "BENCHMARKS.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
_HOW = """Pass settings as `key=value` on the command line. `--cfg` prints the composed settings and exits.
See [how settings are composed](../train.md#your-own-hydra-files).
"""
# Page: its command, the recipe that composes its defaults, and the schema.
_SETTINGS = {
    "prepare": ("harness prepare", "prepare", PrepareConfig),
    "sft": ("harness train sft", "sft", SftConfig),
    "pretrain": ("harness train pretrain", "pretrain", PretrainConfig),
    "submit": ("harness submit", "submit", SubmitConfig),
    "parity": ("harness parity", "parity", ParityConfig),
}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those of the site."""
    from mkdocs.structure.files import File

    for path, text in write_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Append the list of generated pages, which exist only in the site, to the page of the reference."""
    if page.file.src_uri != "reference/index.md":
        return markdown
    pages = {Path(path).name: text for path, text in write_pages().items() if Path(path).parent.name == "reference"}
    rows = [f"| [{text.partition(chr(10))[0].removeprefix('# ')}]({name}) |" for name, text in pages.items()]
    return _lines(markdown, "## Generated pages\n", "| page |", "|---|", *rows)


def write_pages() -> dict[str, str]:
    """Return the text of each generated page, by its path in `docs/`."""
    pages = {name: _page_of_the_root(file) for name, file in _ROOT_PAGES.items()}
    pages |= {f"reference/{name}.md": _settings_page(*page) for name, page in _SETTINGS.items()}
    pages["reference/groups.md"] = _lines("# Configuration files", *_describe_groups())
    pages["reference/commands.md"] = _lines("# Commands", *_describe_commands(typer.main.get_command(app), "harness"))
    pages["reference/errors.md"] = _lines("# Error classes", *_describe_errors())
    pages["reference/families.md"] = _lines("# Model families", *_describe_families())
    pages["reference/conformance.md"] = _lines("# Checks of trainers", *_list_checks())
    pages |= {f"reference/checks/{check.name}.md": _check_page(check) for check in CHECKS.values()}
    return pages


def _list_checks() -> Iterator[str]:
    yield "`harness conformance --list` explains all checks.\n\n| check | what it does |\n|---|---|"
    for check in CHECKS.values():
        yield f"| [{check.name}](checks/{check.name}.md) | {check.about.partition('. ')[0].rstrip('.')} |"


def _check_page(check: ConformanceCheck) -> str:
    """Return the page of a check: what it does, how to run it, a trainer that fails it, and who has reported that."""
    threads = [name.partition("#") for name in check.threads]
    links = [f"[{place}#{number}](https://github.com/{place}/issues/{number})" for place, _, number in threads]
    fault, parts = _plain_trainer_fault(check.name)
    ranks = f"The check runs on {check.ranks} ranks.\n" if check.ranks > 1 else ""
    after = f"It continues from the checkpoint of [{check.after}]({check.after}.md), which runs first.\n"
    rows = [(row["trainer"], row["version"], row["verdicts"].get(check.name)) for row in _scoreboard()]
    verdicts = [f"| {name} {version} | {one['outcome']} | {_cell(one['text'])} |" for name, version, one in rows if one]
    return _lines(
        f"# {check.name}\n",
        f"{check.about}\n",
        ranks + after * bool(check.after),
        "```shell",
        f"harness conformance my_trainer.py --checks {check.name}",
        "```",
        f"\nUsers reported the defect in {', '.join(links)}.\n",
        "## A trainer that fails\n",
        f"`tests/samples/plain_trainer.py` fails with `Trainer(fault={fault!r})`, in these lines:\n",
        *(f"```python\n{part}\n```\n" for part in parts),
        "## Released trainers\n",
        *("| trainer | outcome | found |", "|---|---|---|", *verdicts, ""),
        "## The check\n",
        f"```python\n{inspect.getsource(check.run).rstrip()}\n```",
    )


@cache
def _scoreboard() -> Any:
    return json.loads((_ROOT / "docs" / "scoreboard" / "scoreboard.json").read_text())["rows"]


def _plain_trainer_fault(name: str) -> tuple[str, list[str]]:
    """Return the fault of the plain trainer that a check sees, and each statement that makes it."""
    text = (_ROOT / "tests" / "samples" / "plain_trainer.py").read_text()
    tree = ast.parse(text)
    table = next(one for one in tree.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "FAULTS")
    fault = ast.literal_eval(table.value)[name]
    within = (node for one in tree.body if isinstance(one, ast.ClassDef) for node in ast.walk(one))
    made = [node for node in within if isinstance(node, ast.stmt) and fault in ast.unparse(node)]
    smallest = [node for node in made if not any(other is not node and other in ast.walk(node) for other in made)]
    parts = [textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "") for node in smallest]
    return fault, [part.removeprefix("el") if part.startswith("elif") else part for part in parts]


def _page_of_the_root(file: str) -> str:
    """Return a page of the repository's root: its links to `docs/` stay links, those to other files become text."""
    text = re.sub(r"\]\(docs/", "](", (_ROOT / file).read_text())
    text = re.sub(r"\[([^]]+)\]\(((?:[\w-]+/)*[A-Z_]+(?:\.md)?)\)", lambda link: _root_link(link[1], link[2]), text)
    return text


def _root_link(title: str, file: str) -> str:
    page = next((name for name, other in _ROOT_PAGES.items() if other == file), None)
    return f"[{title}]({page})" if page else f"`{title}`"


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def _settings_page(command: str, recipe: str, schema: type[Any]) -> str:
    shared = {setting.key for setting in explain_settings(RunConfig)} if recipe == "pretrain" else set()
    settings = [setting for setting in explain_settings(schema) if setting.key not in shared]
    values = dict(_flatten(to_plain(compose_config(recipe, schema))))
    note = "The remaining settings are the same as in [`harness train sft`](sft.md).\n" if shared else ""
    rules = [rule for rule in list_rules(schema) if not shared or rule not in list_rules(SftConfig)]
    return _lines(f"# Settings of `{command}`\n", _HOW, note, *_tables(settings, values), *_refusals(rules))


def _describe_groups() -> Iterator[str]:
    yield "\n`GROUP=FILE` on the command line selects the file `configs/GROUP/FILE.yaml`.\n"
    yield "| `group=file` | contents |\n|---|---|"
    for path in sorted(CONFIGS.glob("*/*.yaml")):
        comment = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("# ")]
        sentences = " ".join(line for line in comment if not line.startswith("@package")).split(". ")
        yield f"| `{path.parent.name}={path.stem}` | {_cell(sentences[0].removesuffix('.'))}. |"


def _describe_commands(command: Any, name: str) -> Iterator[str]:
    """Yield the help, arguments, options and settings of a command or of all commands of a group."""
    for part, inner in _commands_of(command):
        yield from _describe_commands(inner, f"{name} {part}")
    if hasattr(command, "commands"):
        return
    yield f"\n## `{name}`\n\n{inspect.cleandoc(command.help or '').replace(chr(12), '')}\n"
    shown = [
        parameter
        for parameter in command.params
        if parameter.name != "help" and not getattr(parameter, "hidden", False)
    ]
    if shown:
        yield "| argument or option | meaning |\n|---|---|"
    for parameter in shown:
        names = (
            ", ".join(parameter.opts)
            if parameter.param_type_name == "option"
            else parameter.metavar or parameter.name.upper()
        )
        yield f"| `{_cell(names)}` | {_cell(getattr(parameter, 'help', '') or '')} |"
    schema = getattr(command, "schema", None)
    if schema is SubmitConfig:
        yield "\nSettings: [`harness submit`](submit.md)."
    elif schema is not None:
        yield from _table(explain_settings(schema), {})


def _context() -> Any:
    command = typer.main.get_command(app)
    return command.make_context("harness", [], resilient_parsing=True)


def _commands_of(command: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "list_commands"):
        context = _context()
        for name in command.list_commands(context):
            yield name, command.get_command(context, name)


def _describe_errors() -> Iterator[str]:
    yield "\nAll derive from `HarnessError`. Commands print the error and exit with [code 2](index.md#exit-codes).\n"
    yield "| class | raised when |\n|---|---|"
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.HarnessError):
            yield f"| `{name}` | {_cell((kind.__doc__ or '').partition(chr(10))[0])} |"


def _describe_families() -> Iterator[str]:
    yield "\nValues of `model.family`. `model.init_from` accepts models with the same `model_type` in `config.json`,"
    yield "and models with [an encoder](../models.md#audio-and-images).\n"
    yield "| family | class in transformers | experts | latent attention | attention sinks | MTP layers |"
    yield "|---|---|---|---|---|---|"
    for name, family in FAMILIES.items():
        has = (family.experts, family.has_latents, family.has_sinks, family.predicts_further)
        yield f"| `{name}` | `{family.architecture}` | {' | '.join('yes' if part else '' for part in has)} |"
    yield "\n## Not supported\n\n| `model_type` | requires |\n|---|---|"
    for reason in dict.fromkeys(MISSING.values()):
        yield f"| {', '.join(f'`{name}`' for name, other in MISSING.items() if other == reason)} | {_cell(reason)} |"


def _tables(settings: Iterable[Setting], values: dict[str, Any]) -> Iterator[str]:
    """Yield one table for each group of settings: those with the same first part of the key."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(setting.key.partition(".")[0] if "." in setting.key else "", []).append(setting)
    for name, group in groups.items():
        yield f"\n## `{name}`" if name else ""
        yield from _table(group, values)


def _table(settings: Iterable[Setting], values: dict[str, Any]) -> Iterator[str]:
    rows = list(settings)
    if rows:
        yield "\n| setting | type | default | meaning |\n|---|---|---|---|"
    for setting in rows:
        default = _value(values.get(setting.key, setting.default))
        yield f"| `{setting.key}` | {_type(setting)} | {default} | {_cell(setting.text)} |"


def _refusals(rules: list[Rule]) -> Iterator[str]:
    if rules:
        yield "\n## Refused together\n\n| settings | reason | fix |\n|---|---|---|"
    yield from map(_row_of_rule, rules)


def _row_of_rule(rule: Rule) -> str:
    settings = (
        f"`{name}` {refused.text}" if isinstance(refused, Condition) else f"`{name}={show_value(refused)}`"
        for name, refused in rule.settings.items()
    )
    return f"| {_cell(', '.join(settings))} | {_cell(rule.why)} | {_cell(rule.fix)} |"


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield prefix + key, value
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")


def _type(setting: Setting) -> str:
    """Return the type with the bounds of numbers; where none is set on purpose, the highest one is left out."""
    bounds = setting.bounds
    if setting.choices:
        return f"{setting.type}, one of {', '.join(f'`{choice}`' for choice in setting.choices)}"
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
    return text.replace("|", "\\|").replace("\n", " ")
