"""Preference pairs: from rows to texts and token batches, and the held-out split.

Shape suffixes: P pairs; B = 2P sequences, the chosen response of a pair followed by the rejected one; N all tokens of a
batch end to end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from components.batch import Batch
from components.data.columns import texts_of
from components.data.conversations import read_messages
from components.data.mixture import Note, first_rows
from components.data.pair_rows import Pair, PairFormat, check_columns, read_pair, without_end
from components.data.records import read_records
from components.data.shown import described
from components.data.shown_examples import described_example
from components.data.sources import DEFAULT_ROWS, data_source
from components.data.text import TextEncoder
from components.data.values import check_one_kind


@dataclass(frozen=True)
class PreferenceData:
    """Encoded pairs, and the number of pairs that could not be used."""

    batch: Batch
    """2P sequences with columns `tokens` [N]; `loss_mask` [N] bool, True on the responses, only if encoded with a mask;
    `margin` [B] and `row` [B] int64, equal for both sequences of a pair."""
    openings: list[str]
    """Start of the conversation of each pair in the batch."""
    dropped: dict[str, int]
    """Number of dropped pairs by reason: `too_long` (a sequence above max_tokens), `identical` (equal responses)."""
    repeated: int
    """Number of pairs in the batch that repeat an earlier pair."""
    noun: str = "pairs"
    """Noun for the examples in messages."""

    def __len__(self) -> int:
        return len(self.openings)

    def describe_first(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Describe both responses of the first pair, one line each, with marks around the learnt tokens."""
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
    source: str, *, split: str = "train", max_rows: int | None = None, seed: int = 0, note: Note | None = None
) -> list[dict[str, Any]]:
    """Read or generate rows of pairs.

    Args:
        source: a source of `read_records`, or a data source of a plug-in, which generates `max_rows` (10,000) rows.
        split: split of a data set to read.
        max_rows: maximum number of rows. None sets no limit for rows that are read.
        seed: seed of generated rows.
        note: called with a sentence if `max_rows` leaves rows out.
    """
    if (generator := data_source(source)) is not None:
        return generator.pairs(max_rows or DEFAULT_ROWS, seed)
    return first_rows(read_records(source, split=split), max_rows, source, note)


def read_pairs(rows: Sequence[Mapping[str, Any]], form: PairFormat, tokenizer: PreTrainedTokenizerBase) -> list[Pair]:
    r"""Render the pairs of rows as text.

    Responses are strings or lists of chat messages, of the same kind in both columns. Messages may repeat the prompt,
    with or without its system prompt. Without a prompt column, the prompt is the common start of both responses: the
    equal messages, or the text up to the last "\n\nAssistant:" of the common start, or else up to its last blank.

    Raises:
        ValueError: a column is missing or has a value of the wrong kind, or the chat template cannot render the pair.
            The message names the row.
    """
    pairs = []
    for number, row in enumerate(rows):
        try:
            row_form, label = form.of_row(row)
            pairs.append(replace(read_pair(row, row_form, tokenizer), label=label))
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
    return pairs


def check_pairs(rows: Sequence[Mapping[str, Any]], form: PairFormat) -> None:
    """Check the columns of all rows, without a tokenizer.

    Raises:
        ValueError: as in `read_pairs`.
    """
    responses: dict[str, list[Any]] = defaultdict(list)
    for number, row in enumerate(rows):
        try:
            row_form, _ = form.of_row(row)
            check_columns(row, row_form)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
        responses[row_form.chosen_key].append(row[row_form.chosen_key])
    for column, cells in responses.items():
        check_one_kind(cells, f"column {column!r}")


def check_pair_tokens(pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model has an embedding for every token of each pair.

    Raises:
        ValueError: it has none for a token. The message names the row.
    """
    encoder = TextEncoder(tokenizer)
    for number, pair in enumerate(pairs):
        try:
            for response in (pair.chosen, pair.rejected):
                encode_response(pair.prompt, response, encoder, apart=True)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error


def encode_pairs(
    pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int | None = None, with_mask: bool = False
) -> PreferenceData:
    """Tokenize pairs, with one end token after each response.

    Args:
        pairs: result of `read_pairs`.
        tokenizer: a tokenizer with an end token.
        max_tokens: maximum number of tokens of prompt and response together. A pair with a longer sequence is dropped
            and counted, never truncated.
        with_mask: tokenize prompt and response separately, as in generation, and add the column `loss_mask`. False
            tokenizes the complete text at once, as a reward model does that scores a text.

    Raises:
        ValueError: no pair can be used, or the tokenizer has no end token.
    """
    encoder = TextEncoder(tokenizer)
    dropped = {"too_long": 0, "identical": 0}
    tokens: list[list[int]] = []
    masks: list[Tensor] = []
    kept: list[int] = []
    for number, pair in enumerate(pairs):
        # Both log-probabilities are always equal, so such a pair has no gradient.
        if pair.chosen == pair.rejected:
            dropped["identical"] += 1
            continue
        encoded = [
            encode_response(pair.prompt, response, encoder, with_mask) for response in (pair.chosen, pair.rejected)
        ]
        # Both are dropped together: a truncated response would be compared with a complete one.
        if max_tokens is not None and max(len(ids) for ids, _ in encoded) > max_tokens:
            dropped["too_long"] += 1
            continue
        kept.append(number)
        tokens += [ids for ids, _ in encoded]
        masks += [torch.arange(len(ids)) >= start for ids, start in encoded]
    if not kept:
        raise ValueError(f"none of the {len(pairs)} pairs can be used (dropped: {dropped}); raise data.max_tokens")
    columns: dict[str, Any] = {"tokens": tokens}
    if with_mask:
        columns["loss_mask"] = masks
    kept_pairs = [pairs[number] for number in kept]
    batch = Batch.from_rows(
        columns,
        per_sequence={
            "margin": torch.tensor([pair.margin for pair in kept_pairs], dtype=torch.float32).repeat_interleave(2),
            "row": torch.tensor(kept, dtype=torch.int64).repeat_interleave(2),
        },
    )
    # Repeated pairs are kept, but reported, because they count more in the loss.
    distinct = {(pair.prompt, pair.chosen, pair.rejected) for pair in kept_pairs}
    return PreferenceData(batch, [pair.opening for pair in kept_pairs], dropped, len(kept_pairs) - len(distinct))


def pair_texts(rows: Sequence[Mapping[str, Any]], form: PairFormat) -> Iterator[str]:
    """Yield all texts of rows, to build a vocabulary from. Rows are not checked; `read_pairs` does that."""
    for row in rows:
        row_form, _ = form.of_row(row)
        prompt = row_form.prompt_column(row)
        for column in filter(None, (prompt, row_form.chosen_key, row_form.rejected_key)):
            text = row.get(column, "")
            messages = read_messages(text)
            if messages is not None:
                text = messages
            yield from texts_of(text)


def scored_tokens(text: str, encoder: TextEncoder) -> list[int]:
    """Return the token ids of a text to score (prompt and response), with one end token as in reward-model training."""
    return encode_response("", text, encoder, apart=False)[0]


def hold_out(openings: Sequence[str], count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Choose at least `count` pairs to hold out, so that no conversation is in both splits.

    Openings that differ only in case and white space are equal.

    Returns:
        Ascending int64 positions of the pairs to train on, and of the pairs that are held out.

    Raises:
        ValueError: no pair would be left to train on.
    """
    positions: dict[str, list[int]] = defaultdict(list)
    for position, opening in enumerate(openings):
        positions[" ".join(opening.split()).casefold()].append(position)
    groups = list(positions.values())
    held: list[int] = []
    # A second number in the seed separates this order from other uses of the run's seed.
    for index in np.random.default_rng([seed, 1]).permutation(len(groups)):
        if len(held) >= count:
            break
        held += groups[index]
    if len(held) == len(openings):
        raise ValueError(
            f"{count} of {len(openings)} pairs from {len(groups)} conversations are to be held out, which leaves none "
            "to train on; set evaluation.held_out lower"
        )
    return torch.tensor(sorted(set(range(len(openings))) - set(held))), torch.tensor(sorted(held), dtype=torch.int64)


def select_pairs(batch: Batch, index_P: Tensor) -> Batch:
    """Return both sequences of the pairs at these positions."""
    # Pair i is the sequences 2i and 2i + 1.
    return batch.select((2 * index_P.view(-1, 1) + torch.arange(2)).flatten())


def encode_response(prompt: str, response: str, encoder: TextEncoder, apart: bool) -> tuple[list[int], int]:
    """Return the token ids of prompt, response and end token, and the index at which the response begins.

    Args:
        prompt: text of the prompt.
        response: text of the response.
        encoder: encoder of texts.
        apart: tokenize prompt and response separately. Otherwise the index is 0.
    """
    tokenizer = encoder.tokenizer
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError("the tokenizer has no end token (eos), but every response must end with one; set eos_token")
    if not apart:
        return _ended(encoder.encode_prompt(without_end(prompt + response, tokenizer)), end, encoder), 0
    before = encoder.encode_prompt(prompt)
    return [*before, *_ended(encoder.encode(response), end, encoder)], len(before)


def _ended(ids: list[int], end: int, encoder: TextEncoder) -> list[int]:
    """Append the end token, unless the ids end with it or with the token that ends a turn."""
    if ids and ids[-1] in encoder.end_ids:
        return ids
    return [*ids, end]
