"""GRPO in one file and one process, from prompts to an updated policy, for reading and for small experiments.

    bash recipes/grpo/run.sh                 # the full recipe; it also creates the demonstration's tiny policy
    .venv/bin/python -m plugins.demo.warm_start  # prints the folder of that policy
    .venv/bin/python -m recipes.grpo.single_file MODEL --seed 7  # that folder, or any causal language model

Compared with PPO: GRPO has no critic, so there are no values, no value loss and no GAE. It samples a group of responses
to each prompt. The advantage of a response is its normalised reward within its group, and all its tokens share it. The
clipped ratio is that of PPO. The KL to the reference model, if set, is added to the loss and not to the reward.

Shape suffixes: `B` responses (P prompts times G samples), `N` all tokens of these prompts and responses, end to end,
without padding. Entry t belongs to token t: its log-probability is conditioned on the tokens before it.
With the same settings the recipe in local mode has the same rewards and losses, on a CPU to the last bit.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from tempfile import TemporaryDirectory

from torch import Tensor, nn

from components.batch import Batch
from components.data.minibatches import shuffled_minibatches
from components.data.prompts import PromptSource, load_rows
from components.data.samples import add_rewards, for_samples
from components.data.text import load_tokenizer
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.generate.opening import open_rollout_engine
from components.models.causal import token_logprobs
from components.models.loading import load_policy
from components.rewards.opening import open_reward
from components.rl.advantages import group_norm
from components.rl.aggregation import LossOutput, Totals, aggregate, reduce_loss
from components.rl.kl import kl_estimate
from components.rl.masked import token_mean
from components.rl.policy_losses import ppo_loss
from components.train.config import FrozenConfig, PassLimits, TrainOptions
from components.train.frozen import open_frozen_policy
from components.train.opening import open_engine
from components.weights.publisher import WeightPublisher


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings, each an option of the command line. The defaults are those of the demonstration, tiny.yaml."""

    data: str = "task:sort"  # a generated task, or a file whose rows have `input` and `label`
    reward: str = "sort"  # name of a scorer, or a file with `def reward_func(queries, prompts, labels, **kwargs)`
    steps: int = 40  # number of training steps
    prompts_per_step: int = 64  # P
    samples_per_prompt: int = 8  # G, the size of a group
    max_new_tokens: int = 8  # maximum length of a response, with its end token
    temperature: float = 1.0  # sampling temperature; all log-probabilities are computed at the same temperature
    mini_batch_size: int = 128  # number of responses per optimizer step; B = P * G is strictly on-policy
    epochs: int = 1  # number of passes over the responses of a step
    max_tokens: int = 16384  # maximum number of tokens in a micro-batch; changes memory, not results
    learning_rate: float = 1e-4  # learning rate of AdamW
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    kl_coef: float = 0.0  # weight of the KL to the reference model, the starting policy; 0 loads none
    seed: int = 42  # seed of the prompt order, the samples and the mini-batches


def train(model_path: str, settings: Settings) -> Iterator[dict[str, float]]:
    """Train the policy in the folder `model_path`. Yield the metrics of each step."""
    tokenizer = load_tokenizer(model_path)
    num_prompts = settings.steps * settings.prompts_per_step
    rows = load_rows(settings.data, label_key="label", max_rows=num_prompts, seed=settings.seed)
    source = PromptSource(rows, tokenizer, settings.seed)  # shuffled, and repeated without end
    # Two copies of the policy: one engine generates, with a key-value cache; the other one trains, with AdamW.
    rollout_engine = open_rollout_engine(model_path, HFRolloutConfig())
    sampling = SamplingConfig(
        temperature=settings.temperature, max_new_tokens=settings.max_new_tokens, seed=settings.seed
    )
    options = TrainOptions(learning_rate=settings.learning_rate, max_tokens=settings.max_tokens)
    num_updates = settings.prompts_per_step * settings.samples_per_prompt // settings.mini_batch_size  # per epoch
    config = options.for_run(settings.steps * settings.epochs * num_updates, settings.seed)
    train_engine = open_engine(load_policy(model_path, packing=None), config)
    frozen = FrozenConfig(limits=PassLimits(max_tokens=settings.max_tokens), packing=None)
    reference = open_frozen_policy(model_path, frozen) if settings.kl_coef else None

    def logprobs(model: nn.Module, micro: Batch) -> Tensor:
        return token_logprobs(model, micro, settings.temperature).logprob_N

    with open_reward(settings.reward) as reward, TemporaryDirectory() as folder:
        publisher = WeightPublisher(folder)
        for step in range(1, settings.steps + 1):
            start = time.monotonic()
            # 1. Rollout: G responses to each of P prompts. Each token is a function of seed, step, prompt, sample and
            #    position, because the engine keeps no random state.
            prompts = for_samples(source.take(settings.prompts_per_step), settings.samples_per_prompt)
            rollouts = rollout_engine.generate(prompts, replace(sampling, step=step))
            # 2. Reward: one number per response, from its text and the label of its prompt.
            rollouts = add_rewards(rollouts, reward, tokenizer, print)
            # 3. Log-probabilities before the update, from the training engine: those of the rollout engine differ by
            #    rounding, and with them the ratio would not start at exactly 1.
            columns = {"old_logprob": train_engine.forward(rollouts, logprobs)}
            if reference is not None:
                columns["reference_logprob"] = reference.forward(rollouts, logprobs)
            # 4. Advantage: (reward - mean of its group) / standard deviation of its group, the same for each token.
            advantage_B = group_norm(rollouts["reward"], rollouts["prompt_id"])
            experience = rollouts.with_tokens(**columns, advantage=advantage_B[rollouts.sequence_ids])
            # 5. Update: one optimizer step per mini-batch, with the summed gradient of its micro-batches. In the first
            #    one the policy is unchanged, so the loss uses its own log-probabilities and the ratio is exactly 1.
            order = shuffled_minibatches(len(experience), num_updates, settings.epochs, seed=settings.seed, step=step)
            first, *others = (experience.select(indices) for indices in order)
            loss = lambda *arguments: policy_loss(*arguments, settings=settings)
            updates = [train_engine.train_step(part, loss) for part in (first.without("old_logprob"), *others)]
            # 6. Weight sync: the next responses are sampled from the policy that was just trained.
            rollout_engine.receive(publisher.publish(step, train_engine.gathered_parameters()))
            means = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
            means["reward"] = float(rollouts["reward"].mean())
            yield means | {"step": step, "seconds": time.monotonic() - start}


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, settings: Settings) -> LossOutput:
    """Return the clipped loss of PPO plus the KL penalty, divided by the tokens of the whole mini-batch (`totals`)."""
    output = token_logprobs(model, micro, settings.temperature, with_entropy=True, mask="action_mask")
    assert output.entropy_N is not None
    mask_N = micro["action_mask"]  # True for the tokens of responses
    # With r = exp(logprob - old_logprob), the loss of a token is max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).
    old_logprob_N = micro["old_logprob"] if "old_logprob" in micro else output.logprob_N.detach()
    columns = (output.logprob_N, old_logprob_N, micro["advantage"], mask_N)
    tokens = ppo_loss(*columns, clip_low=settings.clip_low, clip_high=settings.clip_high)
    policy = reduce_loss(tokens, mask_N, micro.lengths, totals)
    metrics = policy.metrics | {"entropy": token_mean(output.entropy_N.detach(), mask_N, totals.tokens)}
    if settings.kl_coef == 0:
        return LossOutput(policy.loss, metrics)
    # The k3 estimator: exp(-d) - 1 + d with d = logprob - reference_logprob. It is never negative.
    kl_N = kl_estimate(output.logprob_N, micro["reference_logprob"], mask_N, "k3")
    kl = aggregate(kl_N, mask_N, micro.lengths, totals)
    return LossOutput(policy.loss + settings.kl_coef * kl, metrics | {"kl_loss": kl.detach()})


def main() -> None:
    """Train with the settings of the command line. Print one line of metrics per step."""
    parser = argparse.ArgumentParser(prog="python -m recipes.grpo.single_file", description="GRPO in one process.")
    parser.add_argument("model", help="folder of a causal language model")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default, help="(%(default)s)")
    options = vars(parser.parse_args())
    printed = ("step", "reward", "loss", "approx_kl", "entropy", "seconds")
    for metrics in train(options.pop("model"), Settings(**options)):
        print("  ".join(f"{name}={metrics[name]:.4g}" for name in printed))


if __name__ == "__main__":
    main()
