"""The engine that plays with the policy."""

from agents.player import Collected, open_player
from components.batch import Batch
from components.engines.config import SamplingConfig
from components.engines.weight_sync import WeightHandle
from core import BaseWorkload, rpc, trainer_invocation

from .. import remote_call
from ..config import MultiTurnConfig


class Rollout(BaseWorkload):
    """One engine."""

    config: MultiTurnConfig

    @trainer_invocation(blocking=False, idempotent=True, replay="last")
    def load(self, model_path: str) -> None:
        """Load the policy as it is at the start."""
        config = self.config
        self.player = open_player(
            model_path,
            config.rollout_engine(),
            config.agent,
            config.model.tokenizer,
            in_flight=config.asynchronous.partial_rollout,
        )

    @trainer_invocation(idempotent=True, post_func=Batch.concat)
    def generate(self, prompts: Batch, sampling: SamplingConfig, alone: bool = False) -> Batch:
        """One episode per prompt; the prompts are split over the engines.

        Args:
            prompts: see `Player.play`, and for what is returned.
            sampling: of each turn.
            alone: one answer each, without the agent.
        """
        return self.player.play(prompts, sampling, alone=alone)

    @trainer_invocation(idempotent=True)
    def begin(self, prompts: list[Batch | None], sampling: SamplingConfig) -> None:
        """Begin episodes that `collect` brings once they are whole groups; the list has an item for every engine."""
        for mine in prompts:
            if mine is not None:
                self.player.begin(mine, sampling)

    @trainer_invocation(idempotent=True)
    def collect(self, seconds: float) -> Collected:
        """Go on with what has begun, until a group has finished or the time is over."""
        return self.player.collect(seconds)

    @rpc(remote_call.receive_weights, idempotent=True, replay="last")
    def receive(self, handle: WeightHandle) -> None:
        """Sample from newer weights from here on."""
        self.player.receive(handle, verify=self.config.rollout.verify_weight_sync)

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """End the processes that the engine may have."""
        self.player.close()
