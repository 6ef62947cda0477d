"""Rendering of messages to tokens, which are appended to unchanged tokens."""

from __future__ import annotations

import pytest

from agents.rendering import feedback_tokens, first_tokens, refuse_mixed
from components.data.text import TextEncoder
from plugins.demo.tiny_model import CHAT_TEMPLATE, EOS, character_tokenizer, learnt_tokenizer
from tests.agents.episode_cases import TEMPLATE, TEXTS
from tests.messages import says

FEEDBACK = [{"role": "user", "content": "Higher."}]
REASONING_STRIPPED = (
    "{% for message in messages %}[{{ message['role'] }}]"
    "{{ message['content'].split('</think>')[-1] }}"
    "{% if message['role'] == 'assistant' and loop.last %}<think>none</think>{% endif %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
UNCLOSED = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
LATE_CLOSED = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{{ eos_token }}{% endfor %}"
)


def encoder_of(template: str) -> TextEncoder:
    tokenizer = learnt_tokenizer(TEXTS * 4, 300)
    tokenizer.chat_template = template
    return TextEncoder(tokenizer)


def end_of(encoder: TextEncoder) -> int:
    end = encoder.tokenizer.eos_token_id
    assert isinstance(end, int)
    return end


@pytest.mark.parametrize("template", [TEMPLATE, REASONING_STRIPPED])
def test_only_new_messages_are_rendered_up_to_the_start_of_the_next_turn(template: str) -> None:
    encoder = encoder_of(template)
    tokens = feedback_tokens(encoder, FEEDBACK, [7, 8, end_of(encoder)])
    assert encoder.tokenizer.decode(tokens) == f"\n[user]Higher.{EOS}\n[assistant]"


def test_a_truncated_turn_is_closed_with_the_templates_end() -> None:
    encoder = encoder_of(TEMPLATE)
    tokens = feedback_tokens(encoder, FEEDBACK, [7, 8])
    assert tokens[0] == end_of(encoder)
    assert encoder.tokenizer.decode(tokens) == f"{EOS}\n[user]Higher.{EOS}\n[assistant]"


def test_text_between_a_turn_and_its_end_token_is_not_repeated_after_it() -> None:
    encoder = encoder_of(LATE_CLOSED)
    assert encoder.tokenizer.decode(feedback_tokens(encoder, FEEDBACK, [7, end_of(encoder)])) == f"[user]Higher.\n{EOS}"
    assert encoder.tokenizer.decode(feedback_tokens(encoder, FEEDBACK, [7])) == f"\n{EOS}[user]Higher.\n{EOS}"


def test_a_template_without_end_tokens_loses_nothing() -> None:
    encoder = encoder_of(UNCLOSED)
    tokens = feedback_tokens(encoder, FEEDBACK, [7, end_of(encoder)])
    assert encoder.tokenizer.decode(tokens) == "\nuser: Higher.\nassistant:"


def test_the_template_of_the_tiny_models_adds_nothing_to_the_message() -> None:
    encoder = TextEncoder(character_tokenizer("0123456789<>"))
    assert encoder.tokenizer.chat_template == CHAT_TEMPLATE
    end = end_of(encoder)
    message = [{"role": "user", "content": "<"}]
    assert feedback_tokens(encoder, message, [5, end]) == encoder.encode("<")
    assert feedback_tokens(encoder, message, [5]) == [end, *encoder.encode("<")]


def test_another_end_token_replaces_that_of_the_template() -> None:
    encoder = encoder_of(TEMPLATE)
    other = encoder.tokenizer.bos_token_id
    assert isinstance(other, int) and other != end_of(encoder)
    assert (
        encoder.tokenizer.decode(feedback_tokens(encoder, FEEDBACK, [7, other])) == f"\n[user]Higher.{EOS}\n[assistant]"
    )
    # A template without end marks. Each message begins with a special token.
    opens = encoder_of(
        "{% for message in messages %}{{ bos_token if message['role'] == 'user' else '' }}{{ message['content'] }}"
        "{% endfor %}{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
    )
    assert feedback_tokens(opens, FEEDBACK, [7, end_of(opens)])[0] == other


def test_a_prompt_that_was_already_rendered_is_rejected() -> None:
    encoder = encoder_of(TEMPLATE)
    rendered = f"[user]Higher.{EOS}\n[assistant]"
    with pytest.raises(ValueError, match=says("'<eos>'", "data.apply_chat_template=false")):
        first_tokens(encoder, [{"role": "user", "content": f"Play. {rendered}"}], f"{rendered}\n")
    # The environment's own text stays unchanged.
    assert first_tokens(encoder, [{"role": "user", "content": EOS}], "Higher.")
    assert first_tokens(encoder, rendered) == encoder.encode_prompt(rendered)


def test_several_messages_of_other_roles_are_rendered_together() -> None:
    encoder = encoder_of(TEMPLATE)
    messages = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    text = encoder.tokenizer.decode(feedback_tokens(encoder, messages, [end_of(encoder)]))
    assert text == f"\n[tool]4{EOS}\n[tool]5{EOS}\n[assistant]"


def test_text_is_encoded_unchanged() -> None:
    encoder = encoder_of(TEMPLATE)
    assert feedback_tokens(encoder, "Higher.", [7]) == encoder.encode("Higher.")
    assert feedback_tokens(encoder, "", [7]) == []


def test_messages_at_the_beginning_are_rendered_with_the_template() -> None:
    encoder = encoder_of(TEMPLATE)
    assert encoder.tokenizer.decode(first_tokens(encoder, FEEDBACK)) == f"[user]Higher.{EOS}\n[assistant]"
    assert first_tokens(encoder, "Higher.") == encoder.encode_prompt("Higher.")


def test_text_that_cannot_be_encoded_raises_an_error() -> None:
    letters = TextEncoder(character_tokenizer("abc"))
    with pytest.raises(ValueError, match=says("'x'", "'abx'")):
        feedback_tokens(letters, "abx", [3])
    with pytest.raises(ValueError, match="observation"):
        first_tokens(letters, "")
    with pytest.raises(ValueError, match="template"):
        feedback_tokens(encoder_of("{{ messages[-1]['content'] }}"), FEEDBACK, [7])
    letters.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="template"):
        feedback_tokens(letters, [{"role": "user", "content": "a"}], [3])


def test_only_messages_after_an_opening_in_plain_text_are_rejected() -> None:
    encoder = encoder_of(TEMPLATE)
    plain = encoder.encode("Higher or lower?")
    chat = first_tokens(encoder, [{"role": "user", "content": "Go."}])
    said = feedback_tokens(encoder, FEEDBACK, chat)
    with pytest.raises(ValueError, match=says("plain text", "messages", "reset", "data.apply_chat_template=true")):
        refuse_mixed(encoder, plain, FEEDBACK, said)
    refuse_mixed(encoder, chat, FEEDBACK, said)
    refuse_mixed(encoder, plain, "Higher.<eos>", encoder.encode("Higher.<eos>"))
    # A template whose marks are plain words, so turns cannot be distinguished.
    refuse_mixed(encoder, chat, "7", encoder.encode("7"))
    # A template whose marks are words: nobody can tell.
    words = encoder_of(UNCLOSED)
    refuse_mixed(words, plain, FEEDBACK, feedback_tokens(words, FEEDBACK, plain))
