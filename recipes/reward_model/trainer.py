"""Training loop: one optimizer step per mini-batch of pairs. `P` pairs."""

import tempfile
from pathlib import Path

import torch

from components.batch import Batch
from components.models.reward_model import note_statistics
from core import BaseTrainer, RoleGroup, replicate
from training.run.pairs import read_training_pairs
from training.run.supervised_run import SupervisedRun

from .algorithm import PAIR
from .config import RewardModelConfig
from .data import starting_model
from .roles.reward import Reward

FOLDER = Path(__file__).parent
SHOWN = ("reward/loss", "reward/accuracy", "reward/margin", "eval/", "timing_s/step")
"""Metrics that the terminal shows for a step."""
SCORED_FOR_STATISTICS = 1024
"""Number of training pairs whose scores give the normalisation statistics if no pairs are held out."""


class RewardModelTrainer(BaseTrainer):
    """Trainer of the recipe. RG_REWARD is the ranks of the model."""

    config: RewardModelConfig
    RG_REWARD: RoleGroup[Reward]

    def init(self) -> None:
        """Read the pairs, load the model, and resume from a checkpoint if the run folder has one."""
        self.scored_step = -1
        # In the shared folder, because ranks on other nodes load a new model from it.
        with tempfile.TemporaryDirectory(dir=self.shared_dir) as scratch:
            model_path = starting_model(self.config, scratch)
            data = read_training_pairs(self.config, model_path, self.info)
            self.info(f"sequences are padded with {data.tokenizer.pad_token!r}")
            self.scored = data.heldout or data.train.select(slice(0, PAIR * SCORED_FOR_STATISTICS))
            self.supervised_run = SupervisedRun(
                self, self.config, FOLDER, self.RG_REWARD, data, self.evaluate, self.write_statistics, shown=SHOWN
            )

    def fit(self) -> None:
        """Run the training loop: one optimizer step per mini-batch."""
        for minibatch in self.supervised_run.minibatches():
            with self.supervised_run.phase("train"):
                metrics = self.RG_REWARD.train_step(replicate(minibatch))
            self.supervised_run.end_step(minibatch, reward=metrics)
        self.supervised_run.finish()

    def evaluate(self, pairs: Batch) -> dict[str, float]:
        """Return accuracy, loss and margin on pairs, and the mean and standard deviation of the scores."""
        score_P2 = self.RG_REWARD.score(pairs.only("tokens"))["score"].view(-1, PAIR)
        gap_P = score_P2[:, 0] - score_P2[:, 1]
        self.statistics = {"reward_mean": float(score_P2.mean()), "reward_std": float(score_P2.std())}
        self.scored_step = self.supervised_run.step
        return {
            "accuracy": float((gap_P.sign().double() + 1).mean() / 2),  # a tie counts as 0.5
            "loss": float(-torch.nn.functional.logsigmoid(gap_P).mean()),
            "margin": float(gap_P.mean()),
            **self.statistics,
        }

    def write_statistics(self, folder: Path) -> None:
        """Write the mean and standard deviation of the scores into the config.json of an exported model."""
        # An evaluation at this step has already computed them.
        if self.scored_step != self.supervised_run.step:
            self.evaluate(self.scored)
        note_statistics(folder, self.statistics["reward_mean"], self.statistics["reward_std"])
