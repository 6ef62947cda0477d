"""GRPO in one file and one process: from prompts to an updated policy. For reading, and for a laptop.

    bash recipes/grpo/run.sh                 # the whole recipe; it makes the tiny policy of the demonstration
    .venv/bin/python -m plugins.demo.warm_start  # prints the folder of that policy
    .venv/bin/python -m recipes.grpo.single_file MODEL --seed 7  # that folder, or any causal language model

If you know PPO: GRPO has no critic, so there are no values, no value loss and no GAE. It samples a group of responses
to each prompt; a response is as good as its reward is above the mean of its group, and all of its tokens share that one
advantage. The clipped ratio is PPO's. The KL to the reference model, if any, is in the loss and not in the reward.

Names end in shapes: `B` responses, which are P prompts times G samples of each, and `N` all tokens of these prompts and
responses, end to end, without padding. Entry t is about token t: its log-probability is given the tokens before it.
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
    """Each is an option of the command line. The defaults are those of the demonstration, tiny.yaml."""

    data: str = "task:sort"  # a generated task, or a file whose rows have `input` and `label`
    reward: str = "sort"  # a scorer by name, or a file with `def reward_func(queries, prompts, labels, **kwargs)`
    steps: int = 40  # each from new prompts to new weights
    prompts_per_step: int = 64  # P
    samples_per_prompt: int = 8  # G, the size of a group
    max_new_tokens: int = 8  # of a response, with its end token
    temperature: float = 1.0  # of sampling, and so of all log-probabilities
    mini_batch_size: int = 128  # responses of an optimizer step; B = P * G is strictly on-policy
    epochs: int = 1  # times that the responses are trained on
    max_tokens: int = 16384  # of a micro-batch; changes memory, not results
    learning_rate: float = 1e-4  # of AdamW
    clip_low: float = 0.2  # the ratio is clipped at 1 - clip_low
    clip_high: float = 0.2  # and at 1 + clip_high
    kl_coef: float = 0.0  # weight of the KL to the reference model, the policy at the start; 0: none is loaded
    seed: int = 42  # of prompts, samples and mini-batches


def train(model_path: str, own: Settings) -> Iterator[dict[str, float]]:
    """Train the policy at `model_path`; yields the metrics of each step."""
    tokenizer = load_tokenizer(model_path)
    rows = load_rows(own.data, label_key="label", max_rows=own.steps * own.prompts_per_step, seed=own.seed)
    source = PromptSource(rows, tokenizer, own.seed)  # shuffled, and without end

    # The policy is there twice: one engine generates, with a key-value cache; the other one trains, with AdamW.
    rollout_engine = open_rollout_engine(model_path, HFRolloutConfig())
    sampling = SamplingConfig(temperature=own.temperature, max_new_tokens=own.max_new_tokens, seed=own.seed)
    options = TrainOptions(learning_rate=own.learning_rate, max_tokens=own.max_tokens)
    parts = own.prompts_per_step * own.samples_per_prompt // own.mini_batch_size
    config = options.for_run(own.steps * own.epochs * parts, own.seed)
    train_engine = open_engine(load_policy(model_path, packing=None), config)
    frozen = FrozenConfig(limits=PassLimits(max_tokens=own.max_tokens), packing=None)
    reference = open_frozen_policy(model_path, frozen) if own.kl_coef else None  # is never trained

    def logprobs(model: nn.Module, micro: Batch) -> Tensor:
        return token_logprobs(model, micro, own.temperature).logprob_N

    with open_reward(own.reward) as reward, TemporaryDirectory() as folder:
        publisher = WeightPublisher(folder)
        for step in range(1, own.steps + 1):
            start = time.monotonic()
            # 1. Rollout: G responses to each of P prompts. The engine keeps no random state: a token follows from seed,
            #    step, prompt, sample and position.
            prompts = for_samples(source.take(own.prompts_per_step), own.samples_per_prompt)
            rollouts = rollout_engine.generate(prompts, replace(sampling, step=step))
            # 2. Reward: a number per response, from its text and the label of its prompt.
            rollouts = add_rewards(rollouts, reward, tokenizer, print)
            # 3. Old log-probs: of the policy before the update, from the engine that trains. Those of the other engine
            #    differ by rounding, and with them the ratio would not start at exactly 1.
            columns = {"old_logprob": train_engine.forward(rollouts, logprobs)}
            if reference is not None:
                columns["reference_logprob"] = reference.forward(rollouts, logprobs)
            # 4. Advantage: (reward - mean of its group) / standard deviation of its group, the same for each token.
            advantage_B = group_norm(rollouts["reward"], rollouts["prompt_id"])
            experience = rollouts.with_tokens(**columns, advantage=advantage_B[rollouts.sequence_ids])
            # 5. Update: an optimizer step per mini-batch, whose gradient is the sum of those of its micro-batches. In
            #    the first the policy is still that of the old log-probs: the loss takes its own, and the ratio is 1.
            chosen = shuffled_minibatches(len(experience), parts, own.epochs, seed=own.seed, step=step)
            first, *others = (experience.select(indices) for indices in chosen)
            loss = lambda *arguments: policy_loss(*arguments, own=own)
            updates = [train_engine.train_step(part, loss) for part in (first.without("old_logprob"), *others)]
            # 6. Weight sync: the next responses are sampled from the policy that was just trained.
            rollout_engine.receive(publisher.publish(step, train_engine.gathered_parameters()))
            means = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
            means["reward"] = float(rollouts["reward"].mean())
            yield means | {"step": step, "seconds": time.monotonic() - start}


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, own: Settings) -> LossOutput:
    """PPO's clipped surrogate, and the KL penalty, of one micro-batch.

    Sums are divided by the tokens of the whole mini-batch (`totals`), so that micro-batches add up to its mean.
    """
    output = token_logprobs(model, micro, own.temperature, with_entropy=True)
    assert output.entropy_N is not None
    logprob_N, mask_N = output.logprob_N, micro["action_mask"]  # True for the tokens of responses
    # With r = exp(logprob - old_logprob) a token costs max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).
    old_logprob_N = micro["old_logprob"] if "old_logprob" in micro else logprob_N.detach()
    columns = (logprob_N, old_logprob_N, micro["advantage"], mask_N)
    tokens = ppo_loss(*columns, clip_low=own.clip_low, clip_high=own.clip_high)
    policy = reduce_loss(tokens, mask_N, micro.lengths, totals)
    metrics = policy.metrics | {"entropy": token_mean(output.entropy_N.detach(), mask_N, totals.tokens)}
    if own.kl_coef == 0:
        return LossOutput(policy.loss, metrics)
    # The estimator k3: with d = logprob - reference_logprob it is exp(-d) - 1 + d, which is never negative.
    kl_N = kl_estimate(logprob_N, micro["reference_logprob"], mask_N, "k3")
    kl = aggregate(kl_N, mask_N, micro.lengths, totals)
    return LossOutput(policy.loss + own.kl_coef * kl, metrics | {"kl_loss": kl.detach()})


def main() -> None:
    """Train as the command line says, and print a line per step."""
    parser = argparse.ArgumentParser(prog="python -m recipes.grpo.single_file", description="GRPO in one process.")
    parser.add_argument("model", help="folder of a causal language model")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default, help="(%(default)s)")
    options = vars(parser.parse_args())
    shown = ("step", "reward", "loss", "approx_kl", "entropy", "seconds")
    for metrics in train(options.pop("model"), Settings(**options)):
        print("  ".join(f"{name}={metrics[name]:.4g}" for name in shown))


if __name__ == "__main__":
    main()
