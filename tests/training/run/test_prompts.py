"""The warning about prompts that are read without the tokenizer's chat template."""

import re
from typing import Any

import pytest

from plugins.demo.tiny_model import character_tokenizer, learnt_tokenizer
from tests.messages import says
from training.options.data_options import DataOptions
from training.run.prompts import unused_template

CHAT = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("options", "prompt", "is_said"),
    [
        ({}, "2 + 2?", True),
        ({"apply_chat_template": True}, "2 + 2?", False),
        ({"input_template": "Q: {} A:"}, "2 + 2?", False),
        ({}, [{"role": "user", "content": "2 + 2?"}], False),  # messages always use it
    ],
)
def test_text_prompts_without_the_existing_chat_template_give_a_warning(
    options: dict[str, Any], prompt: Any, is_said: bool
) -> None:
    tokenizer = learnt_tokenizer(["2 + 2?"] * 4, 300)
    tokenizer.chat_template = CHAT
    data = DataOptions(path="rows.jsonl", **options)
    warning = unused_template(data, prompt, tokenizer)
    assert (warning is not None) == is_said
    if warning is not None:
        assert re.search(says("warning", "data.apply_chat_template=true"), warning)
    tokenizer.chat_template = None
    assert unused_template(data, prompt, tokenizer) is None


def test_a_template_that_rejects_the_prompt_gives_no_warning() -> None:
    tokenizer = learnt_tokenizer(["2 + 2?"] * 4, 300)
    tokenizer.chat_template = "{{ raise_exception('a system message has to come first') }}"
    assert unused_template(DataOptions(path="rows.jsonl"), "2 + 2?", tokenizer) is None


def test_a_template_without_effect_gives_no_warning() -> None:
    assert unused_template(DataOptions(path="task:sort"), "abc", character_tokenizer("abc")) is None
