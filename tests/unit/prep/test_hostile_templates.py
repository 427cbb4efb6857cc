"""A chat template without end, or with all memory, is stopped and named; what the sandbox refuses is a bad record."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from forks import run_in_forks

from harness.errors import ConfigError, HarnessError, PrepError
from harness.prep.chat import BadReason, BadRecord, BadRecordError, Conversation, Message, ToolCall
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, renderer, train_bpe
from harness.prep.tokenize.known_forms import KnownForms
from harness.prep.tokenize.rendering import Template

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GROWING = "{% set ns = namespace(x=OF) %}{% for i in range(99) %}{% set ns.x = MORE %}{% endfor %}"
LOOPS = "{% for a in range(99999) %}" * 3 + "{{ a }}" + "{% endfor %}" * 3
HOSTILE = [
    # numbers
    "{{ 3**60000000 }}",
    GROWING.replace("OF", "9").replace("MORE", "ns.x * ns.x"),
    # loops and recursion
    LOOPS,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    # texts and lists
    "{{ 'a' * 10**10 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%0999999999d' % 1 }}{{ '%0999999999d' % 1 }}",
    "{{ [1, [2, [3]]] | tojson(indent=10**9) }}",
    "{{ ('x' * 10**6) | indent(10**9, true) }}{{ 'x\nx' | indent(10**10) }}",
    "{{ lipsum(n=10**7, html=false) }}",
    GROWING.replace("OF", "'aa'").replace("MORE", "ns.x ~ ns.x"),
]
ESCAPES = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ range(10**9) | list }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["The quick brown fox jumps over the lazy dog.\n"] * 20, path, vocab_size=300)
    return path


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "CPU_S", 0.2)
    monkeypatch.setattr(renderer, "MEMORY_BYTES", 256 << 20)


def tokenizer_of(template: str, folder: Path, tmp_path: Path) -> ChatTokenizer:
    (tmp_path / "template.jinja").write_text(template)
    return ChatTokenizer(TokenizerConfig(name=str(folder), chat_template=str(tmp_path / "template.jinja")))


def chat(text: str, where: str = "chats.jsonl, line 7") -> Conversation:
    return Conversation((Message("user", text), Message("assistant", "Hello")), where)


@pytest.mark.parametrize("program", HOSTILE)
def test_a_template_without_end_is_refused_by_name_with_the_limit(program: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"of processor time|GiB of memory|more than 67,108,864 characters") as error:
        tokenizer_of(program + PLAIN, folder, tmp_path).encode([chat("Hi")])
    assert "template.jinja" in error.value.where
    assert "tokenizer.chat_template" in error.value.fix


@pytest.mark.parametrize("program", ESCAPES)
def test_what_the_sandbox_refuses_is_a_bad_record(program: str, folder: Path, tmp_path: Path) -> None:
    (bad,) = tokenizer_of(program + PLAIN, folder, tmp_path).encode([chat("Hi")])
    assert isinstance(bad, BadRecord)
    assert bad.reason == BadReason.TEMPLATE_FAILED


def test_half_a_surrogate_pair_that_a_template_writes_is_a_bad_record(folder: Path, tmp_path: Path) -> None:
    program = "{% if messages[0].content == 'Go' %}{{ '\\ud800' }}{% endif %}"
    made = tokenizer_of(program + PLAIN, folder, tmp_path)
    whole, bad = made.encode([chat("Hi"), chat("Go")])
    assert not isinstance(whole, BadRecord)
    assert isinstance(bad, BadRecord)
    assert bad.detail == "what the chat template writes contains half a surrogate pair"
    with pytest.raises(ConfigError, match="half a surrogate pair"):
        made.prompt({"role": "user", "content": "Go"})


def test_the_conversation_that_a_template_never_finishes_is_named_and_the_others_are_rendered(
    folder: Path, tmp_path: Path
) -> None:
    program = "{% if messages[0].content == 'Go' %}" + LOOPS + "{% endif %}"
    made = tokenizer_of(program + PLAIN, folder, tmp_path)
    chats = [chat(text, f"chats.jsonl, line {number}") for number, text in enumerate(("Hi", "Go", "Bye"), start=1)]
    with pytest.raises(PrepError, match=r"takes more than 0\.2 s of processor time") as error:
        made.encode(chats)
    assert error.value.where.startswith("chats.jsonl, line 2; template: ")
    assert not any(isinstance(one, BadRecord) for one in made.encode([chats[0], chats[2]]))


def test_a_template_whose_constants_never_end_is_refused_when_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PrepError, match="of processor time"):
        tokenizer_of("{% set x = 3**60000000 %}" + PLAIN, folder, tmp_path)


def test_hostile_templates_take_no_memory_of_the_process_that_prepares(folder: Path, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(HarnessError):
        tokenizer_of("{{ 'a' * 60000000 }}{{ 'a' * 60000000 }}" + PLAIN, folder, tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000


# Imports what a preparation does, and prints its own peak in MiB, which starts with these imports' 300 in a fork; the
# process that renders is another.
IMPORTS = """
import atexit, re
import harness.prep.pipeline, harness.recipes.prepare, transformers.models.auto.tokenization_auto
from harness.cli import main, runs, settings
from harness.config import compose_config
from harness.prep import PrepareConfig
compose_config("prepare", PrepareConfig, [])
"""
MEASURED = """
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) >> 10
atexit.register(lambda: print("peak", peak(), flush=True))
main()
"""
# Of each: the template, the text of a record, the highest peak in MiB, and the error.
LARGE = [
    ("{{ 'x' * 20000000 }}", "Hi", 600, "the chat template writes 20,000,"),
    ("{% if messages | length %}{{ messages[0].content * 12 }}{% endif %}", "Hi yes " * 80_000, 1000, "writes 7,280,"),
    ("{{ 'x' * 60000 }}", "Hi", 1000, ""),
    ("{{ raise_exception('x' * 100000000) }}", "Hi", 600, "failed: TemplateError: xxx"),
]


@pytest.mark.submission
def test_a_template_takes_no_more_memory_of_the_process_that_prepares_than_its_records_explain(
    folder: Path, tmp_path: Path
) -> None:
    commands = []
    for number, (program, text, _, detail) in enumerate(LARGE):
        template, chats = tmp_path / f"{number}.jinja", tmp_path / f"{number}.jsonl"
        template.write_text(program + PLAIN)
        record = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Hello"}]}
        chats.write_text(f"{json.dumps(record)}\n" * (1 if detail else 200))
        settings = [f"source.path={chats}", f"tokenizer.name={folder}", f"data.path={tmp_path}/{number}"]
        commands.append(["prepare", *settings, f"tokenizer.chat_template={template}", "data.pack_size=131072"])
    done = run_in_forks(IMPORTS, MEASURED, commands, COLUMNS="400")
    for (code, printed, errors), (_, _, limit_mib, detail) in zip(done, LARGE, strict=True):
        assert int(printed.rpartition("peak ")[2]) < limit_mib
        assert (code == 0) == (not detail), errors
        assert detail in errors
        assert len(errors) < 5000


def test_a_forked_process_renders_in_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    made = tokenizer_of(PLAIN, folder, tmp_path)
    ours = renderer._process_of(os.getpid(), renderer.CPU_S, renderer.MEMORY_BYTES)
    child = os.fork()
    if child == 0:
        (one,) = made.encode([chat("Hi")])
        theirs = renderer._process_of(os.getpid(), renderer.CPU_S, renderer.MEMORY_BYTES)
        os._exit(0 if theirs is not ours and not isinstance(one, BadRecord) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not ours.has_ended


def test_a_renderer_whose_asking_process_was_killed_ends_without_a_traceback():
    program = [sys.executable, "-c", renderer._SERVE, "1", str(2**30)]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    settings = pickle.dumps(("{% unknown %}", {}, None, (), None, "here"))
    process.stdin.write(pickle.dumps((settings, "facts")))
    process.stdin.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_the_memory_of_a_rendering_does_not_grow_with_the_square_of_the_turns(folder, tmp_path, monkeypatch):
    """Each of 300 answers follows a prompt as long as all before it: together they are 0.5 GB."""
    monkeypatch.setattr(renderer, "CPU_S", 60.0)
    turns = (Message("user", "Hi"), Message("assistant", "fox " * 1500)) * 300
    tokenizer = tokenizer_of(PLAIN, folder, tmp_path)
    assert tokenizer.mask_rule == "served"
    (made,) = tokenizer.encode_each([Conversation(turns, "chats.jsonl, line 7")])
    assert not isinstance(made, BadRecord), made
    assert len(made[0].spans) == 300


CALLING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ tools | tojson if tools }}{% endif %}{{ m.content }}\n"
    "{% endfor %}{% for tool in tools or [] %}{{ tool.function.parameters.properties.items() and '' }}{% endfor %}"
)
SYSTEM = (Message("system", "Be brief."), *chat("Hi").messages)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}
BARE = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("turns", "tool", "problem"),
    [(SYSTEM[1:], TOOL, "does not write the tools"), (SYSTEM, BARE, "the chat template failed")],
    ids=["turns without a place for tools", "tools that the template fails on"],
)
def test_a_record_with_refused_tools_is_refused_in_any_order_and_no_other_is(turns, tool, problem, order):
    forms = KnownForms(Template(CALLING, {}), trusts_plain=False)
    good = Conversation(SYSTEM, "good", tools=(TOOL,))
    for record in (good, Conversation(turns, "bad", tools=(tool,)))[::order]:
        if record is good:
            forms.find(record)
            continue
        with pytest.raises(BadRecordError, match=problem):
            forms.find(record)


def test_a_record_with_an_id_that_the_template_fails_on_is_refused_alone():
    """The templates of Mistral accept ids of 9 characters only."""
    fails = "{% for call in m.tool_calls or [] if call.id | length != 9 %}{{ raise_exception('id') }}{% endfor %}"
    forms = KnownForms(Template(PLAIN.replace("{{ m.content }}", fails + "{{ m }}"), {}), trusts_plain=False)
    calls = [(ToolCall("f", {"x": 1}, id=name),) for name in ("1", "123456789")]
    bad, good = (Conversation((Message("user", "Hi"), Message("assistant", "a", tool_calls=one)), "") for one in calls)
    with pytest.raises(BadRecordError, match="the chat template failed"):
        forms.find(bad)
    forms.find(good)


def test_what_is_known_of_the_shapes_of_conversations_takes_little_memory():
    forms = KnownForms(Template(PLAIN, {}), trusts_plain=False)
    tracemalloc.start()
    for number in range(100, 115):
        turns = (Message("user", "Hi"), Message("assistant", "Hello")) * number
        tools = ({"type": "function", "function": {"name": "f", "description": "x" * 10_000 + str(number)}},)
        with pytest.raises(BadRecordError, match="does not write the tools"):
            forms.find(Conversation(turns, "", tools=tools))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1 << 19
