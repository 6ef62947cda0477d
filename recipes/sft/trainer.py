"""Training loop: one optimizer step per mini-batch of demonstrations. `N` all tokens of a batch end to end."""

import tempfile
from pathlib import Path

from components.batch import Batch
from core import BaseTrainer, RoleGroup, replicate
from training.run.supervised_run import SupervisedRun

from .config import SFTConfig
from .data import read_demonstrations, starting_model
from .roles.actor import Actor

FOLDER = Path(__file__).parent
SHOWN = ("actor/loss", "eval/loss", "actor/learning_rate", "timing_s/step")
"""Metrics that the terminal shows for a step."""


class SFTTrainer(BaseTrainer):
    """Trainer of the recipe. RG_ACTOR is the ranks of the model."""

    config: SFTConfig
    RG_ACTOR: RoleGroup[Actor]

    def init(self) -> None:
        """Read the demonstrations, load the model, and resume from a checkpoint if the run folder has one."""
        # In the shared folder, because ranks on other nodes load a new model from it.
        with tempfile.TemporaryDirectory(dir=self.shared_dir) as scratch:
            model_path = starting_model(self.config, scratch)
            data = read_demonstrations(self.config, model_path, self.info)
            self.supervised_run = SupervisedRun(
                self, self.config, FOLDER, self.RG_ACTOR, data, self.evaluate, shown=SHOWN
            )

    def fit(self) -> None:
        """Run the training loop: one optimizer step per mini-batch."""
        for minibatch in self.supervised_run.minibatches():
            with self.supervised_run.phase("train"):
                metrics = self.RG_ACTOR.train_step(replicate(minibatch))
            self.supervised_run.end_step(minibatch, actor=metrics)
        self.supervised_run.finish()

    def evaluate(self, demonstrations: Batch) -> dict[str, float]:
        """Return the loss on held-out demonstrations, in nats per response token."""
        # A mean over tokens, as in training: a mean over demonstrations could not be compared with the training loss.
        logprob_N = self.RG_ACTOR.logprobs(demonstrations.only("tokens"))["logprob"]
        return {"loss": float(-logprob_N[demonstrations["loss_mask"]].mean())}
