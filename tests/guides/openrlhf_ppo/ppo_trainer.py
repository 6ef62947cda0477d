"""The role trainer."""

import json
from pathlib import Path

from core.context import current

from . import remote_call
from .trainer import PPOTrainer


class PPOTrainerActor:
    """Runs the training loop, and ends the job."""

    def run(self) -> None:
        config = current().config
        trainer = PPOTrainer(config)
        trainer.init_workers()
        trainer.fit()
        remote_call.end_job()
        Path(config.out).write_text(json.dumps(trainer.found))
