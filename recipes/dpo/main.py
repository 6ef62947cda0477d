"""From the command line to a finished run: configuration -> job -> submit."""

from pathlib import Path

from core import Job
from training.launch.pair_command import PairCommand
from training.launch.supervised_command import supervised_job

from .config import DPOConfig


def build_job(config: DPOConfig) -> Job:
    """What runs where."""
    own = __package__
    return supervised_job(config, trainer=f"{own}.trainer:DPOTrainer", model=f"{own}.roles.actor:Actor").build()


COMMAND = PairCommand(DPOConfig, Path(__file__).parent, build_job)
read_config = COMMAND.read
main = COMMAND.main

if __name__ == "__main__":
    COMMAND.run()
