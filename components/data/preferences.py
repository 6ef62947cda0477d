"""Pairs of responses of which one is better: from rows to texts, to token batches, and to what is held out.

P pairs; B = 2P sequences, a pair's chosen response first and the rejected one next; N all tokens of a batch end to end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from components.batch import Batch
from components.data.cells import check_one_kind
from components.data.columns import texts_of
from components.data.messages import read_messages
from components.data.mixture import Note, first_rows
from components.data.pair_rows import Pair, PairFormat, check_columns, read_pair, without_end
from components.data.records import read_records
from components.data.shown import described, described_example
from components.data.sources import DEFAULT_ROWS, data_source
from components.data.text import TextEncoder


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

    def describe_first(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Describe both responses of the first pair, one in a line, with marks around what is learnt of each."""
        lines: list[str] = []
        for index, name in enumerate(("chosen", "rejected")):
            ids = self.batch.row(index, "tokens").tolist()
            if "loss_mask" in self.batch:
                shown = described_example(ids, self.batch.row(index, "loss_mask").tolist(), tokenizer)
            else:
                shown = f"{described(str(tokenizer.decode(ids)), ids)}; its score is read at the last token"
            lines.append(f"first pair, {name} {shown}")
        return lines


def load_pairs(
    source: str,
    *,
    split: str = "train",
    max_rows: int | None = None,
    seed: int = 0,
    note: Note | None = None,
) -> list[dict[str, Any]]:
    """Read rows of pairs from what `read_records` takes, or draw those of a plug-in's data source: 10,000, or
    `max_rows`. `note` is called with a sentence if `max_rows` leaves rows out.
    """
    if (drawn := data_source(source)) is not None:
        return drawn.pairs(max_rows or DEFAULT_ROWS, seed)
    return first_rows(read_records(source, split=split), max_rows, source, note)


def read_pairs(rows: Sequence[Mapping[str, Any]], form: PairFormat, tokenizer: PreTrainedTokenizerBase) -> list[Pair]:
    r"""Write out the pairs of rows as text.

    Responses are strings or lists of chat messages, in both columns the same. Messages may repeat the prompt, with its
    system prompt or without. Without a prompt, messages that both begin with are the prompt; of strings it is the text
    up to the last "\n\nAssistant:" that both have, or else up to the last blank.

    Raises:
        ValueError: a column is missing or holds something else, or the chat template does not fit. It names the row.
    """
    pairs = []
    for number, row in enumerate(rows):
        try:
            pairs.append(read_pair(row, form, tokenizer))
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
            check_columns(row, form)
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
        prompt = form.prompt_column(row)
        for column in filter(None, (prompt, form.chosen_key, form.rejected_key)):
            messages = read_messages(row.get(column))
            yield from texts_of(row.get(column, "") if messages is None else messages)


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


def _encode(prompt: str, response: str, encoder: TextEncoder, apart: bool) -> tuple[list[int], int]:
    """Ids of prompt, response and end token, and where the response begins; 0 where they are not told apart."""
    tokenizer = encoder.tokenizer
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError("the tokenizer has no end token (eos), and responses end with one; set it")
    if not apart:
        return _ended(encoder.encode_prompt(without_end(prompt + response, tokenizer)), end, encoder), 0
    before = encoder.encode_prompt(prompt)
    return [*before, *_ended(encoder.encode(response), end, encoder)], len(before)


def _ended(ids: list[int], end: int, encoder: TextEncoder) -> list[int]:
    """Return `ids` with an end token; the one that ends a turn is one."""
    return ids if ids and ids[-1] in encoder.end_ids else [*ids, end]
