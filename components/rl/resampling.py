"""Which responses of a step are trained on, and how often. B sequences."""

from typing import Literal, get_args

import torch
from torch import Tensor

Selection = Literal["pow", "max_min", "max_random"]
"""By what responses are drawn for training."""


def selection_weights(reward_B: Tensor, rule: Selection, power: float = 2.0) -> Tensor:
    """How often each response is to be drawn for training, beside the others: by their rewards.

    Source: Shen and Zhang 2024 (PF-PPO, arXiv 2409.06957), as verl has it: a reward model is least reliable between
    its extremes.

    Args:
        reward_B: [B] reward of each response.
        rule: "pow": abs(R)^power; "max_min": those with the largest and with the smallest reward alone; "max_random":
            those with the largest four times as often as the others.
        power: of "pow".

    Returns:
        [B] float64 above 0, not normalised.

    Raises:
        ValueError: the rule is unknown, or a reward is not finite.
    """
    if not bool(reward_B.isfinite().all()):
        raise ValueError("a reward is not finite, so that no response can be drawn by it")
    own_B = reward_B.detach().double()
    is_best_B = own_B == own_B.max()
    if rule == "pow":
        weight_B = own_B.abs() ** power
    elif rule == "max_min":
        weight_B = (is_best_B | (own_B == own_B.min())).double()
    elif rule == "max_random":
        weight_B = torch.where(is_best_B, 0.4, 0.1).double()
    else:
        raise ValueError(f"rule={rule!r} is unknown; set one of {', '.join(get_args(Selection))}")
    return weight_B + 1e-8
