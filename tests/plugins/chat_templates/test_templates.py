"""Variables that are set in a chat template."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from components.data.text import load_tokenizer, render_prompt
from plugins.chat_templates.templates import set_template_arguments
from tests.components.helpers.word_tokenizers import word_tokenizer
from tests.messages import says


def test_arguments_of_a_template_apply_to_every_use_of_it(tmp_path: Path) -> None:
    template = "{% if thinks is defined and thinks is false %}no {% endif %}{{ messages[0]['content'] }}{{ last }}"
    folder = tmp_path / "plain"
    word_tokenizer("<s> $A").save_pretrained(folder)
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder, pad_token="</s>", chat_template=template)
    assert render_prompt("yes", tokenizer, apply_chat_template=True) == "yes"
    set_template_arguments(tokenizer, {"thinks": False, "last": "</s>"})
    assert render_prompt("yes", tokenizer, apply_chat_template=True) == "no yes</s>"
    # A saved policy with a padding token and a template is loaded with them, and they are set once.
    tokenizer.save_pretrained(tmp_path)
    again = set_template_arguments(load_tokenizer(tmp_path), {"thinks": False, "last": "</s>"})
    assert again.chat_template == tokenizer.chat_template
    with pytest.raises(ValueError, match=says("model.template_arguments", "enable_thinking")):
        set_template_arguments(tokenizer, {"enable_thinking": False})
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=says("model.template_arguments", "chat template")):
        set_template_arguments(tokenizer, {"thinks": False})
