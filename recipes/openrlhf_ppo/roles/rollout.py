"""The engine that samples from the policy."""

from agents.player import Collected, open_player
from components.batch import Batch
from components.engines.config import SamplingConfig
from components.engines.weight_sync import WeightHandle
from core import BaseWorkload, rpc

from .. import remote_call
from ..config import PPOConfig
from ..data import model_options


class Rollout(BaseWorkload):
    """One engine."""

    config: PPOConfig

    @rpc(remote_call.rollout_init, idempotent=True, replay="last")
    def init_model(self, model_path: str) -> None:
        """Load the policy as it is at the start."""
        config, tokenizer = self.config, model_options(self.config).tokenizer
        in_flight = config.asynchronous.partial_rollout
        self.player = open_player(model_path, config.engine_config(), config.agent, tokenizer, in_flight=in_flight)

    @rpc(remote_call.generate_samples, idempotent=True)
    def generate(self, prompts: list[Batch], sampling: SamplingConfig, alone: bool = False) -> list[Batch]:
        """One answer or episode per prompt; the list has an item for every engine."""
        return [self.player.play(mine, sampling, alone=alone) for mine in prompts]

    @rpc(remote_call.begin_samples, idempotent=True)
    def begin(self, prompts: list[Batch | None], sampling: SamplingConfig) -> list[None]:
        """Begin answers that `collect` brings; the list has an item for every engine."""
        return [None if mine is None else self.player.begin(mine, sampling) for mine in prompts]

    @rpc(remote_call.collect_samples, idempotent=True)
    def collect(self, seconds: float) -> Collected:
        """Go on with what has begun, until a group has finished or the time is over."""
        return self.player.collect(seconds)

    @rpc(remote_call.receive_weights, idempotent=True, replay="last")
    def receive(self, handle: WeightHandle) -> None:
        """Sample from newer weights from here on."""
        self.player.receive(handle, verify=self.config.verify_weight_sync)

    @rpc(remote_call.sleep_rollout, idempotent=True)
    def sleep(self) -> int:
        """Free the accelerator; returns how many bytes."""
        return self.player.sleep()

    @rpc(remote_call.wake_rollout, idempotent=True)
    def wake(self, for_weights: bool) -> None:
        """Be ready to generate, or only to receive weights."""
        self.player.wake(for_weights)

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """End the processes that the engine may have."""
        self.player.close()
