"""Factors of each token's loss, by the value of `algorithm.correction`.

Each is a function of `logprob` [N], `rollout_logprob` [N], `action_mask` [N], `lengths` [B], and the bounds `low` and
`high`. It returns the factors [N]; see `importance_weights`.
"""

from functools import partial

from components.rl.correction import importance_weights

TRUNCATED = partial(importance_weights, level="token", outside="clamp")
"""Truncated importance sampling (TIS): a factor outside of the bounds becomes the nearest bound."""
ZEROED = partial(importance_weights, level="token", outside="zero")
"""IcePop: a factor outside of the bounds becomes 0."""
