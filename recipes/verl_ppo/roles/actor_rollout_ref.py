"""Worker of the policy: actor, rollout engine and reference model, in any combination in one process."""

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
    """One worker, whose tasks follow from the name of its role: `actor`, `rollout`, `ref`, `actor_rollout` (the hybrid
    engine) or `actor_rollout_ref`.
    """

    config: VerlPPOConfig

    @property
    def state_name(self) -> str:
        """See `TrainedModel.state_name`. It is the same for every role that contains the actor."""
        return "actor"

    def setup(self) -> None:
        """Initialize the process group, if the policy is trained here or the reference is sharded."""
        self.parts = set(self.role.lower().split("_"))
        if "actor" in self.parts or ("ref" in self.parts and self.config.frozen_engine.is_collective):
            super().setup()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, idempotent=True, replay="last")
    def init_rollout(self, model_path: str) -> None:
        """Load the rollout engine."""
        self.open_sampler(model_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, idempotent=True, replay="last")
    def init_model(self, model_path: str, steps: int) -> None:
        """Load the trained policy or the reference, if the role has it. `steps` is the length of the schedule."""
        config = self.config
        if "actor" in self.parts:
            self.open_policy(model_path, steps)
        if "ref" in self.parts and config.has_reference_role:
            self._open_reference(config.algorithm.reference_path or model_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, idempotent=True, replay="last")
    def load_reference(self, model_path: str) -> None:
        """Replace the reference by another model."""
        self._open_reference(model_path)

    def _open_reference(self, model_path: str) -> None:
        if hasattr(self, "reference"):
            del self.reference  # freed first, as both may not fit into memory
        config = self.config
        self.reference = open_frozen_policy(model_path, config.frozen_engine, config.model.attn_implementation)

    def is_fatal(self, error: Exception) -> bool:
        """See `BaseWorkload.is_fatal`. Ranks are excepted: all of them would restart and meet the same error."""
        is_rank = "actor" in self.parts or ("ref" in self.parts and self.config.frozen_engine.is_collective)
        return not is_rank and is_engine_dead(error)

    # --- rollouts

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, idempotent=True)
    def generate_sequences(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Sample one response or episode per prompt. The prompts are split over the workers.

        Returns:
            tokens, action_mask and rollout_logprob per token; prompt_length, truncated, weight_version per response.
        """
        return self.sampler.generate(prompts, sampling)

    # --- log-probabilities

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_log_prob(self, tokens: Batch, temperature: float | None = None) -> Batch:
        """Compute `logprob` per token in nats, by default at the sampling temperature. The ranks split the batch."""
        if temperature is None:
            temperature = self.config.rollout.temperature
        return self.old_logprobs(tokens, temperature)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_sharp_log_prob(self, tokens: Batch) -> Batch:
        """Compute `sharp_logprob` per token, in nats, at half the sampling temperature."""
        half = partial(policy_logprobs, temperature=self.config.rollout.temperature / 2)
        return Batch(tokens.lengths, {"sharp_logprob": self.engine.forward(tokens, half)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, idempotent=True)
    def compute_ref_log_prob(self, tokens: Batch) -> Batch:
        """Compute `reference_logprob` per token in nats, at the sampling temperature. The workers split the batch."""
        compute = partial(policy_logprobs, temperature=self.config.rollout.temperature)
        if self.config.is_own_reference:
            logprob_N = self.engine.forward(tokens, compute, adapters=False)
        else:
            logprob_N = self.reference.forward(tokens, compute)
        return Batch(tokens.lengths, {"reference_logprob": logprob_N})

    # --- training

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_actor(self, experience: Batch, step: int) -> dict[str, float]:
        """Train on all responses of a step. Return metrics, which are the same on every rank."""
        config = self.config
        updates = minibatches(experience, config, "actor", step)
        prepare = partial(mark_tokens, config=config, step=step)
        metrics = self.train(experience, step, updates, partial(policy_loss, config=config), prepare)
        return metrics | {"updates": float(len(updates))}

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """Unlink the published weights, and end the engine's processes."""
        TrainedPolicy.end(self)
        if "rollout" in self.parts:
            SamplingWorker.end(self)


class ActorRolloutRefRank(ActorRolloutRefWorker):
    """Worker of a policy whose reference is sharded over the ranks, or is the actor with its adapters disabled."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_ref_log_prob(self, tokens: Batch) -> Batch:
        """See `ActorRolloutRefWorker`. Each rank receives a part of the batch, and all compute collectively."""
        return super().compute_ref_log_prob(tokens)
