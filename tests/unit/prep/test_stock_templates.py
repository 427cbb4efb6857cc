"""Published chat templates, those of the `trl` package: prepared as they write, trained as their twins mark.

Every shape of conversation that a template writes in full is prepared with the default rule; what it leaves out is
refused by name.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from harness.prep.chat import BadReason, BadRecord, Conversation, RecordReader, parse_record
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig
from harness.prep.tokenize.stock import stock_rule
from tests.samples.stock_templates import SHAPES, stock_templates, tokenizer_for, training_twin

TEMPLATES = stock_templates()
# What a template may leave out, or refuse, without an error of ours.
LEFT_OUT = {BadReason.NOT_WRITTEN, BadReason.TEMPLATE_FAILED}
# Marked by their makers, or never trained by TRL.
WITHOUT_TWIN = {"llama3_1", "llama3_2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"} | {
    f"gemma4{revision}" for revision in ("", "_v2", "_v3", "_v4", "_v5")
}

# Of their template nothing follows the last answer: the token is added, as the twin does.
WITHOUT_END = {"glm4moe"}
# Ends of answers inside a conversation.
OTHER_ENDS = {"gptoss": ["<|end|>"]}
# Its twin trains no end of a call, which is this token, as for Gemma 4.
MORE_THAN_TWIN = {"diffusion_gemma": ["<|tool_response>"]}
# Its prompt opens reasoning that neither its turns nor its twin have: trained turns close it, as they are served.
EMPTY_REASONING = {"deepseek_r1_distill": "<think>\n\n</think>\n\n"}


@dataclass
class Stock:
    """A template with its tokenizers: ours, and that of transformers with the template and with TRL's twin of it."""

    name: str
    ours: ChatTokenizer
    hf: Any
    twin: Any

    @cached_property
    def made(self) -> dict[str, Any]:
        """Sequences of each shape, or the bad record."""
        chats = {shape: conversation_of(shape) for shape in SHAPES}
        return dict(zip(chats, self.ours.encode_each(list(chats.values())), strict=True))


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    from transformers import AutoTokenizer

    name = request.param
    folder = tokenizer_for(TEMPLATES[name], tmp_path_factory.mktemp("tokenizer"))
    twin = training_twin(name)
    if twin is not None:
        twin_folder = folder.with_name(folder.name + "-twin")
        shutil.copytree(folder, twin_folder)
        settings = json.loads((twin_folder / "tokenizer_config.json").read_text())
        (twin_folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": twin}))
    return Stock(
        name,
        ChatTokenizer(TokenizerConfig(kind="huggingface", name=str(folder))),
        AutoTokenizer.from_pretrained(folder),
        AutoTokenizer.from_pretrained(twin_folder) if twin is not None else None,
    )


def conversation_of(shape: str) -> Conversation:
    messages, tools = SHAPES[shape]
    conversation = parse_record({"messages": messages} | ({"tools": tools} if tools else {}), f"{shape}, line 1")
    assert isinstance(conversation, Conversation), conversation
    return conversation


def rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | None:
    """Return what transformers writes; None if the template refuses it."""
    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False))
    except Exception:
        return None


def texts_of(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[str]:
    """Return every text that a faithful rendering holds, of the last turn also its reasoning."""
    texts = [tool["function"]["name"] for tool in tools]
    for message in messages:
        content = message["content"]
        parts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
        for text in parts:
            texts += [piece.strip() for piece in text.replace("<think>", "</think>").split("</think>")]
        texts += [call["function"]["name"] for call in message.get("tool_calls", [])]
    return [text for text in [*texts, messages[-1].get("reasoning_content", "")] if text]


def is_misspelled(text: str) -> bool:
    """Return whether a template has written JSON text as a JSON string of that text, or a list as Python spells it."""
    return '\\"' in text or "{'type'" in text


def texts_written(text: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bool:
    return all(piece in text for piece in texts_of(messages, tools))


def test_every_shape_that_a_template_writes_is_prepared_as_it_writes_it(stock: Stock) -> None:
    prepared = 0
    for shape, (messages, tools) in SHAPES.items():
        expected = rendered(stock.hf, messages, tools)
        made = stock.made[shape]
        if isinstance(made, BadRecord):
            assert made.reason in LEFT_OUT, made
            # A later turn may hold the same words as what is left out: the reason names it.
            named = any(field in made.detail for field in ("reasoning", "tool call", "content"))
            assert named or expected is None or not texts_written(expected, messages, tools), made
            continue
        prepared += 1
        beginnings = {rendered(stock.hf, messages[:end], tools) for end in range(1, len(messages) + 1)}
        is_written = expected and not is_misspelled(expected) and texts_written(expected, messages, tools)
        for sequence in made:
            as_written = sequence.text.removesuffix("<|user|>").removesuffix("<|observation|>")
            text = as_written if stock.name in WITHOUT_END else sequence.text
            text = text.replace(EMPTY_REASONING.get(stock.name, "\0"), "")
            assert text in beginnings or not is_written, shape
            assert sequence.view.input_ids.tolist() == stock.hf(sequence.text, add_special_tokens=False).input_ids
    assert prepared >= 5


def test_exactly_the_turns_of_the_assistant_are_trained_once(stock: Stock) -> None:
    for shape, (messages, _) in SHAPES.items():
        made = stock.made[shape]
        if isinstance(made, BadRecord):
            continue
        trained = "\0".join(sequence.text[start:end] for sequence in made for start, end in sequence.spans)
        answers = [text_of(message) for message in messages if message["role"] == "assistant"]
        for answer in filter(None, answers):
            assert trained.count(answer) == sum(answer in other for other in answers), shape
        for message in messages:
            if message["role"] != "assistant":
                text = text_of(message)
                assert any(text in answer for answer in answers) or text not in trained, shape
            if message.get("reasoning_content"):
                assert trained.count(message["reasoning_content"]) == 1, shape
            for call in message.get("tool_calls", []):
                assert call["function"]["name"] in trained, shape


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a message without its reasoning."""
    content = message["content"] or ""
    text = "".join(part["text"] for part in content) if isinstance(content, list) else content
    return str(text.rpartition("</think>")[2].strip())


def test_every_trained_conversation_ends_on_a_trained_token_at_which_the_model_stops(stock: Stock) -> None:
    ends = {stock.ours.decode([token]) for token in stock.ours.ends} | set(OTHER_ENDS.get(stock.name, ()))
    for shape, (messages, _) in SHAPES.items():
        made = stock.made[shape]
        for sequence in [] if isinstance(made, BadRecord) else made:
            trained = np.flatnonzero(sequence.view.loss_mask) + 1
            texts = [stock.ours.decode([token]) for token in sequence.view.input_ids[trained].tolist()]
            # LFM2.5 marks the line break after it, too.
            last = next(text for text in reversed(texts) if text.strip())
            assert last in ends, (shape, sequence.text[-80:])
            if messages[-1]["role"] == "assistant" and stock.name not in WITHOUT_END:
                assert last in sequence.text[-40:], shape


# Their makers refuse turns that do not alternate.
ALTERNATING = {"cohere", "cohere2", "gemma", "gemma3"}
# They take no texts but parts.
OF_PARTS = {"idefics3", "llava_next", "smolvlm"}


def test_answers_in_a_row_are_trained_as_they_are_served(stock: Stock) -> None:
    texts = ("Hello, friend.", "How are you?", "Very well.")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi there"}]
    messages += [{"role": "assistant", "content": text} for text in texts]
    if stock.name in OF_PARTS:
        messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    conversation = parse_record({"messages": messages}, "line 1")
    assert isinstance(conversation, Conversation)
    (made,) = stock.ours.encode_each([conversation])
    if stock.name in ALTERNATING:
        assert isinstance(made, BadRecord)
        assert "must alternate" in made.detail
        return
    assert not isinstance(made, BadRecord), made
    trained = "\0".join(sequence.text[start:end] for sequence in made for start, end in sequence.spans)
    assert [trained.count(text) for text in texts] == [1, 1, 1]
    for sequence in made:
        turn = max(number for number in range(1, 4) if texts[number - 1] in sequence.text)
        prompt = stock.hf.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        whole = stock.hf.apply_chat_template(messages[: turn + 1], tokenize=False)
        # DeepSeek's and others' prompts open a reasoning that a turn without it does not have.
        assert sequence.text == whole or sequence.text.startswith(prompt), stock.name


def test_trained_tokens_are_those_of_the_training_twin(stock: Stock) -> None:
    if stock.twin is None or stock.name in EMPTY_REASONING:
        assert stock.name in WITHOUT_TWIN | set(EMPTY_REASONING)
        return
    compared = 0
    for shape, (messages, tools) in SHAPES.items():
        made = stock.made[shape]
        # Several sequences: earlier turns are trained as they are served, where the twin trains what is left of them.
        if isinstance(made, BadRecord) or len(made) > 1 or made[0].text != rendered(stock.twin, messages, tools):
            continue
        compared += 1
        marked = stock.twin.apply_chat_template(
            messages, tools=tools or None, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = made[0].view.input_ids
        assert ids.tolist() == marked["input_ids"]
        ours = np.concatenate([[0], made[0].view.loss_mask[:-1]])
        theirs = np.array(marked["assistant_masks"])
        # The line break after the end of a turn is not trained here.
        differing = [stock.ours.decode([token]) for token in ids[ours != theirs].tolist()]
        more = [stock.ours.decode([token]) for token in ids[ours > theirs].tolist()]
        assert set(more) <= set(MORE_THAN_TWIN.get(stock.name, ())), shape
        assert all(not text.strip() or text in more for text in differing), (shape, differing)
    assert compared


def test_the_parameters_of_tools_are_written_or_the_record_is_refused(stock: Stock) -> None:
    calls = json.dumps([{"name": "get_weather", "arguments": {"city": "Paris"}}])
    given = {"city": {"type": "str", "description": "where"}, "zone": {"type": "str, optional", "default": "UTC"}}
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "zone": {"type": "string"}}}
    for tool in ({"parameters": given}, {"input_schema": schema}):
        tools = [{"name": "get_weather", "description": "d", **tool}]
        record = parse_record({"query": "How warm is it?", "tools": tools, "answers": calls}, "line 1")
        assert isinstance(record, Conversation)
        (made,) = stock.ours.encode_each([record])
        if isinstance(made, BadRecord):
            assert made.reason in LEFT_OUT, made
        else:
            assert all(re.search(r"\bzone\b", sequence.text) for sequence in made)


def test_every_published_template_is_known_and_a_changed_one_is_not() -> None:
    assert [name for name, text in TEMPLATES.items() if stock_rule(text) is None] == []
    assert stock_rule(TEMPLATES["qwen3"] + " {{ '' }}") is None


# Of every template: without reasoning, with it in all turns, in the first or the last one only, and with tools.
FOLLOWED = {
    "two_turns": SHAPES["two_turns"],
    "reasoning_two_turns": SHAPES["reasoning_two_turns"],
    "reasoning_in_the_first_turn": SHAPES["reasoning_in_the_first_turn"],
    "reasoning_in_the_last_turn": ([*SHAPES["one_turn"][0], *SHAPES["reasoning"][0]], []),
    "tool_result_two_turns": SHAPES["tool_result_two_turns"],
    "reasoning_and_tools_two_turns": SHAPES["reasoning_and_tools_two_turns"],
}
# Contents that a template does not write, whatever is left out: another template is then the only advice.
NO_TEXTS, NO_TOOLS = (
    {"idefics3", "smolvlm"},
    {*OF_PARTS, "deepseek_r1_distill", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl"},
)


@pytest.mark.parametrize("shape", FOLLOWED)
def test_the_advice_of_a_refusal_leads_to_a_chat_that_is_prepared(stock: Stock, shape: str) -> None:
    messages, tools = FOLLOWED[shape]
    record = {"messages": messages} | ({"tools": tools} if tools else {})
    ignored: list[str] = []
    while True:
        conversation = RecordReader(ignore_fields=ignored).parse(record, "line 1")
        (made,) = stock.ours.encode_each([conversation]) if isinstance(conversation, Conversation) else (conversation,)
        if not isinstance(made, BadRecord):
            return
        advice = re.search(r"source\.ignore_fields=\[([\w,]+)\]", made.detail)
        if advice is None:
            break
        # Advice that was followed already would lead in a circle.
        assert not set(advice.group(1).split(",")) & set(ignored), made
        ignored += advice.group(1).split(",")
    assert "tokenizer.chat_template" in made.detail or made.reason == BadReason.TEMPLATE_FAILED, made
    assert stock.name in ALTERNATING | NO_TOOLS if tools else stock.name in NO_TEXTS, made


def test_kept_history_trains_the_same_texts_in_one_sequence(stock: Stock) -> None:
    kept = ChatTokenizer(TokenizerConfig(kind="huggingface", name=stock.ours.name, history="kept"))
    compared = 0
    for shape in SHAPES:
        served = stock.made[shape]
        (made,) = kept.encode_each([conversation_of(shape)])
        if isinstance(served, BadRecord) or isinstance(made, BadRecord):
            # What cannot be served cannot be kept; a turn whose end is not found in a longer text can only be served.
            assert isinstance(made, BadRecord), (shape, made)
            assert isinstance(served, BadRecord) or "tokenizer.history=as_served" in made.detail, (shape, made)
            continue
        assert len(made) == 1, shape
        compared += 1
        texts, expected = ([one.text[slice(*span)] for one in ones for span in one.spans] for ones in (made, served))
        assert [text.strip() for text in texts] == [text.strip() for text in expected], shape
    assert compared > 2
