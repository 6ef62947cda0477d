"""Loading of tokenizers, rendering of prompts and conversations, and encoding of text to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.data.messages import CHAT
from components.data.model_tokens import check_ids, end_ids, limit_rows
from components.net.hub import first_line
from components.registry import find, load

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
    """Load a model's tokenizer and check that it is suited for training: it has an end token and a padding token.

    Encoding a text with a token that the model has no embedding for raises an error, see `TextEncoder`.

    Args:
        path: folder or name on the hub, as for `from_pretrained`.
        chat_template: Jinja text, or the path to a file with it. None keeps the tokenizer's own template.
        pad_token: token of the vocabulary for padding. None keeps the tokenizer's own. A new token is never added,
            because the model would have no embedding for it.
        pad_with_end: use the end token for padding if the tokenizer has no padding token. False raises an error.
        model_path: model that reads the tokens. By default the model at `path`.

    Raises:
        ValueError: there is no tokenizer, or it is not suited for training. The message says what to set.
    """
    # Tried before it is loaded, because a bad tokenizer may hang this process or fill its memory.
    if (try_tokenizer := find("tokenizer trial", "child process")) is not None:
        try_tokenizer(path, None if chat_template is None else _template(chat_template, "text"))
    from transformers import AutoTokenizer  # imports torch, so not before the cheap checks

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the loaders of the model families may raise any exception
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
                f"pad_token={pad_token!r} is not a token of {str(path)!r}, and the model has no embedding for a new "
                f"one; set it to one of its tokens, such as pad_token={tokenizer.eos_token!r}"
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
        tokenizer.chat_template = _template(chat_template, "checked")
    limit_rows(tokenizer, model_path or path)
    return tokenizer


def _template(chat_template: str, form: str) -> str:
    """Return the Jinja text of a chat template or of the file that it names: its plain "text", or "checked"."""
    return load("chat template", form, "model.chat_template=...")(chat_template)


def same_vocabulary(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Return True if two tokenizers have the same token for every id."""
    return a.get_vocab() == b.get_vocab()


class TextEncoder:
    """Encoder of text to token ids.

    It raises an error for characters that a character tokenizer would silently drop, and for tokens without an
    embedding in the model, if the tokenizer is from `load_tokenizer`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._alphabet = _alphabet(tokenizer)
        # Cached, because the property is slow and is needed for every text.
        self._special_tokens = list(tokenizer.all_special_tokens)
        self._bos: list[int] = []
        if tokenizer.bos_token_id is not None:
            self._bos = [cast(int, tokenizer.bos_token_id)]
        self._adds_bos = self._find_adds_bos()

    @cached_property
    def end_ids(self) -> list[int]:
        """Ids of the tokens that end a response, with the tokenizer's end token first; see model_tokens.py."""
        return end_ids(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding tokens. Special tokens in the text are encoded as such.

        Raises:
            ValueError: a character has no token, or a token has no embedding in the model.
        """
        self._check_alphabet(text)
        ids = self._tokenize([text])[0]
        check_ids(ids, self.tokenizer, f"the text {text!r:.200}")
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text that begins a sequence, with one BOS token if this tokenizer uses one, and no end token.

        There is exactly one BOS token, whether the text contains it or the tokenizer adds it.

        Raises:
            ValueError: as in `encode`, or the text contains two BOS tokens.
        """
        return self._with_bos(text, self._tokenize([text])[0])

    def encode_prompts(self, texts: Sequence[str], rows: Sequence[int]) -> list[list[int]]:
        """Encode several texts as `encode_prompt` does, in one faster call. Errors name the row."""
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
                "template (the tokenizer adds none if there is one); remove one of them"
            )
        if self._adds_bos and ids[:1] != self._bos:
            return self._bos + ids
        return ids

    def _check_alphabet(self, text: str) -> None:
        if self._alphabet is None:
            return
        # Special tokens may be longer than one character, so they are removed before the comparison.
        plain = text
        for token in self._special_tokens:
            plain = plain.replace(token, "")
        unknown = "".join(sorted(set(plain) - self._alphabet))
        if unknown:
            raise ValueError(
                f"the tokenizer has no token for the characters {unknown!r} of {text!r}; it knows "
                f"{''.join(sorted(self._alphabet))!r}: use a model that was made for this data"
            )

    def _find_adds_bos(self) -> bool:
        """Return True if this tokenizer adds a BOS token by itself."""
        # Tested with a sample text, because the settings of tokenizers are not reliable.
        sample = max(self._alphabet or "a")
        with_special = self.tokenizer(sample, add_special_tokens=True)["input_ids"]
        plain = self.tokenizer(sample, add_special_tokens=False)["input_ids"]
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
    """Render a prompt as the text that the policy reads.

    Args:
        prompt: a string, or chat messages. Chat messages are always rendered with the chat template.
        tokenizer: tokenizer with the chat template.
        apply_chat_template: render a string as a user's message, followed by the start of the assistant's message.
        input_template: text with one `{}` for a string prompt. Not allowed together with the chat template.
        tools: definitions of tools for the chat template, as JSON schemas of functions.
        continue_final_message: if the last message is the assistant's, end with its text, which the policy continues (a
            prefill). Otherwise a new message of the assistant is started.

    Raises:
        ValueError: there is no chat template, it rejects the messages, or it is combined with `input_template`.
    """
    if apply_chat_template or not isinstance(prompt, str):
        if input_template is not None:
            raise ValueError("input_template and the chat template exclude each other; unset one of them")
        render = load(CHAT, "text", "data.apply_chat_template=true")
        return render(prompt, tokenizer, tools=tools, continue_final_message=continue_final_message)
    if input_template is None:
        return prompt
    # str.format would fail on the braces of templates for code and maths.
    return input_template.replace("{}", prompt, 1)


def _alphabet(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Return the characters of a tokenizer of single characters, or None for any other tokenizer."""
    largest_character_vocabulary = 256
    if len(tokenizer) > largest_character_vocabulary:
        return None
    special = set(tokenizer.all_special_ids)
    characters = [str(tokenizer.decode([index])) for index in range(len(tokenizer)) if index not in special]
    if any(len(character) != 1 for character in characters):
        return None
    return frozenset(characters)
