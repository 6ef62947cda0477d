"""What an answer is worth."""

import torch
from torch import Tensor

from components.batch import Batch
from components.data.rewards import RewardOutput, RewardSource, open_reward
from components.engines.reward_model import RewardModel
from core import BaseWorkload, rpc

from .. import remote_call
from ..config import PPOConfig
from ..data import open_tokenizer

NAMED_FAILURES = 3
"""So many answers of a batch whose reward failed are named on the terminal; all are counted."""


class Reward(BaseWorkload):
    """One instance of reward models, of reward code, or of a reward server's client."""

    config: PPOConfig

    @rpc(remote_call.reward_init, idempotent=True, replay="last")
    def init_model(self, tokenizer_path: str) -> None:
        """Load the models, or start the processes that run the code and the tokenizer that makes text for it."""
        config = self.config
        self.source: RewardSource | None = None
        max_tokens, max_sequences = config.forward_limits
        self.models = [
            RewardModel(
                path,
                dtype=config.dtype,
                normalize=config.normalize_reward,
                value_head_prefix=config.value_head_prefix,
                attn_implementation=config.attn_implementation,
                max_tokens=max_tokens,
                max_sequences=max_sequences,
            )
            for path in config.reward_models
        ]
        if config.reward_code is not None:
            self.tokenizer = open_tokenizer(config, tokenizer_path)
            self.source = open_reward(config.reward_code, config.reward_settings())

    @rpc(remote_call.reward_forward, idempotent=True)
    def forward(self, samples: Batch) -> Batch:
        """`reward`, `score` and `reward_failed` per answer, and whatever else is logged."""
        columns = self.by_models(samples) if self.source is None else self.by_code(samples, self.source)
        return Batch(samples.lengths, {}, columns)

    def by_models(self, samples: Batch) -> dict[str, Tensor]:
        """The weighted sum of the reward models' scores."""
        tokens = samples.only("tokens")
        rewards = [model.score(tokens) for model in self.models]
        weights = self.config.reward_weights or [1.0] * len(rewards)
        total_B = torch.stack([weight * reward_B for weight, reward_B in zip(weights, rewards, strict=True)]).sum(0)
        each = {f"log_model_{i}": reward_B for i, reward_B in enumerate(rewards, 1)} if len(rewards) > 1 else {}
        return {"reward": total_B, "score": total_B, "reward_failed": torch.zeros_like(total_B), **each}

    def by_code(self, samples: Batch, source: RewardSource) -> dict[str, Tensor]:
        """What reward code says about the text of the answers."""
        rows = [samples.row(i, "tokens").tolist() for i in range(len(samples))]
        starts = samples["prompt_length"].tolist()
        answers = [row[start:] for row, start in zip(rows, starts, strict=True)]
        output = source(
            self.tokenizer.batch_decode(rows, skip_special_tokens=False),
            samples["prompt"],
            samples["label"],
            responses=self.tokenizer.batch_decode(answers, skip_special_tokens=True),
        )
        self.name_failures(output)
        failed_B = torch.zeros(len(samples))
        failed_B[list(output.failures)] = 1.0
        logs = {f"log_{name}": value_B for name, value_B in output.logs.items()}
        return {"reward": output.reward_B, "score": output.score_B, "reward_failed": failed_B, **logs}

    def name_failures(self, output: RewardOutput) -> None:
        """Say which answers have reward 0 because their reward could not be computed."""
        for index, reason in list(output.failures.items())[:NAMED_FAILURES]:
            self.say(f"answer {index} gets reward 0, because its reward failed: {reason}")
        if len(output.failures) > NAMED_FAILURES:
            self.say(f"and {len(output.failures) - NAMED_FAILURES} more failed")

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """End the processes of reward code."""
        if self.source is not None:
            self.source.close()
