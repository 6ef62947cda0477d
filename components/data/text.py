"""Where text meets token ids: loading a tokenizer, writing out prompts, encoding them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.hub import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    path: str | Path, *, chat_template: str | None = None, pad_token: str | None = None, pad_with_end: bool = False
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer and see that it can be trained with: it has an end token and one for padding.

    Args:
        path: a folder or a name on the hub, as `from_pretrained` takes it.
        chat_template: Jinja text, or a file that holds it; None keeps the tokenizer's own.
        pad_token: a token of the vocabulary; None keeps the tokenizer's own. None is ever added, as the model would
            have no embedding for it.
        pad_with_end: where there is none for padding, the end token is that too; otherwise it is an error.
    """
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
        tokenizer.chat_template = _read_template(chat_template)
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
    """Turns text into token ids, and refuses characters that a character tokenizer would silently lose."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._alphabet = _alphabet(tokenizer)
        # A slow property, and this class is called once per text.
        self._special_tokens = list(tokenizer.all_special_tokens)
        self._bos = [] if tokenizer.bos_token_id is None else [cast(int, tokenizer.bos_token_id)]
        self._adds_bos = self._find_adds_bos()

    def encode(self, text: str) -> list[int]:
        """Give the ids of `text`, nothing added; special tokens written in the text count as such."""
        self._check_alphabet(text)
        return self._tokenize([text])[0]

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


def are_messages(value: object) -> bool:
    """Whether it is a list of chat messages, each with `role` and `content`."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in value)


def as_messages(prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Wrap a string as one user turn; chat messages stay as they are."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def render_prompt(
    prompt: str | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    apply_chat_template: bool = False,
    input_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Write out the text that the policy reads.

    Args:
        prompt: a string, or chat messages (these always go through the chat template).
        tokenizer: the owner of the chat template.
        apply_chat_template: treat a string as a user's turn and end with the start of the assistant's.
        input_template: text with one `{}` for a string prompt; not together with the chat template.
        tools: what the chat template is told of tools, as JSON schemas of functions.
    """
    if apply_chat_template or not isinstance(prompt, str):
        if input_template is not None:
            raise ValueError("input_template and the chat template exclude each other; unset one of them")
        schemas = None if not tools else [dict(tool) for tool in tools]
        return _templated(as_messages(prompt), tokenizer, tools=schemas, add_generation_prompt=True)
    # Not str.format: prompts of code and maths are full of braces of their own.
    return prompt if input_template is None else input_template.replace("{}", prompt, 1)


def render_conversation(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> str:
    """Write out chat messages, the responses of the assistant included, by the chat template."""
    return _templated([dict(message) for message in messages], tokenizer)


def _templated(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template; set apply_chat_template=False and give prompts as strings"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template is a program and can raise anything
        raise ValueError(
            f"the chat template refuses the messages {messages!r:.200} ({first_line(error)}); mend the one or the other"
        ) from error
    assert isinstance(text, str)
    return text


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


def _read_template(chat_template: str) -> str:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

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
    try:
        # Of no conversation at all: it is compiled, with the tags that chat templates have of their own, and not run.
        render_jinja_template([], chat_template=chat_template)
    except TemplateSyntaxError as error:
        raise ValueError(f"chat_template is no valid Jinja: line {error.lineno}: {error.message}; mend it") from error
    return chat_template


def _alphabet(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Find the characters of a tokenizer whose every token is one character; None for any other."""
    largest_character_vocabulary = 256
    if len(tokenizer) > largest_character_vocabulary:
        return None
    special = set(tokenizer.all_special_ids)
    characters = [str(tokenizer.decode([index])) for index in range(len(tokenizer)) if index not in special]
    return frozenset(characters) if all(len(character) == 1 for character in characters) else None
