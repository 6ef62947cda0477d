"""Roles that train the policy and publish its weights."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from components.batch import Batch
from components.models.causal import policy_logprobs
from components.registry import find, load
from components.rl.kl import kl_estimate
from components.train.engine import LossFunction
from components.train.opening import open_engine
from components.weights.carrier import CarrierSetting, FolderCarrier, carrier_class
from components.weights.publisher import WeightHandle
from core import rpc, trainer_invocation
from training import remote_call
from training.options.rl_options import RLOptions
from training.roles.trained_model import Prepare, TrainedModel, of_rank0, policy_to_train

C = TypeVar("C", bound=RLOptions)

PROBED_SHARE = 1 / 128
"""Share of a step's responses that `step_kl` is measured on. Two forward passes over them take 10 ms of a 440 ms
step of the demonstration on one core. For a large model they take 0.5 % of the time of the training passes."""
LEAST_PROBED, MOST_PROBED = 4, 64
"""Minimum and maximum number of responses that `step_kl` is measured on."""


class TrainedPolicy(TrainedModel):
    """One rank of the policy. Its weights are published to the rollout engines."""

    carrier: FolderCarrier | None = None
    """Transport of the weights to the engines, or None until the policy is loaded."""
    probe: Any = None
    """Measures the reference values that engines check themselves against, or None if they run no checks."""
    _newest: WeightHandle | None = None
    replay: Any = None
    """Records and replays the experts of each token, or None if `rollout.routing_replay` is off."""

    def train(
        self,
        experience: Batch,
        step: int,
        minibatches: Iterable[Tensor],
        loss: LossFunction,
        prepare: Prepare | None = None,
    ) -> dict[str, float]:
        """Run one optimizer step per mini-batch; see `TrainedModel.train`.

        If there is a single optimizer step, `approx_kl` is always 0. `step_kl` is then added to the metrics: the KL
        divergence between the policy before and after the step, in nats, on a sample of the responses.
        """
        parts = list(minibatches)
        if self.replay is not None:
            loss = self.replay.replaying(loss)
        if len(parts) != 1:
            return super().train(experience, step, parts, loss, prepare)
        sample = self._probed(experience)
        logprobs = partial(policy_logprobs, temperature=self.config.rollout.temperature)
        # The old log-probs of the batch may come from a pass with other micro-batches, which rounds differently in
        # bfloat16. The difference would be counted as KL.
        before_N = self.engine.forward(sample, logprobs)
        metrics = super().train(experience, step, parts, loss, prepare)
        kl_N = kl_estimate(before_N, self.engine.forward(sample, logprobs), sample["action_mask"], "k3")
        # Sums are added over the ranks, not means, because the ranks hold different numbers of tokens.
        sums = torch.stack([kl_N.double().sum(), sample["action_mask"].double().sum()]).to(self.engine.device)
        dist.all_reduce(sums)
        return metrics | {"step_kl": float(sums[0] / sums[1].clamp(min=1))}

    def _probed(self, experience: Batch) -> Batch:
        """Select this rank's share of the responses that `step_kl` is measured on, evenly spaced over the batch."""
        count = min(max(int(len(experience) * PROBED_SHARE), LEAST_PROBED), MOST_PROBED)
        # Passes over a partitioned model are collective: a rank without a response would hang the others.
        count = max(min(count, len(experience)), self.engine.world_size)
        chosen_B = torch.arange(count) * len(experience) // count
        return experience.select(chosen_B[self.engine.rank :: self.engine.world_size])

    def open_policy(self, model_path: str, steps: int) -> None:
        """Load the model into the training engine, and open the carrier that `rollout.weight_sync` names.

        Args:
            model_path: path of the model.
            steps: number of training steps, which is the length of the learning-rate schedule.
        """
        config = self.config
        self.engine = open_engine(policy_to_train(model_path, config), config.train_engine(steps))
        setting = CarrierSetting(
            rank=self.rank,
            device=self.engine.device,
            shared_dir=self.shared_dir,
            fallback_dir=Path(config.run_dir, "weights"),
            readers=config.placement.rollout_engines * config.rollout.tensor_parallel,
            serve=config.placement.nodes > 1,
            keeps=config.asynchronous.ahead > 0 or config.placement.learners_sleep,
        )
        self.carrier = carrier_class(config.rollout.weight_sync)(setting)
        if config.rollout.check_engine_every and (probe_type := find("engine probe", config.rollout.engine)):
            self.probe = probe_type(self.engine)
        if (source := config.rollout.routing_replay) != "off":
            self.replay = load("routing replay", source, "rollout.routing_replay")(self.engine, source)

    def old_logprobs(self, tokens: Batch, temperature: float) -> Batch:
        """Return the column `logprob` [N] of the policy, in nats, and the routes of the tokens if they are replayed."""
        if self.replay is not None:
            return self.replay.logprobs(tokens, temperature)
        logprob_N = self.engine.forward(tokens, partial(policy_logprobs, temperature=temperature))
        return Batch(tokens.lengths, {"logprob": logprob_N})

    @rpc(remote_call.announce_weights)
    def announce_weights(self, version: int) -> WeightHandle | None:
        """Return the handle by which engines receive a version while `publish_weights` sends it, on rank 0.

        None: the carrier of the weights does not send, or this is not rank 0.
        """
        assert self.carrier is not None
        return self.carrier.announce(version)

    @rpc()
    def measure_probe(self) -> Any:
        """Compute the log-probabilities of a few sequences for the check of an engine. All ranks take part."""
        return self.probe.measure()

    @rpc(remote_call.publish_weights)
    def publish_weights(self, version: int, again: WeightHandle | None = None) -> WeightHandle | None:
        """Publish the weights for the rollout engines, in the dtype of the engines' weights.

        `announce_weights` is called before. All ranks gather the parameters; they are sent, or rank 0 writes them. If
        the engines hold the adapters of the model, only the adapters are published.

        Args:
            version: number of the version.
            again: see `FolderCarrier.publish`.

        Returns:
            The handle of the published version on rank 0, None on the others.
        """
        assert self.carrier is not None
        sampling = self.config.rollout_engine()
        dtype: torch.dtype = getattr(torch, sampling.weights_dtype)
        scale = 0.0
        # Not called yet: the carrier sends each parameter while the next ones are gathered.
        gathered = partial(self.engine.gathered_parameters, self.carrier.bucket_type)
        if self.engine.adapters is not None and sampling.lora_rank:
            scale = self.engine.adapters.scale
            gathered = self.engine.gathered_adapters
        verify = self.config.rollout.verify_weight_sync
        self._newest = self.carrier.publish(
            version, gathered(), dtype=dtype, with_digests=verify, adapter_scale=scale, again=again
        )
        return self._newest

    @rpc(idempotent=True)
    def newest_weights(self) -> WeightHandle | None:
        """Return the handle of the newest published version on rank 0, or None if there is none yet."""
        return self._newest

    @rpc(remote_call.end_job)
    def end(self) -> None:
        """Remove the published weights at the end of the job."""
        if self.carrier is not None:
            self.carrier.close()


class PolicyWorker(TrainedPolicy, Generic[C]):
    """One rank of the policy. The subclass of a recipe declares the type of its options and defines `loss`."""

    config: C

    @trainer_invocation(blocking=False)
    def load(self, model_path: str, steps: int) -> None:
        """Load the model into the training engine. `steps` is the length of the learning-rate schedule."""
        self.open_policy(model_path, steps)

    @trainer_invocation(blocking=False, post_func=Batch.concat)
    def logprobs(self, tokens: Batch, temperature: float) -> Batch:
        """Return the column `logprob` [N], in nats, of the policy. The batch is split over the ranks."""
        return self.old_logprobs(tokens, temperature)

    @trainer_invocation(blocking=False, post_func=Batch.concat)
    def reference_logprobs(self, tokens: Batch) -> Batch:
        """Return the column `reference_logprob` [N], in nats, at the sampling temperature.

        It is computed by the policy with its adapters disabled, which equals the policy before training.
        """
        compute = partial(policy_logprobs, temperature=self.config.rollout.temperature)
        return Batch(tokens.lengths, {"reference_logprob": self.engine.forward(tokens, compute, adapters=False)})

    @trainer_invocation(post_func=of_rank0)
    def update(self, experience: Batch, step: int) -> dict[str, float]:
        """Train on all responses of a step. Send them with `replicate`. The metrics are the same on every rank."""
        return self.train_epochs(experience, step, self.loss)
