"""The policy: what trains it, what samples from it, and what it was at the start, in any combination in one process."""

from functools import partial

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.models.causal import policy_logprobs
from components.models.device import is_engine_dead
from components.train.frozen import open_frozen_policy
from core import Dispatch, register, rpc
from training import remote_call
from training.roles.policy import TrainedPolicy
from training.roles.ppo_loss import mark_tokens
from training.roles.rollout import SamplingWorker

from ..algorithm import minibatches, policy_loss
from ..config import VerlPPOConfig


class ActorRolloutRefWorker(TrainedPolicy, SamplingWorker):
    """One worker. The name of its role says what it is: `actor`, `rollout`, `ref`, `actor_rollout` (the hybrid engine)
    or `actor_rollout_ref`.
    """

    config: VerlPPOConfig

    @property
    def state_name(self) -> str:
        """See `TrainedModel.state_name`; whatever else the role is."""
        return "actor"

    def setup(self) -> None:
        """Meet the other ranks, where the policy is trained, or the reference sharded."""
        self.parts = set(self.role.lower().split("_"))
        if "actor" in self.parts or ("ref" in self.parts and self.config.frozen_engine.is_collective):
            super().setup()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, idempotent=True, replay="last")
    def init_rollout(self, model_path: str) -> None:
        """Load the engine that samples."""
        self.open_sampler(model_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, idempotent=True, replay="last")
    def init_model(self, model_path: str, steps: int) -> None:
        """Load what else the role has, a model that is trained or frozen; `steps` set the length of the schedule."""
        config = self.config
        if "actor" in self.parts:
            self.open_policy(model_path, steps)
        if "ref" in self.parts and config.has_reference_role:
            self._open_reference(config.algorithm.reference_path or model_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, idempotent=True, replay="last")
    def load_reference(self, model_path: str) -> None:
        """Load another reference in place of the one that is there."""
        self._open_reference(model_path)

    def _open_reference(self, model_path: str) -> None:
        if hasattr(self, "reference"):
            del self.reference  # its memory is needed for the next one
        config = self.config
        self.reference = open_frozen_policy(model_path, config.frozen_engine, config.model.attn_implementation)

    def is_fatal(self, error: Exception) -> bool:
        """See `BaseWorkload.is_fatal`; where ranks meet, all would start again, and meet the same error."""
        is_rank = "actor" in self.parts or ("ref" in self.parts and self.config.frozen_engine.is_collective)
        return not is_rank and is_engine_dead(error)

    # --- rollouts

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, idempotent=True)
    def generate_sequences(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """One response or episode per prompt, split over the workers.

        Returns:
            tokens, action_mask and rollout_logprob per token; prompt_length, truncated, weight_version per response.
        """
        return self.sampler.generate(prompts, sampling)

    # --- log-probabilities

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_log_prob(self, tokens: Batch, temperature: float | None = None) -> Batch:
        """`logprob` per token, in nats, by default at the sampling temperature; the batch is split over the ranks."""
        at = self.config.rollout.temperature if temperature is None else temperature
        logprob_N = self.engine.forward(tokens, partial(policy_logprobs, temperature=at))
        return Batch(tokens.lengths, {"logprob": logprob_N})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_sharp_log_prob(self, tokens: Batch) -> Batch:
        """`sharp_logprob` per token: at half the sampling temperature."""
        half = partial(policy_logprobs, temperature=self.config.rollout.temperature / 2)
        return Batch(tokens.lengths, {"sharp_logprob": self.engine.forward(tokens, half)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, idempotent=True)
    def compute_ref_log_prob(self, tokens: Batch) -> Batch:
        """`reference_logprob` per token, in nats, at the sampling temperature; split over the workers."""
        compute = partial(policy_logprobs, temperature=self.config.rollout.temperature)
        if self.config.is_own_reference:
            logprob_N = self.engine.forward(tokens, compute, adapters=False)
        else:
            logprob_N = self.reference.forward(tokens, compute)
        return Batch(tokens.lengths, {"reference_logprob": logprob_N})

    # --- training

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_actor(self, experience: Batch, step: int) -> dict[str, float]:
        """Train on all of a step's responses; returns metrics, the same on every rank."""
        config = self.config
        updates = minibatches(experience, config, "actor", step)
        prepare = partial(mark_tokens, config=config, step=step)
        metrics = self.train(experience, step, updates, partial(policy_loss, config=config), prepare)
        return metrics | {"updates": float(len(updates))}

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """Unlink the published weights, and end the processes that the engine may have."""
        TrainedPolicy.end(self)
        if "rollout" in self.parts:
            SamplingWorker.end(self)


class ActorRolloutRefRank(ActorRolloutRefWorker):
    """One worker of a policy whose reference is sharded over the ranks, or is the actor's with its adapters off."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_ref_log_prob(self, tokens: Batch) -> Batch:
        """See `ActorRolloutRefWorker`; the ranks compute together, and every one has a part."""
        return super().compute_ref_log_prob(tokens)
