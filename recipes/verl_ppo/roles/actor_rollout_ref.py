"""The policy: what trains it, what samples from it, and what it was at the start, in any combination in one process."""

from functools import partial
from typing import Any

import torch

from agents.player import Collected, open_player
from components.batch import Batch
from components.engines.causal import evaluate, load_policy, token_logprobs
from components.engines.config import SamplingConfig
from components.engines.opening import open_engine
from components.engines.train_engine import init_process_group
from components.engines.weight_sync import WeightHandle, WeightPublisher
from core import BaseWorkload, Dispatch, register
from training.rollouts import keep_failed, over_updates

from ..algorithm import learnable, mark_tokens, policy_loss
from ..config import VerlPPOConfig


class ActorRolloutRefWorker(BaseWorkload):
    """One worker. The name of its role says what it is: `actor`, `rollout`, `ref`, `actor_rollout` (the hybrid engine)
    or `actor_rollout_ref`.
    """

    config: VerlPPOConfig

    def setup(self) -> None:
        """Meet the other ranks before any library can make a process group of its own."""
        self.parts = set(self.role.lower().split("_"))
        if "actor" in self.parts:
            self.setup_process_group(init_process_group)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, idempotent=True, replay="last")
    def init_model(self, model_path: str, steps: int) -> None:
        """Load what the role needs; `steps` set the length of the schedule. The sampler comes last: it takes of the
        memory what is left.
        """
        config = self.config
        if "actor" in self.parts:
            checkpointing = config.actor_rollout_ref.model.enable_gradient_checkpointing
            model = self.load(model_path, gradient_checkpointing=checkpointing)
            self.engine = open_engine(model, config.actor_engine(steps))
            if self.rank == 0:
                on_disk, serve = f"{config.run_dir}/weights", config.trainer.nnodes > 1
                self.publisher = WeightPublisher(self.shared_dir / "policy", fallback_directory=on_disk, serve=serve)
        if "ref" in self.parts and config.needs_reference:
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
            self.reference = self.load(model_path, dtype=config.dtype).to(self.device).eval().requires_grad_(False)
        if "rollout" in self.parts:
            in_flight, tokenizer = config.asynchronous.partial_rollout, config.tokenizer
            self.player = open_player(model_path, config.rollout_engine(), config.agent, tokenizer, in_flight=in_flight)
            self.sleeps = config.sleeps

    def load(self, model_path: str, **options: Any) -> Any:
        """The policy as transformers has it."""
        config = self.config
        return load_policy(
            model_path, attn_implementation=config.attn_implementation, packing=config.packing, **options
        )

    # --- samples

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, idempotent=True)
    def generate_sequences(self, prompts: Batch, sampling: SamplingConfig, alone: bool = False) -> Batch:
        """One answer or episode per prompt, split over the workers. `alone`: without the agent.

        Returns:
            tokens, action_mask and rollout_logprob per token; prompt_length, truncated, weight_version per answer.
        """
        if self.sleeps:
            self.player.wake()
        samples = self.player.play(prompts, sampling, alone=alone)
        if self.sleeps:
            self.player.sleep()
        return samples

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, idempotent=True)
    def begin(self, prompts: Batch | None, sampling: SamplingConfig) -> None:
        """Begin answers that `collect` brings once they are whole groups."""
        if prompts is not None:
            self.player.begin(prompts, sampling)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    def collect(self, seconds: float) -> Collected:
        """Go on with what has begun, until a group has finished or the time is over."""
        return self.player.collect(seconds)

    # --- what the policy says of them

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_log_prob(self, tokens: Batch, temperature: float) -> Batch:
        """`logprob` per token, in nats; the batch is split over the ranks."""
        compute = partial(token_logprobs, temperature=temperature)
        return Batch(tokens.lengths, {"logprob": self.engine.forward(tokens, lambda *x: compute(*x).logprob_N)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, idempotent=True)
    def compute_ref_log_prob(self, tokens: Batch) -> Batch:
        """`reference_logprob` per token, in nats, at the sampling temperature; split over the workers."""
        max_tokens, max_sequences = self.config.forward_limits("ref")
        logprob_N = evaluate(
            tokens,
            max_tokens,
            self.device,
            lambda micro: token_logprobs(self.reference, micro, self.config.temperature).logprob_N,
            max_sequences,
            packing=self.config.packing,
        )
        return Batch(tokens.lengths, {"reference_logprob": logprob_N})

    # --- learning

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_actor(self, experience: Batch, step: int) -> dict[str, float]:
        """Train on the step's answers. Every rank is given all of them, and takes its share of each optimizer step, so
        the number of ranks changes nothing.
        """
        history = []
        for index, chosen in learnable(experience, self.config, "actor", step):
            minibatch = mark_tokens(chosen, self.config, step, index)
            try:
                history.append(self.engine.train_step(minibatch, partial(policy_loss, config=self.config)))
            except FloatingPointError as error:
                where = keep_failed(self.config.run_dir, step, "actor", minibatch, self.rank)
                raise FloatingPointError(f"step {step}: {error}; {where}") from error
        return over_updates(history) | {"updates": float(len(history))}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int) -> WeightHandle | None:
        """Rank 0 writes what all ranks gather."""
        parameters = self.engine.gathered_parameters()
        if self.rank == 0:
            verify = self.config.rollout.verify_weight_sync
            return self.publisher.publish(version, parameters, with_digests=verify)
        for _ in parameters:
            raise AssertionError("only rank 0 is given parameters")
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True, replay="last")
    def receive_weights(self, handle: WeightHandle) -> None:
        """Sample from newer weights from here on."""
        if self.sleeps:
            self.player.wake(for_weights=True)
        self.player.receive(handle, verify=self.config.rollout.verify_weight_sync)

    # --- checkpoints

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Write what training goes on from; all ranks write a part."""
        self.engine.save_state(f"{folder}/actor")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> list[str]:
        """Go on exactly where `save_checkpoint` was called; what cannot be exact is returned in words."""
        return self.engine.load_state(f"{folder}/actor")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model(self, path: str) -> None:
        """Write a folder that `from_pretrained` loads; rank 0 writes what all ranks gather."""
        self.engine.save_hf(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    def end_job(self) -> None:
        """Unlink the published weights, and end the processes that the engine may have."""
        if "actor" in self.parts and self.rank == 0:
            self.publisher.close()
        if "rollout" in self.parts:
            self.player.close()
