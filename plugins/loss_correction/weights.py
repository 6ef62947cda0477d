"""Factors of each token's loss, by the value of `algorithm.correction`.

Each is a function of `logprob` [N], `rollout_logprob` [N], `action_mask` [N], `lengths` [B], and the bounds `low` and
`high`. It returns the factors [N]; see `importance_weights`.
"""

import math
from functools import partial

from torch import Tensor

from components.rl.correction import importance_weights, rejection_weights

TRUNCATED = partial(importance_weights, level="token", outside="clamp")
"""Truncated importance sampling (TIS): a factor outside of the bounds becomes the nearest bound."""
ZEROED = partial(importance_weights, level="token", outside="zero")
"""IcePop: a factor outside of the bounds becomes 0."""


def sequence_masked(*columns: Tensor, low: float, high: float) -> Tensor:
    """Return the ratios of the tokens, and 0 for all tokens of a response whose mean ratio is outside of the bounds."""
    weight_N = TRUNCATED(*columns, low=0.0, high=math.inf)
    return weight_N * _accepted(*columns, low=low, high=high)


def sequence_masked_truncated(*columns: Tensor, low: float, high: float) -> Tensor:
    """Return the factors of TIS, and 0 for all tokens of a response whose mean ratio is outside of the bounds."""
    weight_N = TRUNCATED(*columns, low=low, high=high)
    return weight_N * _accepted(*columns, low=low, high=high)


def _accepted(*columns: Tensor, low: float, high: float) -> Tensor:
    return rejection_weights(*columns, level="geometric", estimator="k1", low=low, high=high)
