"""Random numbers for sampling, as a pure function of the position at which they are used.

There is no generator state. The tokens therefore do not depend on the order of the work: on batching, the number of
engines, or a resumed run.

Legend: `B` sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

# Constants of splitmix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the output of splitmix64 for each state. It is a bijection, and every input bit affects the output."""
    mixed = state + _GOLDEN_GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MULTIPLIERS[1]
    return mixed ^ (mixed >> np.uint64(31))


def uniform(
    seed: int, step: int, prompt_id_B: ArrayLike, sample_id_B: ArrayLike, position: ArrayLike
) -> NDArray[np.float64]:
    """Return uniform random numbers that depend only on the five arguments.

    Each argument in turn is added to the mixed hash of the arguments before it, so that the numbers of (step 1, prompt
    2) and (step 2, prompt 1) are unrelated.

    Args:
        seed: seed of the run.
        step: generation step.
        prompt_id_B: [B] integers, ids of the prompts.
        sample_id_B: [B] integers, index of each sample among those of its prompt.
        position: index of the sampled token in its sequence, prompt included; a single number or [B].

    Returns:
        [B] float64 in [0, 1), multiples of 2**-53. Arguments of several dimensions are broadcast.
    """
    return (_hash(seed, step, prompt_id_B, sample_id_B, position) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def request_seeds(
    seed: int, step: int, prompt_id_B: ArrayLike, sample_id_B: ArrayLike, position_B: ArrayLike
) -> NDArray[np.int64]:
    """Return [B] seeds from 0 to 2**62 - 1, for an engine that samples a whole completion from one seed.

    The arguments are those of `uniform` for the first token of the completion.
    """
    return (_hash(seed, step, prompt_id_B, sample_id_B, position_B) >> np.uint64(2)).astype(np.int64)


def _hash(*parts: ArrayLike) -> NDArray[np.uint64]:
    state_B = np.zeros(np.broadcast_shapes(*(np.shape(part) for part in parts)), dtype=np.uint64)
    for part in parts:
        # Array arithmetic on uint64 wraps around silently, as intended; numpy scalars would warn of overflow.
        state_B = _mix(np.atleast_1d(state_B + _as_words(part)))
    return state_B


def _as_words(integers: ArrayLike) -> NDArray[np.uint64]:
    """Return the integers as unsigned 64-bit words in two's complement, so that negative ids are valid."""
    return np.atleast_1d(np.asarray(integers, dtype=np.int64)).view(np.uint64)
