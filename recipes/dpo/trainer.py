"""Training loop: one optimizer step per mini-batch of pairs. `B` responses, two per pair."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from components.batch import Batch
from core import BaseTrainer, RoleGroup, replicate
from training.run.pairs import read_training_pairs
from training.run.supervised_run import SupervisedRun

from .algorithm import LOSSES, PAIR, with_kl
from .config import DPOConfig
from .data import in_calls
from .roles.actor import Actor

FOLDER = Path(__file__).parent
SHOWN = ("actor/loss", "actor/accuracy", "actor/margin", "eval/accuracy", "eval/margin", "timing_s/step")
"""Metrics that the terminal shows for a step."""


class DPOTrainer(BaseTrainer):
    """Trainer of the recipe. RG_ACTOR is the ranks of the policy; they run the reference model before they load it."""

    config: DPOConfig
    RG_ACTOR: RoleGroup[Actor]

    def init(self) -> None:
        """Read the pairs, compute their reference log-probabilities, load the policy, and resume from a checkpoint.

        The reference model is freed before the policy is loaded, so that device memory never holds both. A loss without
        a reference model loads none.
        """
        config = self.config
        data = read_training_pairs(config, config.model.path, self.info, with_mask=True)
        if config.has_reference:
            self.RG_ACTOR.load_reference(config.reference.path or config.model.path)
            heldout = data.heldout
            if heldout is not None:
                heldout = self.with_reference(heldout)
            data = replace(data, train=self.with_reference(data.train), heldout=heldout)
            self.RG_ACTOR.drop_reference()
        self.supervised_run = SupervisedRun(self, config, FOLDER, self.RG_ACTOR, data, self.evaluate, shown=SHOWN)

    def fit(self) -> None:
        """Run the training loop: one optimizer step per mini-batch."""
        for minibatch in self.supervised_run.minibatches():
            with self.supervised_run.phase("train"):
                metrics = self.RG_ACTOR.train_step(replicate(self.with_estimate(minibatch)))
            self.supervised_run.end_step(minibatch, actor=metrics)
        self.supervised_run.finish()

    def evaluate(self, pairs: Batch) -> dict[str, float]:
        """Return the loss on held-out pairs, and the accuracy and margin of the policy's implicit rewards."""
        logprob_B = self.logprobs(self.RG_ACTOR.logprobs, pairs)
        total = len(pairs) // PAIR
        if self.config.reads_labels:
            # Each response is followed by its mismatched one.
            pairs = with_kl(pairs, logprob_B[1::PAIR])
            logprob_B = logprob_B[::PAIR]
        output = LOSSES[self.config.algorithm.loss](logprob_B, pairs, total, self.config)
        metrics = {"loss": output.loss, **output.metrics}
        return {name: round(float(value), 6) for name, value in metrics.items()}

    def with_estimate(self, minibatch: Batch) -> Batch:
        """Add KTO's KL estimate, by the current policy. Mini-batches of the other losses are returned unchanged."""
        if not self.config.reads_labels:
            return minibatch
        # With the weights before the step, as the loss is. It is a constant of the loss, without a gradient.
        size = len(minibatch) // PAIR
        # The last mini-batch of an epoch may be smaller than the number of ranks. With a sharded model each needs one.
        index = torch.arange(max(size, self.config.placement.ranks)) % size
        mismatched = minibatch.select(PAIR * index + 1)
        return with_kl(minibatch, self.logprobs(self.RG_ACTOR.logprobs, mismatched)[:size])

    def with_reference(self, pairs: Batch) -> Batch:
        """Add `reference_logprob` [B], the log-probability of each response under the reference model, in nats."""
        return pairs.with_sequences(reference_logprob=self.logprobs(self.RG_ACTOR.reference_logprobs, pairs))

    def logprobs(self, compute: Callable[[Batch], Batch], pairs: Batch) -> Tensor:
        """Return [B] the log-probability of each response, in nats.

        Rounding depends on the composition of the micro-batches. Policy and reference model therefore get the same
        calls; otherwise pairs that are ties before training would differ by rounding.

        Args:
            compute: the call of the policy or of the reference model.
            pairs: the pairs.
        """
        parts = in_calls(pairs.only("tokens", "loss_mask"), self.config.placement.ranks)
        return torch.cat([compute(part)["logprob"] for part in parts])
