"""Built-in chat templates are found by name and mark exactly what the assistant has to generate."""

from __future__ import annotations

import json

import pytest
from stock_templates import SHAPES, stock_templates

from harness.errors import ConfigError
from harness.prep.chat import Conversation, Message
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, train_bpe
from harness.prep.tokenize.templates.builtin import BUILT_IN, load_template

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "def f(x):\n    return x + 1\n",
    "Grüße, 世界! \U0001f600",
] * 20
NAMES = tuple(BUILT_IN)
# This template has no tools, and takes nothing but texts.
CHATML_SHAPES = [
    name for name, (_, tools) in SHAPES.items() if not tools and "reasoning" not in name and name != "text_parts"
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """A tokenizer for each built-in template, with the special tokens of the template."""
    made = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        train_bpe(TEXTS, folder, vocab_size=300, chat_template=name)
        made[name] = ChatTokenizer(TokenizerConfig(name=str(folder), mask="generation"))
    return made


def chat(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(role, text) for role, text in turns), "chat.jsonl, line 1")


def trained_text(tokenizer, sequence) -> str:
    return tokenizer.decode(sequence.input_ids[1:][sequence.loss_mask[:-1] == 1])


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_of_a_template_are_single_tokens_of_the_tokenizer_trained_for_it(tokenizers, name):
    tokens = BUILT_IN[name]
    vocabulary = tokenizers[name].hf.get_vocab()
    assert [token for token in (*tokens.ends, *tokens.marks, tokens.begin) if token and token not in vocabulary] == []
    assert tokenizers[name].chat_template == load_template(name)


def test_a_name_that_is_nothing_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="chat template 'lama3' is neither") as caught:
        load_template("lama3")
    assert "did you mean llama3?" in caught.value.fix
    assert "chatml, llama3" in caught.value.fix


def test_a_path_names_a_file_and_a_folder_is_none(tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ 1 }}\n")
    assert load_template(str(tmp_path / "mine.jinja")) == "{{ 1 }}\n"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_template(str(tmp_path))
    (tmp_path / "latin.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_template(str(tmp_path / "latin.jinja"))


def test_a_tokenizer_without_the_end_of_a_templates_turns_is_refused(tmp_path):
    train_bpe(TEXTS, tmp_path, vocab_size=300, chat_template="llama3")
    with pytest.raises(ConfigError, match=r"'chatml' writes <\|im_end\|>, which is not a token") as caught:
        ChatTokenizer(TokenizerConfig(name=str(tmp_path), chat_template="chatml"))
    assert caught.value.where == str(tmp_path)


# The stock templates of each family. `mistral` has none in the package: its text is checked literally.
STOCK = {
    "llama3": ("llama3",),
    "llama3_1": ("llama3_1",),
    "qwen2_5": ("qwen2_5",),
    "qwen3": ("qwen3",),
    "qwen3_instruct": ("qwen3_instruct_2507",),
    "gemma": ("gemma", "gemma3"),
    "phi3": ("phi3", "phi3_5"),
    "deepseek": ("deepseekv3",),
}
TOOL_SHAPES = {name for name, (_, tools) in SHAPES.items() if tools}
REASONING_SHAPES = {name for name in SHAPES if "reasoning" in name and "content" not in name}
# What a format cannot hold is refused, where a stock template leaves it out or writes it as Python prints it.
REFUSED = {
    "llama3": TOOL_SHAPES | REASONING_SHAPES,
    "llama3_1": REASONING_SHAPES | {"tool_call_with_content", "parallel_calls"},
    "qwen2_5": REASONING_SHAPES,
    "qwen3_instruct": REASONING_SHAPES,
    "gemma": TOOL_SHAPES | REASONING_SHAPES,
    "phi3": TOOL_SHAPES | REASONING_SHAPES,
}
# A developer's turn is a system turn here; stock templates leave it out, or write a role that no model has seen. Text
# parts are joined; stock templates of these families leave them out, or write them as Python prints them.
BETTER = {"developer", "text_parts"}
DIFFERENT = {
    # Arguments that are JSON text are written as they are; the stock templates quote them once more.
    "llama3_1": BETTER | {"tool_call_of_text_arguments"},
    "qwen2_5": BETTER | {"tool_call_of_text_arguments"},
    # The reasoning of the last turn is written, so that it can be trained.
    # So are the descriptions of tools.
    "deepseek": BETTER
    | TOOL_SHAPES
    | {name for name in SHAPES if "reasoning" in name and name != "reasoning_in_the_first_turn"},
}


def rendered(template: str, messages, tools, **variables):
    """Text and marked spans, as transformers renders them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    marks = "add_generation_prompt" not in variables
    texts, spans = render_jinja_template(
        [messages],
        tools=tools or None,
        chat_template=template,
        return_assistant_tokens_mask=marks,
        bos_token="<begin>",
        eos_token="<end>",
        **variables,
    )
    return texts[0], spans[0] if marks else []


@pytest.mark.parametrize("name", STOCK)
def test_a_built_in_template_writes_the_text_of_the_familys_stock_template(name):
    for shape in SHAPES:
        if shape in REFUSED.get(name, ()):
            with pytest.raises(Exception, match=f"the {name} format "):
                rendered(load_template(name), *SHAPES[shape])
            continue
        ours, _ = rendered(load_template(name), *SHAPES[shape])
        for stock in STOCK[name]:
            try:
                theirs, _ = rendered(stock_templates()[stock], *SHAPES[shape])
            except Exception:
                theirs = None
            if shape not in DIFFERENT.get(name, BETTER):
                # Gemma 1 refuses the system prompt, which Gemma 3 takes.
                assert ours == theirs or (theirs is None and stock == "gemma"), shape
            elif stock != "gemma3":
                assert ours != theirs, shape


# In these, the stock template opens the calls of a later step no more, nor closes the results before them.
CALLS_IN_STEPS = {"calls_in_steps", "tool_result_two_turns"}


@pytest.mark.parametrize(
    "shape", sorted(shape for shape in TOOL_SHAPES - CALLS_IN_STEPS if not shape.startswith("reasoning"))
)
def test_deepseek_writes_tool_calls_as_its_stock_template_does_after_the_tools(shape):
    messages, tools = json.loads(json.dumps(SHAPES[shape]))
    for call in [call for message in messages for call in message.get("tool_calls", [])]:
        if not isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    ours, _ = rendered(load_template("deepseek"), messages, tools)
    described = "\n".join(
        f"- `{tool['function']['name']}`:\n```json\n{json.dumps(tool['function'], indent=4)}\n```" for tool in tools
    )
    heading = "## Tools\n\n### Function\n\nYou have the following functions available:\n\n"
    before = "\n\n" if messages[0]["role"] == "system" else ""
    assert ours.count(before + heading + described + "<\uff5cUser\uff5c>") == 1
    stock, _ = rendered(stock_templates()["deepseekv3"], messages, tools)
    assert ours.replace(before + heading + described, "") == stock


@pytest.mark.parametrize("name", NAMES)
def test_marks_begin_where_the_prompt_of_a_turn_ends_and_stop_after_its_end_token(name):
    template, end = load_template(name), BUILT_IN[name].ends[0]
    for shape in CHATML_SHAPES if name == "chatml" else sorted(set(SHAPES) - REFUSED.get(name, set())):
        messages, tools = SHAPES[shape]
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        # A conversation without thinking has no reasoning.
        for variables in [{}] if "reasoning" in shape else [{}, {"enable_thinking": False}]:
            text, spans = rendered(template, messages[: answers[-1] + 1], tools, **variables)
            prompt, _ = rendered(template, messages[: answers[-1]], tools, add_generation_prompt=True, **variables)
            assert text[: spans[-1][0]] == prompt, shape
            assert [text[start:stop].count(end) for start, stop in spans] == [1] * len(answers), shape
            assert all(text[:stop].endswith(end) for _, stop in spans), shape


def test_mistral_writes_tools_reasoning_and_results_without_white_space():
    text, spans = rendered(
        load_template("mistral"),
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Warm?"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Ask.",
                "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}],
            },
            {"role": "tool", "content": "27 C"},
            {"role": "assistant", "content": "Yes."},
        ],
        [{"name": "weather"}],
    )
    assert text == (
        '<begin>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][AVAILABLE_TOOLS][{"name": "weather"}][/AVAILABLE_TOOLS]'
        '[INST]Warm?[/INST][THINK]Ask.[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Rome"}</s>'
        "[TOOL_RESULTS]27 C[/TOOL_RESULTS]Yes.</s>"
    )
    assert [text[start:end] for start, end in spans] == [
        '[THINK]Ask.[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Rome"}</s>',
        "Yes.</s>",
    ]


def test_deepseek_opens_and_closes_the_calls_of_every_step():
    messages, _ = SHAPES["calls_in_steps"]
    text, spans = rendered(load_template("deepseek"), messages, None)
    assert text.count("tool▁calls▁begin") == text.count("tool▁calls▁end") == 2
    assert text.count("tool▁outputs▁begin") == text.count("tool▁outputs▁end") == 2
    assert "outputs" not in "".join(text[start:end] for start, end in spans)


def test_a_tokenizer_trained_for_a_template_file_has_the_special_tokens_that_it_spells(tmp_path):
    (tmp_path / "mine.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ '<|text|>' + m.content }}<|end|>{% endfor %}"
    )
    train_bpe(TEXTS, tmp_path / "made", vocab_size=300, chat_template=str(tmp_path / "mine.jinja"))
    settings = json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|begin_of_text|>", "<|end|>")
    assert settings["additional_special_tokens"] == ["<|text|>"]


@pytest.mark.parametrize("name", sorted(stock_templates()))
def test_every_stock_template_gets_a_tokenizer_that_ends_its_turns(tmp_path, name):
    (tmp_path / "stock.jinja").write_text(stock_templates()[name], encoding="utf-8")
    train_bpe(TEXTS, tmp_path / "made", vocab_size=300, chat_template=str(tmp_path / "stock.jinja"))
    made = ChatTokenizer(TokenizerConfig(name=str(tmp_path / "made")))
    (sequence,) = made.encode([chat(("user", "Hi"), ("assistant", "Hello"))])
    assert "Hello" in trained_text(made, sequence)
    assert json.loads(made.mask_facts()["end_tokens"]) != []
