"""The engine that samples from the policy."""

from __future__ import annotations

import logging
from typing import cast

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.generate.opening import open_rollout_engine
from components.generate.sampler import Collected, GroupSampler, Sampler
from components.models.device import is_engine_dead
from components.registry import load
from components.weights.carrier import carrier_class
from components.weights.publisher import WeightHandle, nearby
from core import BaseWorkload, rpc, trainer_invocation
from training import remote_call
from training.options.rl_options import RLOptions

_log = logging.getLogger(__name__)


class SamplingWorker(BaseWorkload):
    """What every role that samples does with its engine."""

    sampler: Sampler
    """A rollout engine; with an agent, or with responses that stay in flight, the runner of episodes."""
    received: WeightHandle | None = None
    """The version that came last; None: the weights are as they were loaded."""

    def open_sampler(self, model_path: str) -> None:
        """Load the policy as it is at the start into an engine."""
        config = self.config
        if config.agent.func_path is None and not config.asynchronous.partial_rollout:
            engine = open_rollout_engine(model_path, config.rollout_engine())
            engine.max_tokens = config.agent.max_tokens
            self.sampler = engine
            return
        open_runner = load("agents", "sampler")
        self.sampler = open_runner(model_path, config.rollout_engine(), config.agent, config.model.tokenizer)

    @rpc(remote_call.receive_weights, idempotent=True, replay="last")
    def receive_weights(self, handle: WeightHandle) -> dict[str, float]:
        """Sample from newer weights from here on. An engine that sleeps wakes as far as they need. Returns what memory
        of a GPU the engine has taken.
        """
        self.sampler.wake(for_weights=True)
        is_here = self.sampler.weight_version == handle.version and self.sampler.has_weights
        parts = 1 if is_here else self.config.rollout.tensor_parallel
        with nearby(handle, self.shared_dir / f"arriving-{self.rank}", readers=parts) as here:
            self.sampler.receive(here, verify=self.config.rollout.verify_weight_sync)
        self.received = handle
        return self.sampler.gpu_memory()

    @rpc(idempotent=True)
    def sleep_engine(self) -> int:
        """Free the accelerator until `wake_engine`; returns how many bytes.

        Weights that were published are dropped, not kept by every engine: they come again with the next version, or,
        where none follows, from the last. What adapters are added to comes with none.
        """
        comes_again = self.received is not None and not self.received.adapter_scale
        return self.sampler.sleep(2 if comes_again else 1)

    @rpc(idempotent=True)
    def wake_engine(self) -> None:
        """Be ready to generate."""
        if self.received is not None and not self.sampler.has_weights:
            self.receive_weights(self.received)
        self.sampler.wake()

    @rpc(idempotent=True)
    def begin(self, prompts: list[Batch | None], sampling: SamplingConfig) -> list[None]:
        """Begin responses that `collect` brings once they are whole groups; the list has an item for every engine."""
        sampler = cast("GroupSampler", self.sampler)
        return [None if mine is None else sampler.begin(mine, sampling) for mine in prompts]

    @rpc(idempotent=True)
    def collect(self, seconds: float) -> Collected:
        """Continue what has begun, until a group has finished or the time is over."""
        return cast("GroupSampler", self.sampler).collect(seconds)

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """End the processes that the engine may have."""
        self.sampler.close()


class RolloutWorker(SamplingWorker):
    """One engine."""

    config: RLOptions

    @trainer_invocation(blocking=False, idempotent=True, replay="last")
    def load(self, model_path: str) -> None:
        """Load the policy as it is at the start."""
        self.open_sampler(model_path)

    @trainer_invocation(idempotent=True, post_func=Batch.concat)
    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """One response per prompt, or one episode; the prompts are split over the engines.

        Returns:
            tokens, action_mask and rollout_logprob per token; prompt_length, truncated, weight_version per response.
        """
        return self.sampler.generate(prompts, sampling)

    @rpc(remote_call.receive_sent, idempotent=True)
    def receive_sent(self, version: int) -> None:
        """Take the weights that the ranks send while they gather them, where they do. What fails here is made good by
        `receive_weights`, which follows.
        """
        own = self.config.rollout
        route = None if self.received is None else self.received.route
        reader = 1 + self.rank * own.tensor_parallel
        handle = carrier_class(own.weight_sync).announced(version, self.shared_dir, route, reader)
        if handle is None:
            return
        self.sampler.wake(for_weights=True)
        try:
            self.sampler.receive(handle, verify=own.verify_weight_sync)
        except Exception as error:  # vLLM gives what its processes raise no type of their own
            if is_engine_dead(error):
                raise
            _log.warning("the engine reads version %d of the weights as they were published: %r", version, error)

    def is_fatal(self, error: Exception) -> bool:
        """See `BaseWorkload.is_fatal`: a new engine takes the place of one that is dead or out of memory."""
        return is_engine_dead(error)
