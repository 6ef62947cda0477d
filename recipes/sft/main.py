"""From the command line to a finished run: configuration -> job -> submit."""

from pathlib import Path
from typing import TYPE_CHECKING

from core import Job
from training.launch.supervised_command import SupervisedCommand, supervised_job

from .config import SFTConfig

if TYPE_CHECKING:
    from training.run.supervised_run import TrainingData


def build_job(config: SFTConfig) -> Job:
    """What runs where."""
    own = __package__
    return supervised_job(config, trainer=f"{own}.trainer:SFTTrainer", model=f"{own}.roles.actor:Actor").build()


class SFTCommand(SupervisedCommand[SFTConfig]):
    """See `SupervisedCommand`."""

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
