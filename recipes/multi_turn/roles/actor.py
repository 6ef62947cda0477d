"""The policy that learns."""

from functools import partial

from components.batch import Batch
from components.engines.causal import load_policy, token_logprobs
from components.engines.opening import open_engine
from components.engines.train_engine import init_process_group
from components.engines.weight_sync import WeightHandle, WeightPublisher
from core import BaseWorkload, rpc, trainer_invocation
from training.rollouts import keep_failed, over_updates

from .. import remote_call
from ..algorithm import minibatches, policy_loss
from ..config import MultiTurnConfig


class Actor(BaseWorkload):
    """One rank of the policy."""

    config: MultiTurnConfig

    def setup(self) -> None:
        """Meet the other ranks before any library can make a process group of its own."""
        self.setup_process_group(init_process_group)

    @trainer_invocation(blocking=False)
    def load(self, model_path: str, steps: int) -> None:
        """Load the model and put it under the training engine; `steps` set the length of its schedule."""
        options = self.config.train
        attention = self.config.model.attn_implementation
        model = load_policy(
            model_path,
            gradient_checkpointing=options.gradient_checkpointing,
            attn_implementation=attention,
            packing=options.packing,
        )
        self.engine = open_engine(model, self.config.train_engine(steps))
        if self.rank == 0:
            on_disk = f"{self.config.run_dir}/weights"
            serve = self.config.placement.nodes > 1
            self.publisher = WeightPublisher(self.shared_dir / "policy", fallback_directory=on_disk, serve=serve)

    @trainer_invocation(blocking=False, post_func=Batch.concat)
    def logprobs(self, tokens: Batch, temperature: float) -> Batch:
        """`logprob` per token, in nats; the batch is split over the ranks."""
        logprob_N = self.engine.forward(
            tokens, lambda model, micro: token_logprobs(model, micro, temperature).logprob_N
        )
        return Batch(tokens.lengths, {"logprob": logprob_N})

    @trainer_invocation(post_func=lambda metrics: metrics[0])
    def update(self, experience: Batch, step: int) -> dict[str, float]:
        """Train on the step's episodes; send them with `replicate`: every rank takes its share of each optimizer step,
        so the number of ranks changes nothing.
        """
        history = []
        for chosen_B in minibatches(len(experience), self.config, step):
            minibatch = experience.select(chosen_B)
            try:
                history.append(self.engine.train_step(minibatch, partial(policy_loss, config=self.config)))
            except FloatingPointError as error:
                where = keep_failed(self.config.run_dir, step, self.role, minibatch, self.rank)
                raise FloatingPointError(f"step {step}: {error}; {where}") from error
        return over_updates(history)

    @rpc(remote_call.publish_weights)
    def publish(self, version: int) -> WeightHandle | None:
        """Rank 0 writes what all ranks gather."""
        parameters = self.engine.gathered_parameters()
        if self.rank == 0:
            return self.publisher.publish(version, parameters, with_digests=self.config.rollout.verify_weight_sync)
        for _ in parameters:
            raise AssertionError("only rank 0 is given parameters")
        return None

    @trainer_invocation
    def save_state(self, folder: str) -> None:
        """Write what training goes on from; all ranks write a part."""
        self.engine.save_state(f"{folder}/actor")

    @trainer_invocation(post_func=lambda notes: notes[0])
    def load_state(self, folder: str) -> list[str]:
        """Go on exactly where `save_state` was called; what cannot be exact is returned in words."""
        return self.engine.load_state(f"{folder}/actor")

    @trainer_invocation
    def save(self, path: str) -> None:
        """Write a folder that `from_pretrained` loads; rank 0 writes what all ranks gather."""
        self.engine.save_hf(path)

    @rpc(remote_call.end_job)
    def end(self) -> None:
        """Unlink the published weights."""
        if self.rank == 0:
            self.publisher.close()
