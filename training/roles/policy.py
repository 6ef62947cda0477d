"""The policy that is trained."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from components.batch import Batch
from components.models.causal import policy_logprobs
from components.registry import find
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
"""Share of a step's responses that `step_kl` is measured on. Two passes over them take 10 ms of the 440 ms that a step
of the demonstration takes on one core; of a large model they are 0.5 % of the training passes."""
LEAST_PROBED, MOST_PROBED = 4, 64
"""Bounds of their number."""


class TrainedPolicy(TrainedModel):
    """One rank of the policy, whose weights go to rollout engines."""

    carrier: FolderCarrier | None = None
    """Carries the weights to the engines, once the policy is loaded."""
    probe: Any = None
    """Computes what engines check themselves with; None: they check nothing."""

    def train(
        self,
        experience: Batch,
        step: int,
        minibatches: Iterable[Tensor],
        loss: LossFunction,
        prepare: Prepare | None = None,
    ) -> dict[str, float]:
        """See `TrainedModel.train`. Where there is one optimizer step, `approx_kl` is 0 whatever that does, so
        `step_kl` measures it: the KL of the policy after it from the policy before, on a sample of the responses.
        """
        parts = list(minibatches)
        if len(parts) != 1:
            return super().train(experience, step, parts, loss, prepare)
        sample = self._probed(experience)
        logprobs = partial(policy_logprobs, temperature=self.config.rollout.temperature)
        # Old log-probs of the batch may come from another pass, which in bfloat16 rounds otherwise.
        before_N = self.engine.forward(sample, logprobs)
        metrics = super().train(experience, step, parts, loss, prepare)
        kl_N = kl_estimate(before_N, self.engine.forward(sample, logprobs), sample["action_mask"], "k3")
        sums = torch.stack([kl_N.double().sum(), sample["action_mask"].double().sum()]).to(self.engine.device)
        dist.all_reduce(sums)
        return metrics | {"step_kl": float(sums[0] / sums[1].clamp(min=1))}

    def _probed(self, experience: Batch) -> Batch:
        """Select this rank's part of the responses that `step_kl` is measured on, at equal distances."""
        count = min(max(int(len(experience) * PROBED_SHARE), LEAST_PROBED), MOST_PROBED)
        # Each rank needs one, as passes over a partitioned model are collective.
        count = max(min(count, len(experience)), self.engine.world_size)
        chosen_B = torch.arange(count) * len(experience) // count
        return experience.select(chosen_B[self.engine.rank :: self.engine.world_size])

    def open_policy(self, model_path: str, steps: int) -> None:
        """Load the model and put it under the training engine; `steps` set the length of its schedule. The carrier
        that `rollout.weight_sync` names brings weights to the rollout engines, which may be on other machines.
        """
        own = self.config
        self.engine = open_engine(policy_to_train(model_path, own), own.train_engine(steps))
        setting = CarrierSetting(
            rank=self.rank,
            device=self.engine.device,
            shared_dir=self.shared_dir,
            fallback_dir=Path(own.run_dir, "weights"),
            readers=own.placement.rollout_engines * own.rollout.tensor_parallel,
            serve=own.placement.nodes > 1,
        )
        self.carrier = carrier_class(own.rollout.weight_sync)(setting)
        kind = find("engine probe", own.rollout.engine) if own.rollout.check_engine_every else None
        self.probe = None if kind is None else kind(self.engine)

    @rpc(remote_call.publish_weights)
    def publish_weights(self, version: int) -> WeightHandle | None:
        """Rank 0 writes what all ranks gather, in the type of the engines' weights, and returns where. Of a model with
        adapters these alone, where the engines hold them.
        """
        assert self.carrier is not None
        sampling = self.config.rollout_engine()
        dtype: torch.dtype = getattr(torch, sampling.weights_dtype)
        scale = 0.0
        gathered = partial(self.engine.gathered_parameters, self.carrier.gathers_everywhere)
        if self.engine.adapters is not None and sampling.lora_rank:
            scale = self.engine.adapters.scale
            gathered = self.engine.gathered_adapters
        parameters = ((name, tensor.detach().to(dtype)) for name, tensor in gathered())
        verify = self.config.rollout.verify_weight_sync
        # An engine that is replaced later checks itself with this version too.
        probe = None if self.probe is None else self.probe.measure()
        handle = self.carrier.publish(version, parameters, with_digests=verify, adapter_scale=scale)
        return handle and replace(handle, probe=probe)

    @rpc(remote_call.end_job)
    def end(self) -> None:
        """Unlink the published weights."""
        if self.carrier is not None:
            self.carrier.close()


class PolicyWorker(TrainedPolicy, Generic[C]):
    """One rank of the policy. A recipe's subclass declares its options, and its `loss`."""

    config: C

    @trainer_invocation(blocking=False)
    def load(self, model_path: str, steps: int) -> None:
        """Load the model and put it under the training engine; `steps` set the length of its schedule."""
        self.open_policy(model_path, steps)

    @trainer_invocation(blocking=False, post_func=Batch.concat)
    def logprobs(self, tokens: Batch, temperature: float) -> Batch:
        """`logprob` per token, in nats; the batch is split over the ranks."""
        logprob_N = self.engine.forward(tokens, partial(policy_logprobs, temperature=temperature))
        return Batch(tokens.lengths, {"logprob": logprob_N})

    @trainer_invocation(blocking=False, post_func=Batch.concat)
    def reference_logprobs(self, tokens: Batch) -> Batch:
        """`reference_logprob` per token, in nats, at the sampling temperature: of the policy with its adapters off,
        which is what it was at the start.
        """
        compute = partial(policy_logprobs, temperature=self.config.rollout.temperature)
        return Batch(tokens.lengths, {"reference_logprob": self.engine.forward(tokens, compute, adapters=False)})

    @trainer_invocation(post_func=of_rank0)
    def update(self, experience: Batch, step: int) -> dict[str, float]:
        """Train on all of a step's responses; send them with `replicate`. Returns metrics, the same on every rank."""
        return self.train_epochs(experience, step, self.loss)
