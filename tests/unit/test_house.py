"""The shape of the code: small folders, one name for one thing, and the words of the field.

Layers, doors and cycles are import-linter's (`make lint`); this is what it cannot see.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import errors
from tests import shape
from tests.shape import nodes_of

ROOT = Path(__file__).resolve().parents[2]


def modules_of(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


MODULES = modules_of("harness", "recipes")
# Names and docstrings are checked everywhere; the rules for folders and doors apply to the packages only.
WRITTEN = MODULES + modules_of("tests", "docker")
MAX_FILES_IN_A_FOLDER = 16
# `from harness.schedule import schedule` is relied on by other code.
SHARED_NAMES = {"harness/schedule/__init__.py: schedule"}
RIDDLES = re.compile(r"(What|How|Whether|Where|Who|Why)\b")
# Packages that read stored bytes.
STORED = ("formats", "storage", "indexed")
MOST_NAMES_OF_A_DOOR = 20
DOCUMENTED = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
VAGUE_NAMES = {"told", "said", "say", "tells", "says"}
# A file without them needs no parser: a quote before the word of a riddle, and a vague name or a part of one.
SUSPECT = re.compile(rf"[\"']\s*{RIDDLES.pattern}|(?<![^\W_])({'|'.join(VAGUE_NAMES)})(?![^\W_])")
# The ratchet: `python tests/shape.py --table` writes the two tables that follow. Numbers fall, and rise only in a
# commit that says what was deleted for it; the lines of all packages and recipes together never rise above the last.
LINES = {
    "harness": 2_943,
    "harness/bench": 1_842,
    "harness/cli": 2_546,
    "harness/conformance": 1_732,
    "harness/formats": 5_558,
    "harness/indexed": 1_080,
    "harness/integrations": 2_566,
    "harness/launch": 2_159,
    "harness/loader": 4_442,
    "harness/megatron": 9_886,
    "harness/parity": 2_419,
    "harness/plan": 5_307,
    "harness/prep": 10_182,
    "harness/recipes": 20,
    "harness/schedule": 1_152,
    "harness/storage": 2_442,
    "harness/train": 2_416,
    "recipes": 471,
    "tests": 61_178,
    "tests/benchmarks": 2_809,
}
SHAPE = {
    "core ring, lines": 19_147,
    "from packs to the optimizer's step, lines": 4_112,
    "own frames from the command to the model": 10,
    "modules that `harness --help` imports": 6,
    "functions over 60 lines": 0,
    "functions of complexity over 15": 0,
    "names in __all__": 209,
    "class names used twice": 0,
    "mock.patch outside the CPU stand-in": 1,
    "Markdown by hand, kB": 100,
}
MOST_LINES_IN_ALL = 59_163


def tree(path: Path) -> ast.Module:
    return nodes_of(path)[0]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_folder_holds_more_files_than_a_reader_keeps_in_mind() -> None:
    counts = Counter(relative(path.parent) for path in MODULES)

    assert {folder: count for folder, count in counts.items() if count > MAX_FILES_IN_A_FOLDER} == {}


def test_a_module_and_a_function_share_no_name() -> None:
    shared = {
        f"{relative(path)}: {node.name}"
        for path in MODULES
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef)
        and node.name == (path.parent.name if path.name == "__init__.py" else path.stem)
    }

    assert shared == SHARED_NAMES


def test_docstrings_open_with_a_verb_or_a_noun_phrase_and_names_describe_their_values() -> None:
    riddles, vague = [], []
    for path in (path for path in WRITTEN if SUSPECT.search(path.read_text())):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        documented = [node for node in nodes if isinstance(node, DOCUMENTED)]
        riddles += [doc for node in documented if (doc := ast.get_docstring(node)) and RIDDLES.match(doc)]
        variables = {node.id for node in nodes if isinstance(node, ast.Name)}
        variables |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        names = {name for name in variables if VAGUE_NAMES & set(name.split("_"))} | (functions & VAGUE_NAMES)
        vague += [f"{relative(path)}: {name}" for name in names]

    assert (riddles, vague) == ([], [])


def test_packages_are_described_and_their_doors_are_narrow() -> None:
    packages = {relative(path): tree(path) for path in MODULES if path.name == "__init__.py"}
    exported = {
        name: [node.value for node in ast.walk(assigned.value) if isinstance(node, ast.Constant)]
        for name, door in packages.items()
        for assigned in door.body
        if isinstance(assigned, ast.Assign) and getattr(assigned.targets[0], "id", "") == "__all__"
    }

    assert [name for name, door in packages.items() if not ast.get_docstring(door)] == []
    assert {name: len(names) for name, names in exported.items() if len(names) > MOST_NAMES_OF_A_DOOR} == {}


def test_no_module_imports_a_private_name_of_another_package() -> None:
    private = [
        f"{relative(path)}: {node.module}.{alias.name}"
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("harness.")
        for alias in node.names
        if alias.name.startswith("_") and (node.module or "").split(".")[1] != path.relative_to(ROOT).parts[1]
    ]

    assert private == []


def test_every_text_is_printed_by_one_module_without_markup_and_control_characters() -> None:
    """`harness.printing` has the only `print` and the only calls of Rich's Console; bars show their texts unparsed."""
    others = []
    for path in MODULES:
        for node in nodes_of(path):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else name
            is_parsed = name == "TextColumn" and "markup" not in {keyword.arg for keyword in node.keywords}
            is_bare = name == "Console" and isinstance(node.func, ast.Name)
            if isinstance(node, ast.Name) and node.id == "print":  # called, or handed to what calls it
                name, is_bare = node.id, True
            if is_bare or is_parsed or name in ("from_markup", "from_ansi"):
                others.append(f"{relative(path)}: {name}")
    assert others == ["harness/printing.py: print"]


def test_the_code_is_no_larger_and_no_harder_to_carry_than_its_table_says() -> None:
    lines, counts = shape.measure_lines(), shape.measure_shape()

    grown = {
        name: f"{number:,} for {LINES.get(name, 0):,}" for name, number in lines.items() if number > LINES.get(name, 0)
    }
    grown |= {name: f"{number:,} for {SHAPE[name]:,}" for name, number in counts.items() if number > SHAPE[name]}
    assert grown == {}, "delete as much, or write the new numbers with `python tests/shape.py --table` and say why"
    assert sum(number for name, number in lines.items() if not name.startswith("tests")) <= MOST_LINES_IN_ALL


def incomplete_errors() -> Iterator[str]:
    """Yield each place that makes a HarnessError and does not say where it happened and how to fix it."""
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    for path in MODULES:
        for node in nodes_of(path):
            kind = kinds.get(node.func.id) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
            if not isinstance(node, ast.Call) or kind is None or not issubclass(kind, errors.HarnessError):
                continue
            required = {"where", "fix"}
            if kind is errors.FormatError:
                # Their readers add the place; the default says how to replace damaged bytes.
                required = set() if path.relative_to(ROOT).parts[1] in STORED else {"fix"}
            if required - {keyword.arg for keyword in node.keywords}:
                yield f"{relative(path)}:{node.lineno}"


def test_every_error_says_where_and_how_to_fix_it() -> None:
    assert list(incomplete_errors()) == []
    assert errors.FormatError("pack 3 is damaged").fix == errors.FormatError.default_fix != ""


def test_no_model_or_tokenizer_runs_code_of_its_folder() -> None:
    loads = {
        f"{relative(path)}:{node.lineno}": {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    }

    assert loads
    assert [place for place, given in loads.items() if given.get("trust_remote_code") != "False"] == []


def test_only_commands_that_say_so_read_standard_input() -> None:
    reading = {
        relative(path)
        for path in MODULES
        for node in nodes_of(path)
        if (isinstance(node, ast.Attribute) and node.attr == "stdin" and isinstance(node.value, ast.Name))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "input")
    }

    commands = {"harness/cli/preflight.py", "harness/loader/live/produce.py"}
    # `harness preflight --judge` and `harness live produce -`; the last reads a pipe of its own.
    assert reading == commands | {"harness/prep/tokenize/renderer.py"}


def caught_around(node: ast.stmt) -> tuple[Sequence[ast.stmt], str]:
    """Return the statements whose errors a statement catches, and the names of these."""
    if isinstance(node, ast.Try) and node.handlers:
        return node.body, " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
    if isinstance(node, ast.With):
        names = " ".join(ast.unparse(item.context_expr) for item in node.items)
        return (node.body, names) if "suppress(" in names else ([], "")
    return [], ""


def test_whoever_catches_damage_of_stored_json_or_yaml_catches_its_depth_too() -> None:
    """A file of nothing but brackets is a RecursionError, and text that is not UTF-8 a ValueError in YAML."""
    parsers = re.compile(r"(json\.loads?|yaml\.safe_load)\(")
    unguarded = []
    for path in MODULES:
        for node in nodes_of(path):
            body, names = caught_around(node) if isinstance(node, ast.stmt) else ([], "")
            parsed = {match[1] for part in body for match in parsers.finditer(ast.unparse(part))}
            is_whole = re.search("MISREAD|Exception", names) or (
                re.search("RecursionError|RuntimeError", names) and "ValueError" in names
            )
            if parsed and re.search("ValueError|YAMLError", names) and not is_whole:
                unguarded.append(f"{relative(path)}:{node.lineno}: {names}")

    assert unguarded == []


def test_chat_templates_are_rendered_in_the_process_with_limits_alone() -> None:
    rendering = {
        relative(path)
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr == "apply_chat_template"
    }

    assert rendering == set()
