"""The loop: one optimizer step per mini-batch of pairs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from components.batch import Batch
from core import BaseTrainer, RoleGroup, replicate
from training.run.pairs import read_training_pairs
from training.run.supervised_run import SupervisedRun

from .algorithm import PAIR, preference_loss
from .config import DPOConfig
from .data import in_calls
from .roles.actor import Actor

FOLDER = Path(__file__).parent
SHOWN = ("actor/loss", "actor/accuracy", "actor/margin", "eval/accuracy", "eval/margin", "timing_s/step")
"""What a person sees of a step."""


class DPOTrainer(BaseTrainer):
    """Drives RG_ACTOR: the ranks of the policy, and before these are loaded, of the reference model."""

    config: DPOConfig
    RG_ACTOR: RoleGroup[Actor]

    def init(self) -> None:
        """Read the pairs, ask the reference model about them once, load the policy, resume from a checkpoint if there
        is one.
        """
        config = self.config
        pairs = read_training_pairs(config, config.model.path, self.info, with_mask=True)
        self.RG_ACTOR.load_reference(config.reference.path or config.model.path)
        heldout = None if pairs.heldout is None else self.with_reference(pairs.heldout)
        data = replace(pairs, train=self.with_reference(pairs.train), heldout=heldout)
        self.RG_ACTOR.drop_reference()
        self.supervised_run = SupervisedRun(self, config, FOLDER, self.RG_ACTOR, data, self.evaluate, shown=SHOWN)

    def fit(self) -> None:
        """One optimizer step per mini-batch."""
        for minibatch in self.supervised_run.minibatches():
            with self.supervised_run.phase("train"):
                metrics = self.RG_ACTOR.train_step(replicate(minibatch))
            self.supervised_run.end_step(minibatch, actor=metrics)
        self.supervised_run.finish()

    def evaluate(self, pairs: Batch) -> dict[str, float]:
        """The loss on held-out pairs, and whether the policy's implicit rewards order them."""
        logprob_B = self.logprobs(self.RG_ACTOR.logprobs, pairs)
        output = preference_loss(logprob_B, pairs, len(pairs) // PAIR, self.config)
        found = {"loss": output.loss, **output.metrics}
        return {name: round(float(value), 6) for name, value in found.items()}

    def with_reference(self, pairs: Batch) -> Batch:
        """Add `reference_logprob` [B]."""
        return pairs.with_sequences(reference_logprob=self.logprobs(self.RG_ACTOR.reference_logprobs, pairs))

    def logprobs(self, compute: Callable[[Batch], Batch], pairs: Batch) -> Tensor:
        """[B] log-probability of each response. Policy and reference model are asked in the same calls, and so in the
        same micro-batches, as rounding depends on these: else it would tell apart pairs that are ties.
        """
        parts = in_calls(pairs.only("tokens", "loss_mask"), self.config.placement.ranks)
        return torch.cat([compute(part)["logprob"] for part in parts])
