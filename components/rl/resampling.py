"""Resampling of a step's responses for training. Shape suffix: B sequences."""

from typing import Literal, get_args

import torch
from torch import Tensor

Selection = Literal["pow", "max_min", "max_random"]
"""Rule by which responses are drawn for training; see `selection_weights`."""


def selection_weights(reward_B: Tensor, rule: Selection, power: float = 2.0) -> Tensor:
    """Return the relative frequency at which each response is drawn for training, from its reward.

    Source: Shen and Zhang 2024 (PF-PPO, arXiv 2409.06957), as implemented in verl. A reward model is least reliable
    between its extremes.

    Args:
        reward_B: [B] reward of each response.
        rule: "pow": abs(R)^power; "max_min": only responses with the maximum or the minimum reward; "max_random":
            responses with the maximum reward four times as often as the others.
        power: exponent of "pow".

    Returns:
        [B] float64 above 0, not normalised.

    Raises:
        ValueError: the rule is unknown, or a reward is not finite.
    """
    if not bool(reward_B.isfinite().all()):
        raise ValueError("a reward is NaN or infinite, so responses cannot be drawn by it; check the reward function")
    reward_B = reward_B.detach().double()
    is_best_B = reward_B == reward_B.max()
    if rule == "pow":
        weight_B = reward_B.abs() ** power
    elif rule == "max_min":
        weight_B = (is_best_B | (reward_B == reward_B.min())).double()
    elif rule == "max_random":
        weight_B = torch.where(is_best_B, 0.4, 0.1).double()
    else:
        raise ValueError(f"rule={rule!r} is unknown; set one of {', '.join(get_args(Selection))}")
    # Above 0: weights of 0 only, as for rewards of 0 with "pow", could not be sampled from.
    return weight_B + 1e-8
