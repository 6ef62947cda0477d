"""Conversations rendered with the chat template of a tokenizer."""

import pytest

from components.data.chat import check_tools_written, render_conversation
from components.data.text import render_prompt
from plugins.demo.tiny_model import character_tokenizer
from tests.components.helpers.word_tokenizers import word_tokenizer
from tests.messages import says

TURNS = (
    "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def test_a_rendered_conversation_has_its_responses_and_no_generation_prompt() -> None:
    asking = TURNS + "{% if add_generation_prompt %}?{% endif %}"
    tokenizer = word_tokenizer(template=asking)
    turns = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]
    assert render_conversation(turns, tokenizer) == "no yes </s>"
    assert render_prompt(turns, tokenizer) == "no yes </s>?"
    assert turns == [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]
    tokenizer.chat_template = "{{ raise_exception('no assistant') }}"
    with pytest.raises(ValueError, match="no assistant"):
        render_conversation(turns, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="apply_chat_template"):
        render_conversation(turns, tokenizer)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[a][]"),
        ("{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}", "[a][]"),
        ("{% for m in messages %}[{{ 'call' if m.content is none else m.content }}]{% endfor %}", "[a][call]"),
    ],
)
def test_a_null_content_beside_tool_calls_is_not_written_as_none(template: str, text: str) -> None:
    tokenizer = character_tokenizer("ab")
    tokenizer.chat_template = template
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert render_conversation([{"role": "user", "content": "a"}, call], tokenizer) == text


def test_tools_that_the_template_does_not_write_are_refused() -> None:
    turns = [{"role": "user", "content": "no"}]
    tools = [{"type": "function", "function": {"name": "yes"}}]
    tokenizer = word_tokenizer(template=TURNS)
    with pytest.raises(ValueError, match=says("tools", "'yes'", "model.chat_template")):
        check_tools_written(turns, tools, tokenizer)
    tokenizer.chat_template = TURNS + "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}"
    check_tools_written(turns, tools, tokenizer)
