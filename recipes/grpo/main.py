"""Command line of the recipe: read the configuration, build the job, submit it."""

from pathlib import Path

from core import Job
from training.launch.policy_command import PolicyCommand, policy_job

from .config import GRPOConfig


def build_job(config: GRPOConfig) -> Job:
    """Return the job: its roles, their classes and their placement.

    A role of your own takes one more line: `builder.role("style").run(f"{roles}.style:Style")`.
    """
    roles = f"{__package__}.roles"
    builder = policy_job(config, trainer=f"{__package__}.trainer:GRPOTrainer", actor=f"{roles}.actor:Actor")
    return builder.build()


COMMAND = PolicyCommand(GRPOConfig, Path(__file__).parent, build_job)
read_config = COMMAND.read_resolved
main = COMMAND.main

if __name__ == "__main__":
    COMMAND.run()
