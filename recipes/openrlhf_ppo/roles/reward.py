"""What a response is worth."""

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
    """One instance of reward models, of reward code, or of a reward server's client."""

    config: PPOConfig

    @rpc(remote_call.reward_init, idempotent=True, replay="last")
    def init_model(self, tokenizer_path: str) -> None:
        """Load the models, or start the processes that run the code and the tokenizer that makes text for it."""
        own = self.config.reward_model
        self.models = [
            RewardModel(
                path,
                self.config.frozen_engine,
                normalize=own.normalize,
                value_head_prefix=own.value_head_prefix,
                attn_implementation=self.config.model.attn_implementation,
            )
            for path in own.paths
        ]
        source, heldout_source = self.config.reward_source, self.config.reward.heldout_source
        if source is not None or heldout_source is not None:
            self.tokenizer = self.config.model.tokenizer(tokenizer_path)
        self.source = self.opened(source)
        self.heldout_source = self.opened(heldout_source)

    def opened(self, spec: str | None) -> RewardSource | None:
        """Reward code or servers, where they are asked for."""
        return None if spec is None else open_reward(spec, self.config.reward.settings())

    @rpc(remote_call.reward_forward, idempotent=True)
    def forward(self, samples: Batch, heldout: bool = False, step: int = 0) -> Batch:
        """`reward`, `score` and `reward_failed` per response, and whatever else is logged."""
        columns = self.by_models(samples) if self.source is None else self.by_code(samples, self.source, step)
        if heldout and self.heldout_source is not None:
            scored = self.by_code(samples, self.heldout_source, step)
            # A number that both rewards log is the held-out one's; the other is logged beside the mean of its reward.
            logged = {
                f"log_reward/{name.removeprefix('log_')}" if name in scored else name: column
                for name, column in columns.items()
                if name.startswith("log_")
            }
            columns = logged | scored | {"log_reward": columns["reward"]}
        return Batch(samples.lengths, {}, columns)

    def by_models(self, samples: Batch) -> dict[str, Tensor]:
        """The weighted sum of the reward models' scores."""
        tokens = samples.only("tokens")
        rewards = [model.score(tokens) for model in self.models]
        weights = self.config.reward_model.weights or [1.0] * len(rewards)
        total_B = torch.stack([weight * reward_B for weight, reward_B in zip(weights, rewards, strict=True)]).sum(0)
        each = {f"log_model_{i}": reward_B for i, reward_B in enumerate(rewards, 1)} if len(rewards) > 1 else {}
        return {"reward": total_B, "score": total_B, "reward_failed": torch.zeros_like(total_B), **each}

    def by_code(self, samples: Batch, source: RewardSource, step: int) -> dict[str, Tensor]:
        """What reward code says about the text of the responses."""
        scored = add_rewards(samples, source, self.tokenizer, self.info, step)
        return {name: column for name, column in scored.per_sequence.items() if name not in samples}

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """End the processes of reward code."""
        for source in (self.source, self.heldout_source):
            if source is not None:
                source.close()


class RewardRank(FrozenRank, Reward):
    """One rank of reward models that are sharded over them; they compute together."""

    @rpc(remote_call.reward_forward)
    def forward(self, samples: Batch, heldout: bool = False, step: int = 0) -> Batch:
        """See `Reward.forward`; every rank has a part."""
        return super().forward(samples, heldout, step)
