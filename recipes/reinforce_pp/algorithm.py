"""What makes this REINFORCE++: what every token of a response is worth, and the loss.

Change a line here in a copy of the folder, and it is another algorithm. `B` responses, `N` all tokens end to end; entry
t of a per-token column speaks about token t.
"""

from torch import Tensor, nn

from components.batch import Batch
from components.data.samples import compare_samples, with_correction
from components.rl import advantages, returns
from components.rl.aggregation import LossOutput, Totals
from components.rl.kl import kl_estimate
from components.rl.rewards import token_rewards
from training.roles.policy_loss import clipped_policy_loss

from .config import ReinforceConfig


def add_advantages(samples: Batch, config: ReinforceConfig) -> Batch:
    """Add `shaped_reward` [B] and `advantage` [N] to a step's responses.

    A token earns less KL on the way, and the response's reward at its end; its advantage is what is still to come,
    whitened over the whole step.
    """
    own, mask_N = config.algorithm, samples["action_mask"]
    reward_B, kl_N = shaped_rewards(samples, config), None
    if config.needs_reference:
        kl_N = kl_estimate(samples["logprob"], samples["reference_logprob"], mask_N, own.kl_estimator)
    reward_N = token_rewards(reward_B, kl_N, own.kl_coef, mask_N, samples.lengths)
    advantage_N = returns.discounted_returns(reward_N, mask_N, samples.lengths, own.gamma)
    if own.whiten:
        advantage_N = returns.whiten(advantage_N, mask_N)
    samples = samples.with_sequences(shaped_reward=reward_B).with_tokens(advantage=advantage_N)
    return with_correction(samples, own.correction, *own.correction_range)


def shaped_rewards(samples: Batch, config: ReinforceConfig) -> Tensor:
    """[B] rewards less their baseline, cut to their range."""
    reward_B = samples["reward"]
    if config.algorithm.baseline == "group_mean":
        reward_B = compare_samples(samples, reward_B, advantages.group_mean_baseline)
    elif config.algorithm.baseline == "leave_one_out":
        reward_B = compare_samples(samples, reward_B, advantages.rloo)
    return reward_B.clamp(*config.algorithm.reward_range)


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: ReinforceConfig) -> LossOutput:
    """The clipped surrogate, each token the same."""
    return clipped_policy_loss(model, micro, totals, config)
