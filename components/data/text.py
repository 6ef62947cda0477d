"""Where text meets token ids: loading a tokenizer, writing out prompts, encoding them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.data.messages import ASSISTANT, as_messages
from components.data.model_tokens import check_ids, check_template, end_ids, limit_rows
from components.data.tokenizer_trial import try_tokenizer
from components.net.hub import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    path: str | Path,
    *,
    chat_template: str | None = None,
    pad_token: str | None = None,
    pad_with_end: bool = False,
    model_path: str | Path | None = None,
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer and check that it can be trained with: it has an end token and one for padding.

    Tokens that the model has no embedding for are an error wherever a text is encoded with them, see `TextEncoder`.

    Args:
        path: a folder or a name on the hub, as `from_pretrained` takes it.
        chat_template: Jinja text, or a file that holds it; None keeps the tokenizer's own.
        pad_token: a token of the vocabulary; None keeps the tokenizer's own. None is ever added, as the model would
            have no embedding for it.
        pad_with_end: where there is none for padding, the end token is that too; otherwise it is an error.
        model_path: the model that reads its tokens. Default: the one at `path`.

    Raises:
        ValueError: there is none, or it cannot be trained with; the message says what to set.
    """
    template = None if chat_template is None else _template_text(chat_template)
    try_tokenizer(path, template)
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the loaders of a hundred model families raise what they like
        raise ValueError(
            f"no tokenizer can be loaded from {str(path)!r} ({first_line(error)}); give a folder or a name on the hub "
            "that has a tokenizer"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {str(path)!r} has no end token (eos), so no response would ever end; set eos_token in "
            "its tokenizer_config.json"
        )
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ValueError(
                f"pad_token={pad_token!r} is no token of {str(path)!r}, and the model has no embedding for a new one; "
                f"set it to one of its tokens, such as pad_token={tokenizer.eos_token!r}"
            )
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None and pad_with_end:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"the tokenizer of {str(path)!r} has no token for padding; set pad_token to one of its tokens, such as "
            f"pad_token={tokenizer.eos_token!r}"
        )
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    limit_rows(tokenizer, model_path or path)
    return tokenizer


def set_template_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Set variables of the chat template at its beginning, so that they hold wherever the template is used.

    Raises:
        ValueError: there is no template, or it reads no such variable.
    """
    template = tokenizer.chat_template
    if not arguments:
        return tokenizer
    if not isinstance(template, str):
        raise ValueError("model.template_arguments are of a chat template, and the tokenizer has none; leave them out")
    if unread := [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", template)]:
        raise ValueError(f"model.template_arguments has {', '.join(unread)}, which the chat template does not read")
    # Jinja reads JSON's true and false, and has another word for null.
    texts = {name: "none" if value is None else json.dumps(value) for name, value in arguments.items()}
    lines = "".join(f"{{%- set {name} = {text} -%}}" for name, text in texts.items())
    if not template.startswith(lines):  # as the template that such a run has saved does
        tokenizer.chat_template = lines + template
    return tokenizer


def same_vocabulary(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Tell whether ids of one tokenizer mean the same tokens to the other."""
    return a.get_vocab() == b.get_vocab()


class TextEncoder:
    """Turns text into token ids.

    It refuses characters that a character tokenizer would silently lose, and tokens that the model of a tokenizer from
    `load_tokenizer` has no embedding for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._alphabet = _alphabet(tokenizer)
        # A slow property, and this class is called once per text.
        self._special_tokens = list(tokenizer.all_special_tokens)
        self._bos = [] if tokenizer.bos_token_id is None else [cast(int, tokenizer.bos_token_id)]
        self._adds_bos = self._find_adds_bos()

    @cached_property
    def end_ids(self) -> list[int]:
        """Tokens that end a response: the tokenizer's end token first, see `end_ids` of model_tokens.py."""
        return end_ids(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Give the ids of `text`, nothing added; special tokens written in the text count as such."""
        self._check_alphabet(text)
        ids = self._tokenize([text])[0]
        check_ids(ids, self.tokenizer, f"the text {text!r:.200}")
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Give the ids of a text that begins a sequence: with one BOS if this tokenizer uses one, and no end token.

        Whether the text or its template writes the BOS, or the tokenizer adds it by itself, there is exactly one.
        """
        return self._with_bos(text, self._tokenize([text])[0])

    def encode_prompts(self, texts: Sequence[str], rows: Sequence[int]) -> list[list[int]]:
        """Give `encode_prompt` of each text, at less cost than one by one; errors name the row."""
        prompts: list[list[int]] = []
        for text, row, ids in zip(texts, rows, self._tokenize(texts)):
            try:
                prompts.append(self._with_bos(text, ids))
            except ValueError as error:
                raise ValueError(f"row {row}: {error}") from error
        return prompts

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        return cast("list[list[int]]", encoded["input_ids"])

    def _with_bos(self, text: str, ids: list[int]) -> list[int]:
        self._check_alphabet(text)
        check_ids(ids, self.tokenizer, f"the text {text!r:.200}")
        if self._bos and ids[:2] == self._bos * 2:
            raise ValueError(
                f"the prompt {text!r:.200} begins with two {self.tokenizer.bos_token!r}, written by its text or by its "
                "template (the tokenizer adds none where there is one); take one of them out"
            )
        return self._bos + ids if self._adds_bos and ids[:1] != self._bos else ids

    def _check_alphabet(self, text: str) -> None:
        if self._alphabet is None:
            return
        plain = text
        for token in self._special_tokens:
            plain = plain.replace(token, "")
        lost = "".join(sorted(set(plain) - self._alphabet))
        if lost:
            raise ValueError(
                f"the tokenizer has no token for the characters {lost!r} of {text!r}; it knows "
                f"{''.join(sorted(self._alphabet))!r}: use a model that was made for this data"
            )

    def _find_adds_bos(self) -> bool:
        """Tell whether this tokenizer puts a BOS in front of text by itself; its settings do not say it reliably."""
        word = max(self._alphabet) if self._alphabet else "a"
        with_special, plain = (self.tokenizer(word, add_special_tokens=add)["input_ids"] for add in (True, False))
        return with_special[:1] == self._bos != plain[:1]


def render_prompt(
    prompt: str | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    apply_chat_template: bool = False,
    input_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
) -> str:
    """Write out the text that the policy reads.

    Args:
        prompt: a string, or chat messages (these always go through the chat template).
        tokenizer: the owner of the chat template.
        apply_chat_template: treat a string as a user's turn and end with the start of the assistant's.
        input_template: text with one `{}` for a string prompt; not together with the chat template.
        tools: definitions of tools for the chat template, as JSON schemas of functions.
        continue_final_message: where the last message is the assistant's, end with its text, which the policy
            continues (a prefill); otherwise a new turn of the assistant is begun.
    """
    if apply_chat_template or not isinstance(prompt, str):
        if input_template is not None:
            raise ValueError("input_template and the chat template exclude each other; unset one of them")
        messages = as_messages(prompt)
        if continue_final_message and messages[-1]["role"] == ASSISTANT:
            return _templated(messages, tokenizer, tools=tools, continue_final_message=True)
        return _templated(messages, tokenizer, tools=tools, add_generation_prompt=True)
    # Not str.format: prompts of code and maths are full of braces of their own.
    return prompt if input_template is None else input_template.replace("{}", prompt, 1)


def render_conversation(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Write out chat messages, the responses of the assistant included, by the chat template."""
    return _templated(as_messages(messages), tokenizer, tools=tools)


def check_tools_written(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that the chat template writes the definitions of tools that come with messages.

    Raises:
        ValueError: it leaves them out.
    """
    if tools and render_conversation(messages, tokenizer, tools) == render_conversation(messages, tokenizer):
        raise ValueError(
            f"the row has definitions of tools ({tools[0]!r:.80}), which the chat template does not write; set "
            "model.chat_template to one that does, or data.ignored_columns=tools to train without them"
        )


def _templated(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    schemas = [dict(tool) for tool in tools] if tools else None
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template; set apply_chat_template=False and give prompts as strings"
        )
    try:
        text = _filled(messages, tokenizer, {"tools": schemas, **options})
    except Exception as error:  # a template is a program and can raise anything
        raise ValueError(
            f"the chat template refuses the messages {messages!r:.200} ({first_line(error)}); mend the one or the other"
        ) from error
    assert isinstance(text, str)
    check_template(tokenizer)
    return text


def _filled(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> Any:
    """Fill in the chat template. A content that is null, beside tool calls, is not written as the word None."""
    if all(message.get("content") is not None for message in messages):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    empty = [{**message, "content": message.get("content") or ""} for message in messages]
    with_empty = tokenizer.apply_chat_template(empty, tokenize=False, **options)
    try:
        # The form that OpenAI's API has; some templates test for it.
        with_null = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except TypeError:  # a template that joins contents to other text
        return with_empty
    return with_empty if str(with_null).count("None") > str(with_empty).count("None") else with_null


def pad_apart_from_end(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """See that the token for padding is not the end token, with which a sequence may rightly end.

    transformers' classifiers find the end of a row by its last token that is no padding. The place is taken by a
    special token that is there for something else, or else by the last piece with a sign for the blank before it: as a
    special token it is looked for in texts as it is written, with that sign, and no text has that.

    Returns:
        The token that was chosen; None where the tokenizer's own will do.

    Raises:
        ValueError: there is no such token.
    """
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return None
    spare = [token for token in tokenizer.all_special_tokens if token != tokenizer.eos_token]
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda piece: -piece[1])
    spare += [piece for piece, _ in pieces if len(piece) > 1 and piece[0] in "Ġ▁"][:1]
    if not spare:
        raise ValueError("the tokenizer has no token for padding but its end token; set another in its pad_token")
    tokenizer.pad_token = spare[0]
    return spare[0]


def read_template(chat_template: str) -> str:
    """Return the Jinja text of a chat template, given as such or as the name of a file.

    Raises:
        ValueError: it is neither, or no valid Jinja.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    chat_template = _template_text(chat_template)
    try:
        # Of no conversation at all: it is compiled, with the tags that chat templates have of their own, and not run.
        render_jinja_template([], chat_template=chat_template)
    except TemplateSyntaxError as error:
        raise ValueError(f"chat_template is no valid Jinja: line {error.lineno}: {error.message}; mend it") from error
    return chat_template


def _template_text(chat_template: str) -> str:
    # Jinja without a tag would be the same prompt for everybody: it is the name of a file.
    if not any(tag in chat_template for tag in ("{{", "{%")):
        file = Path(chat_template).expanduser()
        try:
            chat_template = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"chat_template={chat_template!r} is neither Jinja text nor a file that can be read "
                f"({first_line(error)}); set it to one of them"
            ) from error
    return chat_template


def _alphabet(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Find the characters of a tokenizer whose every token is one character; None for any other."""
    largest_character_vocabulary = 256
    if len(tokenizer) > largest_character_vocabulary:
        return None
    special = set(tokenizer.all_special_ids)
    characters = [str(tokenizer.decode([index])) for index in range(len(tokenizer)) if index not in special]
    return frozenset(characters) if all(len(character) == 1 for character in characters) else None
