"""Command line of the recipe: read the configuration, build the job, submit it."""

from pathlib import Path
from typing import TYPE_CHECKING

from core import Job
from training.launch.supervised_command import SupervisedCommand, supervised_job

from .config import SFTConfig

if TYPE_CHECKING:
    from training.run.supervised_run import TrainingData


def build_job(config: SFTConfig) -> Job:
    """Return the job: the trainer and the ranks of the model, with their placement."""
    trainer = f"{__package__}.trainer:SFTTrainer"
    model = f"{__package__}.roles.actor:Actor"
    return supervised_job(config, trainer=trainer, model=model).build()


class SFTCommand(SupervisedCommand[SFTConfig]):
    """The command, which creates a new model from `model.path=new:<task>` before it reads the data."""

    def training_data(self, config: SFTConfig, scratch: str) -> "TrainingData":
        """See `SupervisedCommand.training_data`."""
        from .data import read_demonstrations, starting_model

        config = self.with_models(config)
        return read_demonstrations(config, starting_model(config, scratch, with_weights=False), lambda _: None)


COMMAND = SFTCommand(SFTConfig, Path(__file__).parent, build_job)
read_config = COMMAND.read
main = COMMAND.main

if __name__ == "__main__":
    COMMAND.run()
