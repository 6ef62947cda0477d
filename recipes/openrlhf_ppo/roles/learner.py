"""What actor and critic share: an engine, the step's experience, and the passes over it."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from components.batch import Batch
from components.engines.opening import open_engine
from components.engines.train_engine import LossFunction, TrainEngine, init_process_group
from core import BaseWorkload, rpc
from training.rollouts import keep_failed, over_updates

from .. import remote_call
from ..algorithm import minibatches
from ..config import PPOConfig

Prepare = Callable[[Batch, int], Batch]


class Learner(BaseWorkload):
    """A rank that trains one model."""

    config: PPOConfig
    engine: TrainEngine

    def setup(self) -> None:
        """Meet the other ranks before any library can make a process group of its own."""
        self.setup_process_group(init_process_group)
        self.experience: Batch | None = None

    def start_engine(self, model: nn.Module, learning_rate: float, steps: int, averaged: bool = False) -> None:
        """Put a model under its optimizer."""
        self.engine = open_engine(model, self.config.engine(learning_rate, steps, averaged))

    def fit(self, loss: LossFunction, step: int, prepare: Prepare = lambda minibatch, _: minibatch) -> dict[str, float]:
        """Train on the experience and let go of it. Metrics are means over the optimizer steps. `prepare` is given each
        optimizer step's batch, and its number from 0, before it is cut.
        """
        if self.experience is None:
            raise ValueError(f"{self.name} was asked to train on step {step} before it was given its experience")
        history = []
        for index, chosen_B in enumerate(minibatches(self.experience, self.config, step)):
            minibatch = prepare(self.experience.select(chosen_B), index)
            try:
                history.append(self.engine.train_step(minibatch, loss))
            except FloatingPointError as error:
                where = keep_failed(self.config.run_dir, step, self.role, minibatch, self.rank)
                raise FloatingPointError(f"step {step}: {error}; {where}") from error
        self.experience = None
        return over_updates(history)

    @rpc(remote_call.sleep_learners)
    def sleep(self) -> int:
        """Free the accelerator; returns how many bytes."""
        return self.engine.sleep()

    @rpc(remote_call.wake_learners)
    def wake(self) -> None:
        """Be ready for everything else."""
        self.engine.wake()

    @rpc(remote_call.save_state)
    def save_state(self, path: str) -> None:
        """All ranks write a part."""
        self.engine.save_state(Path(path) / self.role.lower())

    @rpc(remote_call.load_state)
    def load_state(self, path: str) -> list[str]:
        """All ranks read."""
        return self.engine.load_state(Path(path) / self.role.lower())
