"""The algorithm of multi-turn RL: advantages of turns or episodes, and the policy loss.

To change the algorithm, copy the folder and edit this file. Shape suffixes: `B` sequences (an episode is one sequence,
or several if its agent branched), `N` all their tokens end to end, without padding, `X` the items that are compared:
episodes, or their turns. Entry t of a per-token column belongs to token t.
"""

from functools import partial

from torch import Tensor, nn

from components.batch import Batch
from components.data.samples import compare_samples, with_correction
from components.rl import advantages, group_advantages, returns
from components.rl.aggregation import LossOutput, Totals
from components.rl.kl import kl_estimate
from components.rl.masked import sequence_means
from training.roles.policy_loss import clipped_policy_loss

from .config import MultiTurnConfig


def add_advantages(samples: Batch, config: MultiTurnConfig) -> Batch:
    """Add `shaped_reward` [B] and `advantage` [N], and `correction` [N] if `algorithm.correction` is set.

    The return of a turn or an episode is compared with others of its prompt; all its tokens share the result. The
    remaining KL of the episode is subtracted at each token, and the advantages are then whitened over the step.
    `shaped_reward` is the mean advantage over the tokens of an episode before the KL and the whitening.

    Args:
        samples: all episodes of a step.
        config: the configuration of the run.
    """
    algorithm = config.algorithm
    mask_N = samples["action_mask"]
    advantage_N = compared_returns(samples, config)
    samples = samples.with_sequences(shaped_reward=sequence_means(advantage_N, mask_N, samples.lengths))
    if config.needs_reference:
        kl_N = kl_estimate(samples["logprob"], samples["reference_logprob"], mask_N, algorithm.kl_estimator)
        # The return of the KL is not discounted: `turn_gamma` counts turns, and the KL is per token.
        kl_return_N = returns.discounted_returns(kl_N, mask_N, samples.lengths, 1.0)
        advantage_N = advantage_N - algorithm.kl_coef * kl_return_N
    if algorithm.whitens:
        advantage_N = returns.whiten(advantage_N, mask_N)
    samples = samples.with_tokens(advantage=advantage_N)
    return with_correction(samples, algorithm.correction, *algorithm.correction_range)


def compared_returns(samples: Batch, config: MultiTurnConfig) -> Tensor:
    """Return [N] the return of each token's turn or episode, compared with others of the same prompt.

    Raises:
        ValueError: `algorithm.credit` is `turn` and an episode branches.
    """
    algorithm = config.algorithm
    mask_N = samples["action_mask"]
    compare = partial(compare_group, config=config)
    if algorithm.credit == "trajectory":
        advantage_B = compare_samples(samples, samples["reward"], compare)
        return advantage_B[samples.sequence_ids] * mask_N
    # `turn_advantages` would count each branch as another episode of the prompt.
    if "branch" in samples and int(samples["branch"].max()):
        raise ValueError(
            "algorithm.credit=turn compares turns, but the episodes of this agent branch; "
            "set algorithm.credit=trajectory"
        )
    columns = (samples["turn_reward"], mask_N, samples.lengths, samples["prompt_id"])
    return returns.turn_advantages(*columns, algorithm.turn_gamma, compare, samples["turn"])


def compare_group(return_X: Tensor, group_X: Tensor, config: MultiTurnConfig) -> Tensor:
    """Return [X] the advantages of returns within their group, by `algorithm.estimator`."""
    match config.algorithm.estimator:
        case "reinforce":
            return return_X
        case "reinforce_baseline" | "dr_grpo":
            return advantages.group_mean_baseline(return_X, group_X)
        case "rloo":
            return advantages.rloo(return_X, group_X)
        case "grpo":
            return advantages.group_norm(return_X, group_X, config.algorithm.std_epsilon)
        case "gpg":
            return group_advantages.gpg(return_X, group_X)
        case "grpo_passk":
            return group_advantages.grpo_passk(return_X, group_X)


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: MultiTurnConfig) -> LossOutput:
    """Return the clipped surrogate loss of a micro-batch over the tokens that the policy generated."""
    max_length = config.rollout.max_new_tokens * config.agent.max_turns
    return clipped_policy_loss(model, micro, totals, config, config.algorithm.loss_aggregation, max_length)
