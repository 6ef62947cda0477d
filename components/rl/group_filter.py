"""Filter of dynamic sampling: the groups of responses whose mean score lies within bounds.

Shape suffix: B sequences. A group is the responses to one prompt.
"""

import torch
from torch import Tensor

from components.rl.advantages import Groups


def groups_within(score_B: Tensor, group_B: Tensor, low: float, high: float) -> Tensor:
    """Return a mask of the responses whose group has a mean score between two bounds (dynamic sampling).

    In a group whose responses are all correct or all wrong, every advantage is 0, so it has no gradient.

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.2, equation 11: 0 < correct responses < all, which is
    low = 0 and high = 1. Use it with scores of the outcome: shaped rewards differ even in a group of correct responses.

    Args:
        score_B: [B] score of each response.
        group_B: [B] integer ids, equal for the responses to one prompt. Ids may be any integers in any order, and
            groups may differ in size.
        low: exclusive lower bound of the mean. Means and bounds are compared in float32, the dtype of scores.
        high: exclusive upper bound of the mean.

    Returns:
        [B] bool, the same for all responses of a group.

    Raises:
        ValueError: shapes differ, low is not below high, or a score is NaN or infinite.
    """
    if not low < high:
        raise ValueError(f"low={low}, high={high}; set low < high, or no group can pass")
    groups = Groups(score_B, group_B)
    finite_B = score_B.isfinite()
    if not bool(finite_B.all()):
        # Every comparison with NaN is False: the group would be dropped silently.
        i = int((~finite_B).nonzero()[0])
        raise ValueError(f"score_B[{i}] is {score_B[i].item()}, in group {int(group_B[i])}; give it a finite score")
    mean_B = groups.mean_B.float()
    # Scores are float32, so a bound of 0.1 must be rounded to float32 too. Otherwise a mean of 0.1 could pass it.
    least, most = torch.tensor([low, high], dtype=torch.float32, device=mean_B.device)
    return (least < mean_B) & (mean_B < most)
