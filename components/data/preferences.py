"""Pairs of responses of which one is better: from rows to texts, to token batches, and to what is held out.

P pairs; B = 2P sequences, a pair's chosen response first and the rejected one next; N all tokens of a batch end to end.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from components.batch import Batch
from components.data.cells import check_one_kind, kind_of, number_of, text_or_messages
from components.data.mixture import Note, first_rows
from components.data.model_tokens import turn_end_id
from components.data.records import read_records
from components.data.tasks import get_task
from components.data.text import TextEncoder, as_messages, render_conversation, render_prompt

ANSWER_MARK = "\n\nAssistant:"
"""Before each response of dialogues that are one string, as in hh-rlhf."""


@dataclass(frozen=True, kw_only=True)
class PairFormat:
    """Where a row has its pair."""

    prompt_key: str | None = None
    """Column of what both responses follow: text, or chat messages. None: what the responses begin with alike."""
    chosen_key: str = "chosen"
    """Column of the better response."""
    rejected_key: str = "rejected"
    """Column of the other."""
    apply_chat_template: bool = False
    """Take prompt and response as a user's and an assistant's message. Chat messages always go through the template."""
    input_template: str | None = None
    """Text with one `{}` for a prompt that does not go through the chat template."""
    with_margin: bool = False
    """Read the column `margin`, a number; otherwise margins are 0."""

    def of(self, source: str) -> PairFormat:
        """The format of a source's rows: a task's have it where they always do."""
        if not source.startswith("task:"):
            return self
        return PairFormat(
            prompt_key="prompt", apply_chat_template=self.apply_chat_template, with_margin=self.with_margin
        )


@dataclass(frozen=True)
class Pair:
    """Two responses to the same, as a model reads them, without end token."""

    prompt: str
    chosen: str
    """What follows the prompt."""
    rejected: str
    margin: float
    """By how much the one is better; 0 where nobody says."""
    opening: str
    """What the conversation begins with, by which pairs are told apart when some are held out."""


@dataclass(frozen=True)
class PreferenceData:
    """Encoded pairs, and the count of what could not be used."""

    batch: Batch
    """2P sequences: `tokens` [N]; `loss_mask` [N] bool, True on the responses, if it was asked for; `margin` [B] and
    `row` [B] int64, which say the same of both."""
    openings: list[str]
    """Of each pair in the batch."""
    dropped: dict[str, int]
    """Pairs left out, counted by reason: `too_long` (one of the two above max_tokens), `identical` responses."""
    repeated: int
    """Pairs in the batch that stand there before."""

    def __len__(self) -> int:
        return len(self.openings)


def load_pairs(
    source: str,
    *,
    split: str = "train",
    max_rows: int | None = None,
    seed: int = 0,
    note: Note | None = None,
) -> list[dict[str, Any]]:
    """Read rows of pairs from what `read_records` takes, or draw those of `task:<name>`: 10,000, or `max_rows`.
    `note` is called with a sentence if `max_rows` leaves rows out.
    """
    kind, _, task = source.partition(":")
    if kind == "task":
        return list(get_task(task).pairs(max_rows or 10_000, seed))
    return first_rows(read_records(source, split=split), max_rows, source, note)


def read_pairs(rows: Sequence[Mapping[str, Any]], form: PairFormat, tokenizer: PreTrainedTokenizerBase) -> list[Pair]:
    r"""Write out the pairs of rows as text.

    Responses are strings or lists of chat messages, in both columns the same. Without a prompt, messages that both
    begin with are the prompt; of strings it is the text up to the last "\n\nAssistant:" that both have, or else up to
    the last blank.

    Raises:
        ValueError: a column is missing or holds something else, or the chat template does not fit. It names the row.
    """
    pairs = []
    for number, row in enumerate(rows):
        try:
            pairs.append(_read_pair(row, form, tokenizer))
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
    return pairs


def check_pairs(rows: Sequence[Mapping[str, Any]], form: PairFormat) -> None:
    """See that all rows have their columns, without a tokenizer.

    Raises:
        ValueError: as of `read_pairs`.
    """
    for number, row in enumerate(rows):
        try:
            _columns(row, form)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
    check_one_kind((row[form.chosen_key] for row in rows), f"column {form.chosen_key!r}")


def check_pair_tokens(pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that each pair can be encoded with tokens that the model has.

    Raises:
        ValueError: one cannot. It names the row.
    """
    encoder = TextEncoder(tokenizer)
    for number, pair in enumerate(pairs):
        try:
            for response in (pair.chosen, pair.rejected):
                _encode(pair.prompt, response, encoder, apart=True)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    with_mask: bool = False,
) -> PreferenceData:
    """Tokenize pairs, each response with one end token.

    Args:
        pairs: as `read_pairs` gives them.
        tokenizer: must have an end token.
        max_tokens: of prompt and response together; pairs with a longer one are dropped and counted, never cut.
        with_mask: tokenize prompts and answers apart, as in generation, and say which tokens are responses. Otherwise
            the whole text is tokenized at once, as anybody does who has a text to score.
    """
    encoder = TextEncoder(tokenizer)
    dropped = {"too_long": 0, "identical": 0}
    tokens: list[list[int]] = []
    masks: list[Tensor] = []
    kept: list[int] = []
    for number, pair in enumerate(pairs):
        if pair.chosen == pair.rejected:
            dropped["identical"] += 1
            continue
        both = [_encode(pair.prompt, response, encoder, with_mask) for response in (pair.chosen, pair.rejected)]
        if max_tokens is not None and max(len(ids) for ids, _ in both) > max_tokens:
            dropped["too_long"] += 1
            continue
        kept.append(number)
        tokens += [ids for ids, _ in both]
        masks += [torch.arange(len(ids)) >= start for ids, start in both]
    if not kept:
        raise ValueError(
            f"none of the {len(pairs)} pairs can be used (dropped: {dropped}); raise data.max_tokens, or give others"
        )
    chosen = [pairs[number] for number in kept]
    batch = Batch.from_rows(
        {"tokens": tokens} | ({"loss_mask": masks} if with_mask else {}),
        per_sequence={
            "margin": torch.tensor([pair.margin for pair in chosen], dtype=torch.float32).repeat_interleave(2),
            "row": torch.tensor(kept, dtype=torch.int64).repeat_interleave(2),
        },
    )
    texts = Counter((pair.prompt, pair.chosen, pair.rejected) for pair in chosen)
    return PreferenceData(batch, [pair.opening for pair in chosen], dropped, len(chosen) - len(texts))


def pair_texts(rows: Sequence[Mapping[str, Any]], form: PairFormat) -> Iterator[str]:
    """All texts of rows, for who learns a vocabulary; what is wrong with a row is said by `read_pairs`."""
    for row in rows:
        for column in filter(None, (form.prompt_key, form.chosen_key, form.rejected_key)):
            if isinstance(row.get(column), str | list):
                cell = text_or_messages(row[column], f"column {column!r}", "mend the row")
                yield from (str(message["content"] or "") for message in as_messages(cell))


def scored_tokens(text: str, encoder: TextEncoder) -> list[int]:
    """Ids of a text to score, prompt and response, as a reward model is trained on them: with one end token."""
    return _encode("", text, encoder, apart=False)[0]


def hold_out(openings: Sequence[str], count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Choose at least `count` pairs to hold out, such that no conversation is on both sides.

    Openings are the same when they differ only in case and blanks.

    Returns:
        Positions of the pairs to train on and of those held out, in order; int64.

    Raises:
        ValueError: nothing would be left to train on.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, opening in enumerate(openings):
        places[" ".join(opening.split()).casefold()].append(place)
    groups = list(places.values())
    held: list[int] = []
    for index in np.random.default_rng([seed, 1]).permutation(len(groups)):
        if len(held) >= count:
            break
        held += groups[index]
    if len(held) == len(openings):
        raise ValueError(
            f"{count} of {len(openings)} pairs are to be held out, of {len(groups)} conversations, which leaves none "
            "to train on; set evaluation.held_out lower"
        )
    return torch.tensor(sorted(set(range(len(openings))) - set(held))), torch.tensor(sorted(held), dtype=torch.int64)


def select_pairs(batch: Batch, index_P: Tensor) -> Batch:
    """The pairs at these positions, both sequences of each."""
    return batch.select((2 * index_P.view(-1, 1) + torch.arange(2)).flatten())


def check_shares(ranks: int, train: Batch, heldout: Batch | None) -> None:
    """See that every rank gets a response of a batch that is split over the ranks.

    Raises:
        ValueError: there are too few; the message says what to set.
    """
    ways = {
        "train on": (train, "give more"),
        "evaluate": (heldout, "set evaluation.held_out higher, give a longer evaluation.path"),
    }
    for use, (batch, mend) in ways.items():
        if batch is not None and len(batch) < ranks:
            raise ValueError(
                f"{len(batch)} responses to {use} are too few for {ranks} ranks, each of which takes one or more; "
                f"{mend}, or set placement.ranks_per_node lower"
            )


def _read_pair(row: Mapping[str, Any], form: PairFormat, tokenizer: PreTrainedTokenizerBase) -> Pair:
    prompt, chosen, rejected, margin = _columns(row, form)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(
            f"{form.chosen_key!r} is {kind_of(chosen)} and {form.rejected_key!r} {kind_of(rejected)}; give strings in "
            "both, or lists of chat messages in both"
        )
    if not isinstance(chosen, str):
        before = [] if prompt is None else as_messages(prompt)
        if chosen[: len(before)] == before == rejected[: len(before)]:
            before = []  # some data sets repeat the prompt in both responses
        return _from_messages([*before, *chosen], [*before, *rejected], len(before), margin, tokenizer)
    if prompt is None:
        if form.apply_chat_template:
            raise ValueError(
                "data.apply_chat_template needs the role of each message; set data.prompt_key, or give lists of chat "
                "messages"
            )
        prompt = _common_start(chosen, rejected)
        return _pair(prompt, chosen[len(prompt) :], rejected[len(prompt) :], margin, tokenizer)
    if form.apply_chat_template or not isinstance(prompt, str):
        before = as_messages(prompt)
        better, worse = ([*before, {"role": "assistant", "content": response}] for response in (chosen, rejected))
        return _from_messages(better, worse, len(before), margin, tokenizer)
    text = render_prompt(prompt, tokenizer, input_template=form.input_template)
    return _pair(text, chosen, rejected, margin, tokenizer, opening=prompt.partition(ANSWER_MARK)[0])


def _columns(row: Mapping[str, Any], form: PairFormat) -> tuple[Any, Any, Any, float]:
    """Read prompt (None without a column for it), chosen, rejected and margin of a row."""
    chosen, rejected = _column(row, form.chosen_key, "chosen_key"), _column(row, form.rejected_key, "rejected_key")
    prompt = None if form.prompt_key is None else _column(row, form.prompt_key, "prompt_key")
    margin = 0.0
    if form.with_margin:
        try:
            margin = number_of(row.get("margin"), "its column 'margin'")
        except ValueError as error:
            raise ValueError(f"{error}, or leave algorithm.margin_loss out") from error
    return prompt, chosen, rejected, margin


def _column(row: Mapping[str, Any], name: str, option: str) -> Any:
    if row.get(name) is None:
        columns = sorted(map(str, row))
        raise ValueError(f"column {name!r} is null or absent; there are the columns {columns}; set data.{option}")
    return text_or_messages(row[name], f"column {name!r}", f"set data.{option} to another column, or mend the row")


def _common_start(chosen: str, rejected: str) -> str:
    common = os.path.commonprefix([chosen, rejected])  # noqa: RUF071 - of texts, character by character
    mark = common.rfind(ANSWER_MARK)
    return common[: mark + len(ANSWER_MARK)] if mark >= 0 else common[: max(common.rfind(" "), common.rfind("\n"), 0)]


def _from_messages(
    chosen: list[dict[str, Any]],
    rejected: list[dict[str, Any]],
    given: int,
    margin: float,
    tokenizer: PreTrainedTokenizerBase,
) -> Pair:
    """`given` messages are known to be the prompt; so are those that follow and are alike, but for the last of each."""
    limit = min(len(chosen), len(rejected)) - 1
    count = given
    while count < limit and chosen[count] == rejected[count]:
        count += 1
    while count > given and chosen[count - 1].get("role") == "assistant":
        count -= 1  # what follows it is no response
    prompt = render_prompt(chosen[:count], tokenizer) if count else ""
    texts = [render_conversation(messages, tokenizer) for messages in (chosen, rejected)]
    if not all(text.startswith(prompt) for text in texts):
        raise ValueError(
            "the chat template writes the prompt differently once there is a response (some drop earlier reasoning), "
            "so "
            "the model would not be scored on what it reads; mend the template, or write the responses out as strings"
        )
    # Not the first message: a system's may be the same everywhere.
    opening = next((str(message.get("content")) for message in chosen[:count] if message.get("role") == "user"), "")
    better, worse = (text[len(prompt) :] for text in texts)
    return _pair(prompt, better, worse, margin, tokenizer, opening=opening)


def _pair(
    prompt: str, chosen: str, rejected: str, margin: float, tokenizer: PreTrainedTokenizerBase, opening: str = ""
) -> Pair:
    opening = opening or prompt.partition(ANSWER_MARK)[0] or prompt.strip() or chosen
    better, worse = (_without_end(response, tokenizer) for response in (chosen, rejected))
    return Pair(prompt, better, worse, float(margin), opening)


def _without_end(response: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a response without the tokenizer's end token; one that ends a turn by another token keeps that, as its
    last token.
    """
    end, turn_end = str(tokenizer.eos_token), turn_end_id(tokenizer)
    while (cut := response.rstrip()).endswith(end):
        response = cut.removesuffix(end)
    is_ended = turn_end is not None and cut.endswith(str(tokenizer.convert_ids_to_tokens(turn_end)))
    return cut if is_ended else response


def _encode(prompt: str, response: str, encoder: TextEncoder, apart: bool) -> tuple[list[int], int]:
    """Ids of prompt, response and end token, and where the response begins; 0 where they are not told apart."""
    tokenizer = encoder.tokenizer
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError("the tokenizer has no end token (eos), and responses end with one; set it")
    if not apart:
        return _ended(encoder.encode_prompt(_without_end(prompt + response, tokenizer)), end, encoder), 0
    before = encoder.encode_prompt(prompt)
    return [*before, *_ended(encoder.encode(response), end, encoder)], len(before)


def _ended(ids: list[int], end: int, encoder: TextEncoder) -> list[int]:
    """Return `ids` with an end token; the one that ends a turn is one."""
    return ids if ids and ids[-1] in encoder.end_ids else [*ids, end]
