"""Messages of a row with its system prompt and its tools."""

import pytest

from plugins.chat_prompts.prompts import complete_messages
from tests.components.helpers.word_tokenizers import word_tokenizer
from tests.messages import says

TOOLS = [{"type": "function", "function": {"name": "add"}}]
USER = {"role": "user", "content": "no"}
SYSTEM = {"role": "system", "content": "yes"}


def test_the_system_prompt_of_a_row_comes_first_and_once() -> None:
    tokenizer = word_tokenizer()
    assert complete_messages("no", None, (), tokenizer) == [USER]
    assert complete_messages("no", "yes", (), tokenizer) == [SYSTEM, USER]
    assert complete_messages([SYSTEM, USER], "yes", (), tokenizer) == [SYSTEM, USER]
    with pytest.raises(ValueError, match=says("'other'", "'yes'", "data.ignored_columns")):
        complete_messages([SYSTEM, USER], "other", (), tokenizer)


def test_tools_that_the_template_does_not_write_are_refused() -> None:
    deaf = word_tokenizer(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match=says("'add'", "data.ignored_columns=tools")):
        complete_messages("no", None, TOOLS, deaf)
    writes = word_tokenizer(template="{% if tools %}{{ tools[0].function.name }}{% endif %}{{ messages[0].content }}")
    assert complete_messages("no", None, TOOLS, writes) == [USER]
