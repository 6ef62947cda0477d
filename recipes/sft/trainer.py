"""The loop: one optimizer step per mini-batch of demonstrations."""

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
"""What a person sees of a step."""


class SFTTrainer(BaseTrainer):
    """Drives RG_ACTOR, the ranks of the model."""

    config: SFTConfig
    RG_ACTOR: RoleGroup[Actor]

    def init(self) -> None:
        """Read the demonstrations, load the model, resume from a checkpoint if there is one."""
        with tempfile.TemporaryDirectory(dir=self.shared_dir) as scratch:
            model_path = starting_model(self.config, scratch)
            data = read_demonstrations(self.config, model_path, self.info)
            self.supervised_run = SupervisedRun(
                self, self.config, FOLDER, self.RG_ACTOR, data, self.evaluate, shown=SHOWN
            )

    def fit(self) -> None:
        """One optimizer step per mini-batch."""
        for minibatch in self.supervised_run.minibatches():
            with self.supervised_run.phase("train"):
                metrics = self.RG_ACTOR.train_step(replicate(minibatch))
            self.supervised_run.end_step(minibatch, actor=metrics)
        self.supervised_run.finish()

    def evaluate(self, demonstrations: Batch) -> dict[str, float]:
        """The loss on demonstrations that were held out."""
        logprob_N = self.RG_ACTOR.logprobs(demonstrations.only("tokens"))["logprob"]
        return {"loss": float(-logprob_N[demonstrations["loss_mask"]].mean())}
