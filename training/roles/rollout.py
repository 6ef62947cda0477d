"""Roles that sample from the policy with a rollout engine."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast
from uuid import uuid4

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.generate.opening import open_rollout_engine
from components.generate.sampler import Collected, GroupSampler, Sampler
from components.models.device import is_engine_dead
from components.registry import find, load
from components.weights.choice import TRANSPORT
from components.weights.publisher import WeightHandle
from components.weights.timing import SyncTimer
from core import BaseWorkload, rpc, trainer_invocation
from training import remote_call
from training.options.rl_options import RLOptions

_log = logging.getLogger(__name__)


class SamplingWorker(BaseWorkload):
    """Base class of the roles that sample. It manages the engine, its weights and its memory."""

    sampler: Sampler
    """A rollout engine. With an agent or partial rollouts, the runner of episodes around it."""
    received: WeightHandle | None = None
    """Handle of the newest weights received, or None if the engine still has the weights it loaded."""

    def open_sampler(self, model_path: str) -> None:
        """Load the initial policy into an engine."""
        config = self.config
        # The runner of episodes is a plug-in's. A single turn calls the engine directly, without a step in between.
        if config.agent.func_path is None and not config.asynchronous.partial_rollout:
            engine = open_rollout_engine(model_path, config.rollout_engine())
            engine.max_tokens = config.agent.max_tokens
            self.sampler = engine
            return
        open_runner = load("agents", "sampler")
        self.sampler = open_runner(model_path, config.rollout_engine(), config.agent, config.model.tokenizer)

    @rpc(remote_call.receive_weights, idempotent=True, replay="last")
    def receive_weights(self, handle: WeightHandle) -> dict[str, float]:
        """Load newer weights into the engine. A sleeping engine allocates the memory of its weights first.

        A version that is sent may be missed, for example by an engine that replaces another one. The engine then
        requests it before it generates.

        Returns:
            Metrics of the engine (see `RolloutEngine.metrics`), and the seconds `timing_s/sync_wake` and
            `timing_s/sync_load`.
        """
        timer = SyncTimer()
        with timer.measure("wake"):
            self.sampler.wake(for_weights=True)
        parts = self.config.rollout.tensor_parallel
        self.received = handle = replace(handle, reader=1 + self.rank * parts, parts=parts)
        arriving: AbstractContextManager[WeightHandle] = nullcontext(handle)
        if parts > 1 and handle.address is not None and not (handle.is_sent or self._has_received):
            copy = load("nearby copy", TRANSPORT, "placement.nodes")
            # Per rank: two engines of one machine would else write to the same files.
            arriving = copy(handle, self.shared_dir / f"arriving-{self.rank}")
        try:
            with timer.measure("load"), arriving as local_handle:
                self.sampler.receive(local_handle, verify=self.config.rollout.verify_weight_sync)
        except Exception as error:  # vLLM raises errors of its processes as plain Exception
            if not handle.is_sent or is_engine_dead(error):
                raise
            _log.warning("the engine lacks version %d of the weights, and will request it: %r", handle.version, error)
        return self.sampler.metrics() | {f"timing_s/sync_{part}": value for part, value in timer.seconds.items()}

    @rpc(idempotent=True)
    def check_engine(self, probe: Any) -> dict[str, float]:
        """Compare the engine with the policy, if its check is due. Return the metrics of its checks."""
        # Engines whose check is not due ignore the probe.
        return self.sampler.check(probe)

    @property
    def _has_received(self) -> bool:
        """True if the engine has the weights of the newest version that it was to receive."""
        if self.received is None:
            return True
        return self.sampler.has_weights and self.sampler.weight_version == self.received.version

    def _restore_weights(self) -> None:
        """Load the newest version if the engine lacks it. The ranks send it to this engine once more, unless it
        `is_kept` in its folder. If that transfer fails too, they write it to its folder.

        The ranks are idle meanwhile, as the trainer waits for this engine. If they train while engines generate,
        versions are kept.
        """
        if self.received is None or self._has_received:
            return
        handle = self.received
        if handle.is_sent and not handle.is_kept:
            again = replace(handle, resend=uuid4().hex)
            publishing = remote_call.publish_weights(handle.version, again)
            self.receive_weights(again)
            remote_call.published_handle(publishing)
            if self._has_received:
                return
            publishing = remote_call.publish_weights(handle.version, replace(again, is_sent=False))
            handle = remote_call.published_handle(publishing)
        self.receive_weights(replace(handle, is_sent=False))

    @rpc(idempotent=True)
    def sleep_engine(self) -> int:
        """Free the accelerator memory until `wake_engine`. Return the number of bytes freed.

        Published weights are dropped, because the engine can read them again: from the next version, or from the last
        one if there is no newer version. Base weights under adapters are kept, because they are never published.
        """
        comes_again = self.received is not None and not self.received.adapter_scale
        # Level 1 moves the weights to host memory, and level 2 drops them.
        return self.sampler.sleep(2 if comes_again else 1)

    @rpc(idempotent=True)
    def wake_engine(self) -> None:
        """Allocate the memory again and load the last weights if they were dropped, so that generation can start."""
        self._restore_weights()
        self.sampler.wake()

    @rpc(idempotent=True)
    def begin(self, prompts: list[Batch | None], sampling: SamplingConfig) -> list[None]:
        """Start responses that `collect` returns in complete groups. `prompts` has one item per engine."""
        self._restore_weights()
        sampler = cast("GroupSampler", self.sampler)
        return [None if batch is None else sampler.begin(batch, sampling) for batch in prompts]

    @rpc(idempotent=True)
    def collect(self, seconds: float) -> Collected:
        """Continue the started responses until a group is complete or `seconds` have passed."""
        self._restore_weights()
        return cast("GroupSampler", self.sampler).collect(seconds)

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """Stop the engine and its processes."""
        self.sampler.close()


class RolloutWorker(SamplingWorker):
    """One rollout engine of the policy."""

    config: RLOptions
    streamed: Any = None
    """Scores responses while others are generated, or None if the trainer scores them all."""

    @trainer_invocation(blocking=False, idempotent=True, replay="last")
    def load(self, model_path: str) -> None:
        """Load the initial policy."""
        self.open_sampler(model_path)
        open_streamed = find("streamed rewards", self.config.rollout.engine)
        self.streamed = open_streamed and open_streamed(self.config, self.sampler)

    @trainer_invocation(idempotent=True, post_func=Batch.concat)
    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Generate one response or one episode per prompt. The prompts are split over the engines.

        Returns:
            A batch with tokens, action_mask and rollout_logprob [N] per token, and prompt_length, truncated and
            weight_version [B] per response. See `PolicyRun.add_rewards` if it has rewards.
        """
        self._restore_weights()
        return (self.streamed or self.sampler).generate(prompts, sampling)

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """Stop the engine and the reward workers beside it."""
        if self.streamed:
            self.streamed.close()
        super().end()

    def is_fatal(self, error: Exception) -> bool:
        """Return True for a dead engine or one that is out of memory. A new engine replaces it."""
        return is_engine_dead(error)
