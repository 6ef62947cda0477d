"""The policy that learns."""

from functools import partial

from components.batch import Batch
from components.engines.causal import load_policy, token_logprobs
from components.engines.weight_sync import WeightHandle, WeightPublisher
from core import rpc

from .. import remote_call
from ..algorithm import mark_tokens, policy_loss
from .learner import Learner


class Actor(Learner):
    """One rank of the policy."""

    @rpc(remote_call.actor_init)
    def init_model(self, model_path: str, steps: int) -> None:
        """Load and start training."""
        model = load_policy(
            model_path,
            gradient_checkpointing=self.config.gradient_checkpointing,
            attn_implementation=self.config.attn_implementation,
            packing=self.config.packing_samples,
        )
        self.start_engine(model, self.config.actor_learning_rate, steps, averaged=self.config.enable_ema)
        if self.rank == 0:
            on_disk, serve = f"{self.config.run_dir}/weights", self.config.nodes > 1
            self.publisher = WeightPublisher(self.shared_dir / "policy", fallback_directory=on_disk, serve=serve)

    @rpc(remote_call.actor_forward)
    def forward(self, samples: Batch, temperature: float) -> Batch:
        """Log-probabilities at a temperature."""
        logprob_N = self.engine.forward(
            samples, lambda model, micro: token_logprobs(model, micro, temperature).logprob_N
        )
        return Batch(samples.lengths, {"logprob": logprob_N})

    @rpc(remote_call.append_experience)
    def append(self, experience: Batch) -> None:
        """Keep the step's batch for the update."""
        self.experience = experience

    @rpc(remote_call.actor_update)
    def update(self, step: int, kl_coef: float) -> dict[str, float]:
        """Train on it."""
        loss = partial(policy_loss, config=self.config, kl_coef=kl_coef)
        return self.fit(loss, step, prepare=partial(mark_tokens, config=self.config, step=step))

    @rpc(remote_call.publish_weights)
    def publish(self, version: int) -> WeightHandle | None:
        """Rank 0 writes what all ranks gather."""
        parameters = self.engine.gathered_parameters()
        if self.rank == 0:
            return self.publisher.publish(version, parameters, with_digests=self.config.verify_weight_sync)
        for _ in parameters:
            raise AssertionError("only rank 0 is given parameters")
        return None

    @rpc(remote_call.save_model)
    def save(self, path: str) -> None:
        """Rank 0 writes what all ranks gather."""
        self.engine.save_hf(path)

    @rpc(remote_call.end_job)
    def end(self) -> None:
        """Unlink the published weights."""
        if self.rank == 0:
            self.publisher.close()
