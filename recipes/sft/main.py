"""From the command line to a finished run: configuration -> job -> submit."""

from pathlib import Path

from core import Job
from training.supervised_command import SupervisedCommand, supervised_job

from .config import SFTConfig


def build_job(config: SFTConfig) -> Job:
    """What runs where."""
    own = __package__
    return supervised_job(config, trainer=f"{own}.trainer:SFTTrainer", model=f"{own}.roles.actor:Actor").build()


COMMAND = SupervisedCommand(SFTConfig, Path(__file__).parent, build_job)
read_config = COMMAND.read
main = COMMAND.main

if __name__ == "__main__":
    COMMAND.run()
