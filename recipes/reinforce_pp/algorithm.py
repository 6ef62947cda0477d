"""The algorithm of REINFORCE++: token-level returns and the policy loss.

To change the algorithm, copy the folder and edit this file. Shape suffixes: `B` responses, `N` all tokens of these
responses end to end, without padding. Entry t of a per-token column belongs to token t.
"""

from torch import Tensor, nn

from components.batch import Batch
from components.data.samples import compare_samples, with_correction
from components.rl import advantages, returns
from components.rl.aggregation import LossOutput, Totals
from components.rl.kl import kl_estimate
from components.rl.token_rewards import token_rewards
from training.roles.policy_loss import clipped_policy_loss

from .config import ReinforceConfig


def add_advantages(samples: Batch, config: ReinforceConfig) -> Batch:
    """Add `shaped_reward` [B] and `advantage` [N], and `correction` [N] if `algorithm.correction` is set.

    The reward of a token is minus the weighted KL, plus the reward of the response at the last token. The advantage is
    the discounted return from the token on, whitened over all tokens of the step.

    Args:
        samples: all responses of a step.
        config: the configuration of the run.
    """
    algorithm = config.algorithm
    mask_N = samples["action_mask"]
    reward_B = shaped_rewards(samples, config)
    kl_N = None
    if config.needs_reference:
        kl_N = kl_estimate(samples["logprob"], samples["reference_logprob"], mask_N, algorithm.kl_estimator)
    reward_N = token_rewards(reward_B, kl_N, algorithm.kl_coef, mask_N, samples.lengths)
    advantage_N = returns.discounted_returns(reward_N, mask_N, samples.lengths, algorithm.gamma)
    if algorithm.whiten:
        # Over the whole step, not per mini-batch: every mini-batch then has the same scale.
        advantage_N = returns.whiten(advantage_N, mask_N)
    samples = samples.with_sequences(shaped_reward=reward_B).with_tokens(advantage=advantage_N)
    return with_correction(samples, algorithm.correction, *algorithm.correction_range)


def shaped_rewards(samples: Batch, config: ReinforceConfig) -> Tensor:
    """Return the rewards [B] minus `algorithm.baseline`, clamped to `algorithm.reward_range`."""
    reward_B = samples["reward"]
    if config.algorithm.baseline == "group_mean":
        reward_B = compare_samples(samples, reward_B, advantages.group_mean_baseline)
    elif config.algorithm.baseline == "leave_one_out":
        reward_B = compare_samples(samples, reward_B, advantages.rloo)
    # Bounds the effect of a single outlier on the whitening statistics of the whole step.
    return reward_B.clamp(*config.algorithm.reward_range)


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: ReinforceConfig) -> LossOutput:
    """Return the clipped surrogate loss of a micro-batch. All tokens of the optimizer step have equal weight."""
    return clipped_policy_loss(model, micro, totals, config)
