"""Single responses with a label, desirable or not: from rows or pairs to token batches.

Shape suffixes: E examples; B = 2E sequences, the response of an example followed by its mismatched response; N all
tokens of a batch end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from components.batch import Batch
from components.data.pair_rows import Pair, PairFormat
from components.data.preferences import PreferenceData, encode_response
from components.data.shown_examples import described_example
from components.data.text import TextEncoder


@dataclass(frozen=True, kw_only=True)
class CompletionFormat(PairFormat):
    """Format of rows with one response and its label, as in TRL, or with a pair, which is read as two responses."""

    completion_key: str = "completion"
    """Column of the response. A row without it has a pair."""
    label_key: str = "label"
    """Column of the label: true for a desirable response, false for an undesirable one."""

    def of_row(self, row: Mapping[str, Any]) -> tuple[PairFormat, bool | None]:
        """See `PairFormat.of_row`."""
        if row.get(self.completion_key) is None:
            return self, None
        if row.get(self.chosen_key) is not None:
            raise ValueError(
                f"there are both {self.completion_key!r} and {self.chosen_key!r}; remove one of the columns, or set "
                "data.completion_key or data.chosen_key to another"
            )
        label = row.get(self.label_key)
        # Files without Booleans, such as CSV, hold 0 and 1.
        if label not in (0, 1) or isinstance(label, str):
            raise ValueError(
                f"column {self.label_key!r} must be true (desirable) or false (undesirable), found {label!r:.40}; set "
                "data.label_key to the column of the label"
            )
        # A response is read as a pair of itself, so that prompt, template, system prompt and tools are those of a pair.
        values = {field.name: getattr(self, field.name) for field in fields(PairFormat)}
        form = replace(PairFormat(**values), chosen_key=self.completion_key, rejected_key=self.completion_key)
        if isinstance(row[self.completion_key], str) and form.prompt_column(row) is None:
            raise ValueError(
                f"there is a response in {self.completion_key!r}, but no prompt; set data.prompt_key to its column"
            )
        return form, bool(label)

    def columns_of(self, row: Mapping[str, Any]) -> list[str]:
        """See `PairFormat.columns_of`."""
        form, label = self.of_row(row)
        if label is None:
            return super().columns_of(row)
        return [*dict.fromkeys(form.columns_of(row)), self.label_key]


@dataclass(frozen=True)
class CompletionData(PreferenceData):
    """Encoded responses with a label, each followed by its mismatched response."""

    def describe_first(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Describe the first desirable and the first undesirable response, with marks around the learnt tokens."""
        lines: list[str] = []
        label_E = self.batch["is_desirable"][::2]
        for value, name in ((True, "desirable"), (False, "undesirable")):
            index_E = (label_E == value).nonzero().flatten()
            if len(index_E):
                row = 2 * int(index_E[0])
                ids = self.batch.row(row, "tokens").tolist()
                mask = self.batch.row(row, "loss_mask").tolist()
                lines.append(f"first {name} response {described_example(ids, mask, tokenizer)}")
        return lines


def encode_completions(
    pairs: Sequence[Pair],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int | None = None,
    with_mask: bool = True,  # noqa: ARG001 - the arguments are those of `encode_pairs`
) -> CompletionData:
    """Tokenize single responses, and a mismatched response for the KL estimate of each: the one of another example.

    A pair without a label becomes two examples: the chosen response is desirable, the rejected one is not.

    Args:
        pairs: result of `read_pairs` with a `CompletionFormat`.
        tokenizer: a tokenizer with an end token.
        max_tokens: maximum number of tokens of prompt and response together. A longer example is dropped and counted. A
            mismatched response is truncated, since only a mean over all of them is used.
        with_mask: unused. Prompt and response are always tokenized separately.

    Returns:
        2E sequences with columns `tokens` [N], `loss_mask` [N] bool, `is_desirable` [B] bool and `row` [B] int64, equal
        for both sequences of an example.

    Raises:
        ValueError: fewer than two examples can be used, or the tokenizer has no end token.
    """
    encoder = TextEncoder(tokenizer)
    dropped = {"too_long": 0, "identical": 0}
    examples: list[tuple[int, str, list[int], int, bool]] = []
    for number, pair in enumerate(pairs):
        if pair.label is None and pair.chosen == pair.rejected:
            dropped["identical"] += 2
            continue
        labelled = [(pair.chosen, True), (pair.rejected, False)]
        if pair.label is not None:
            labelled = [(pair.chosen, pair.label)]
        for response, label in labelled:
            ids, start = encode_response(pair.prompt, response, encoder, apart=True)
            if max_tokens is not None and len(ids) > max_tokens:
                dropped["too_long"] += 1
            else:
                examples.append((number, response, ids, start, label))
    if len(examples) < 2:
        raise ValueError(
            f"{len(examples)} of the responses in {len(pairs)} rows can be used (dropped: {dropped}), and the KL "
            "estimate of KTO needs two; raise data.max_tokens"
        )
    prompts: list[str] = [pairs[example[0]].prompt for example in examples]
    donor_E = _donors(prompts)
    tokens: list[list[int]] = []
    starts: list[int] = []
    for (_, _, ids, start, _), donor in zip(examples, donor_E, strict=True):
        other, other_start = examples[donor][2:4]
        tokens += [ids, [*ids[:start], *other[other_start:]][:max_tokens]]
        starts += [start, start]
    batch = Batch.from_rows(
        {
            "tokens": tokens,
            "loss_mask": [torch.arange(len(ids)) >= start for ids, start in zip(tokens, starts, strict=True)],
        },
        per_sequence={
            "is_desirable": torch.tensor([example[4] for example in examples]).repeat_interleave(2),
            "row": torch.tensor([example[0] for example in examples], dtype=torch.int64).repeat_interleave(2),
        },
    )
    distinct = {(pairs[number].prompt, response, label) for number, response, _, _, label in examples}
    openings = [pairs[example[0]].opening for example in examples]
    return CompletionData(batch, openings, dropped, len(examples) - len(distinct), noun="responses")


def _donors(prompts: list[str]) -> list[int]:
    """Return for each example the position of the example whose response it is mismatched with.

    Each example is a donor once: a rotation of a random order, as TRL rotates the responses of a batch. Examples of the
    same prompt are not mismatched as far as the order allows it.
    """
    order_E = np.random.default_rng(0).permutation(len(prompts)).tolist()
    sizes: dict[str, int] = {}
    rank: dict[str, int] = {}
    for place, position in enumerate(order_E):
        prompt = prompts[position]
        rank.setdefault(prompt, place)
        sizes[prompt] = sizes.get(prompt, 0) + 1
    # With equal prompts side by side, a rotation by the size of the largest group leaves every group.
    order_E.sort(key=lambda position: rank[prompts[position]])
    shift = max(sizes.values()) % len(prompts) or 1
    donors = [0] * len(prompts)
    for place, position in enumerate(order_E):
        donors[position] = order_E[(place + shift) % len(prompts)]
    return donors
