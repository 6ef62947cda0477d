"""Command line of the recipe: read the configuration, build the job, submit it."""

from pathlib import Path

from core import Job
from training.launch.pair_command import PairCommand
from training.launch.supervised_command import supervised_job

from .config import DPOConfig


def build_job(config: DPOConfig) -> Job:
    """Return the job: the trainer and the ranks of the model, with their placement."""
    trainer = f"{__package__}.trainer:DPOTrainer"
    model = f"{__package__}.roles.actor:Actor"
    return supervised_job(config, trainer=trainer, model=model).build()


COMMAND = PairCommand(DPOConfig, Path(__file__).parent, build_job)
read_config = COMMAND.read
main = COMMAND.main

if __name__ == "__main__":
    COMMAND.run()
