"""Candidates for the options that the plan chooses, from the most to the least preferred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKENS = (32768, 16384, 8192, 4096)
"""Numbers of tokens of a micro-batch, largest first. Larger ones do not train faster."""
SMALL_MODEL = 3 * 10**9
"""Number of parameters from which a model is no longer small."""
LARGE_MODEL = 20 * 10**9
"""Number of parameters from which a model is large."""
MOST_ROWS = {"small": 2048, "medium": 1024, "large": 512}
"""Maximum number of sequences that an engine generates concurrently, by the size of the model. With more rows the
matrix products of a decoding step are bound by arithmetic, so that generation is not faster."""
USUAL_ROWS = 256
"""Lower bound of `rollout.max_num_seqs` as far as the cache allows. Evaluations may have more rows than steps."""
ENOUGH_ROWS = 128
"""Number of rows below which generation becomes slow. Fewer rows are the last resort."""
LEAST_ROWS = 64
"""Minimum of `rollout.max_num_seqs`. The cache may hold fewer sequences of maximum length, because most are shorter."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Values of the chosen options."""

    sleeps: bool
    """`placement.engines_sleep`."""
    recomputes: bool
    """`train.gradient_checkpointing`."""
    stage: int
    """`train.zero_stage`."""
    tokens: int
    """`train.max_tokens`."""
    rows: int
    """Number of sequences of maximum length that the key-value cache of an engine holds. 0 without an engine."""

    @property
    def max_num_seqs(self) -> int:
        """`rollout.max_num_seqs`."""
        return max(self.rows, LEAST_ROWS)


@dataclass(frozen=True, kw_only=True)
class Domains:
    """Possible values of each option, the preferred ones first. An option that the user has set has one value."""

    sleeps: Sequence[bool]
    recomputes: Sequence[bool]
    stages: Sequence[int]
    tokens: Sequence[int]
    stored_tokens: int
    """Minimum number of tokens without recomputation. Smaller micro-batches lose more time than recomputation costs."""
    rows: Sequence[int]

    def chains(self) -> Iterator[list[Candidate]]:
        """Yield lists of candidates, from the most to the least preferred. Within a list the memory decreases.

        Engines stay awake if any candidate fits with awake engines. Next, activations are stored, then parameters stay
        gathered. Lists with few rows of generation come last.
        """
        enough = [rows for rows in self.rows if rows >= ENOUGH_ROWS] or [self.rows[0]]
        for sleeps in self.sleeps:
            for recomputes in self.recomputes:
                for stage in self.stages:
                    yield self._chain(sleeps, recomputes, stage, enough)
        few = [rows for rows in self.rows if rows < enough[-1]]
        for sleeps in self.sleeps:
            if few:
                yield self._chain(sleeps, self.recomputes[-1], self.stages[-1], few)

    def _chain(self, sleeps: bool, recomputes: bool, stage: int, rows: Sequence[int]) -> list[Candidate]:
        tokens = list(self.tokens)
        if not recomputes and len(tokens) > 1:
            tokens = [number for number in tokens if number >= self.stored_tokens]
        return [
            Candidate(sleeps=sleeps, recomputes=recomputes, stage=stage, tokens=tokens_of, rows=rows_of)
            for tokens_of, rows_of in levels(tokens, rows)
        ]

    @property
    def least(self) -> Candidate:
        """Candidate that needs the least memory."""
        return self._chain(self.sleeps[-1], self.recomputes[-1], self.stages[-1], self.rows)[-1]


def levels(tokens: Sequence[int], rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of tokens and rows. Each pair lowers one of the two, in turns as long as both can be lowered."""
    pairs = [(tokens[0], rows[0])]
    for i in range(1, max(len(tokens), len(rows))):
        token_count = tokens[min(i, len(tokens) - 1)]
        pairs.append((token_count, pairs[-1][1]))
        pairs.append((token_count, rows[min(i, len(rows) - 1)]))
    return list(dict.fromkeys(pairs))


def token_domain(longest: int) -> list[int]:
    """Return the possible numbers of tokens of a micro-batch that can hold the longest sequence."""
    larger = [number for number in TOKENS if number > longest]
    return list(dict.fromkeys([*larger, max(longest, TOKENS[-1])]))


def row_domain(parameters: int, rows_of_step: int, most: int | None = None) -> list[int]:
    """Return the numbers of rows of an engine.

    Args:
        parameters: number of parameters of the model.
        rows_of_step: number of sequences that the engine generates in a step.
        most: maximum number of rows of this kind of engine. Default: by the size of the model.
    """
    if most is None:
        most = MOST_ROWS["medium"]
        if parameters < SMALL_MODEL:
            most = MOST_ROWS["small"]
        elif parameters >= LARGE_MODEL:
            most = MOST_ROWS["large"]
    first = 1 << (min(most, max(rows_of_step, USUAL_ROWS)) - 1).bit_length()
    return [first >> i for i in range(first.bit_length())]
