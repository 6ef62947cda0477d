"""What this recipe teaches with: what every turn of an episode is worth, and the loss.

Change a line here in a copy of the folder, and it is another algorithm. `B` episodes (a response that branched is
several), `N` all tokens end to end, `X` whatever is compared: episodes, or their turns; entry t of a per-token column
speaks about token t.
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
    """Add `shaped_reward` [B], `advantage` [N] and, where it is asked for, `correction` [N] to a step's episodes.

    What a turn or an episode has earned is compared with others of its prompt, and stands at all of its tokens; from
    each the KL that is still to come goes off; and all is whitened over the step. `shaped_reward` is the mean over an
    episode's tokens before the KL.
    """
    own, mask_N, lengths_B = config.algorithm, samples["action_mask"], samples.lengths
    advantage_N = worth(samples, config)
    samples = samples.with_sequences(shaped_reward=sequence_means(advantage_N, mask_N, lengths_B))
    if config.needs_reference:
        kl_N = kl_estimate(samples["logprob"], samples["reference_logprob"], mask_N, own.kl_estimator)
        advantage_N = advantage_N - own.kl_coef * returns.discounted_returns(kl_N, mask_N, lengths_B, 1.0)
    if own.whitens:
        advantage_N = returns.whiten(advantage_N, mask_N)
    samples = samples.with_tokens(advantage=advantage_N)
    return with_correction(samples, own.correction, *own.correction_range)


def worth(samples: Batch, config: MultiTurnConfig) -> Tensor:
    """[N] what each token's turn, or its whole episode, has earned beside others of the prompt."""
    own, mask_N, prompt_B = config.algorithm, samples["action_mask"], samples["prompt_id"]
    if own.credit == "trajectory":
        worth_B = compare_samples(samples, samples["reward"], partial(compared, config=config))
        return worth_B[samples.sequence_ids] * mask_N
    if "branch" in samples and int(samples["branch"].max()):
        raise ValueError("algorithm.credit=turn compares turns, and this agent's episodes branch; set trajectory")
    columns = (samples["turn_reward"], mask_N, samples.lengths, prompt_B)
    compare = partial(compared, config=config)
    return returns.turn_advantages(*columns, own.turn_gamma, compare, samples["turn"])


def compared(reward_X: Tensor, group_X: Tensor, config: MultiTurnConfig) -> Tensor:
    """[X] rewards beside those of their group."""
    match config.algorithm.estimator:
        case "reinforce":
            return reward_X
        case "reinforce_baseline" | "dr_grpo":
            return advantages.group_mean_baseline(reward_X, group_X)
        case "rloo":
            return advantages.rloo(reward_X, group_X)
        case "grpo":
            return advantages.group_norm(reward_X, group_X, config.algorithm.std_epsilon)
        case "gpg":
            return group_advantages.gpg(reward_X, group_X)
        case "grpo_passk":
            return group_advantages.grpo_passk(reward_X, group_X)


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: MultiTurnConfig) -> LossOutput:
    """The clipped surrogate over the tokens that the policy wrote."""
    longest = config.rollout.max_new_tokens * config.agent.max_turns
    return clipped_policy_loss(model, micro, totals, config, config.algorithm.loss_aggregation, longest)
