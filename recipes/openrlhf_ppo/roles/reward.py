"""The reward role: scores responses by reward models, reward code, or servers."""

import torch
from torch import Tensor

from components.batch import Batch
from components.data.samples import add_rewards
from components.models.reward_model import RewardModel
from components.rewards.base import RewardSource
from components.rewards.opening import open_reward
from core import rpc
from training.roles.frozen import FrozenRank, FrozenWorker

from .. import remote_call
from ..config import PPOConfig


class Reward(FrozenWorker):
    """One worker with reward models, reward code, or the client of a reward server."""

    config: PPOConfig

    @rpc(remote_call.reward_init, idempotent=True, replay="last")
    def init_model(self, tokenizer_path: str) -> None:
        """Load the reward models, or the tokenizer and the processes of reward code."""
        options = self.config.reward_model
        self.models = [
            RewardModel(
                path,
                self.config.frozen_engine,
                normalize=options.normalize,
                value_head_prefix=options.value_head_prefix,
                attn_implementation=self.config.model.attn_implementation,
            )
            for path in options.paths
        ]
        sources = (self.config.reward_source, self.config.reward.heldout_source)
        if sources != (None, None):
            self.tokenizer = self.config.model.tokenizer(tokenizer_path)
        self.source, self.heldout_source = map(self.opened, sources)

    def opened(self, spec: str | None) -> RewardSource | None:
        """Open reward code or servers. None if `spec` is None."""
        if spec is None:
            return None
        return open_reward(spec, self.config.reward.settings())

    @rpc(remote_call.reward_forward, idempotent=True)
    def forward(self, samples: Batch, heldout: bool = False, step: int = 0) -> Batch:
        """Compute `reward`, `score` and `reward_failed` per response, and further columns to log."""
        if self.source is None:
            columns = self.by_models(samples)
        else:
            columns = self.by_code(samples, self.source, step)
        if heldout and self.heldout_source is not None:
            scored = self.by_code(samples, self.heldout_source, step)
            logged: dict[str, Tensor] = {}
            for name, column in columns.items():
                if name in scored and name.startswith("log_"):
                    # Both rewards log this number. The held-out reward keeps the name, and that of the training reward
                    # is logged under reward/. Otherwise one would replace the other.
                    logged[f"log_reward/{name.removeprefix('log_')}"] = column
                elif name.startswith("log_"):
                    logged[name] = column
            columns = logged | scored | {"log_reward": columns["reward"]}
        return Batch(samples.lengths, {}, columns)

    def by_models(self, samples: Batch) -> dict[str, Tensor]:
        """Return the weighted sum of the reward models' scores."""
        tokens = samples.only("tokens")
        rewards = [model.score(tokens) for model in self.models]
        weights = self.config.reward_model.weights or [1.0] * len(rewards)
        total_B = torch.stack([weight * reward_B for weight, reward_B in zip(weights, rewards, strict=True)]).sum(0)
        columns = {"reward": total_B, "score": total_B, "reward_failed": torch.zeros_like(total_B)}
        if len(rewards) > 1:
            # Logged one by one, because a sum hides a model whose scores are of another size.
            columns |= {f"log_model_{i}": reward_B for i, reward_B in enumerate(rewards, 1)}
        return columns

    def by_code(self, samples: Batch, source: RewardSource, step: int) -> dict[str, Tensor]:
        """Return the rewards that reward code or servers give to the text of the responses."""
        scored = add_rewards(samples, source, self.tokenizer, self.info, step)
        return {name: column for name, column in scored.per_sequence.items() if name not in samples}

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """End the processes of reward code."""
        for source in (self.source, self.heldout_source):
            if source is not None:
                source.close()


class RewardRank(FrozenRank, Reward):
    """One rank of sharded reward models."""

    @rpc(remote_call.reward_forward)
    def forward(self, samples: Batch, heldout: bool = False, step: int = 0) -> Batch:
        """See `Reward.forward`. Each rank receives a part of the batch."""
        return super().forward(samples, heldout, step)
