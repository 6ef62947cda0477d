"""What actor and critic share: an engine, the step's experience, and the passes over it."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from components.batch import Batch
from components.engines.train_engine import LossFunction, TrainEngine, init_process_group, open_engine
from core import BaseWorkload, rpc

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
                raise FloatingPointError(f"step {step}: {error}; {self.keep(minibatch, step)}") from error
        self.experience = None
        means = {name: sum(entry[name] for entry in history) / len(history) for name in history[0]}
        # On the first optimizer step of a batch the policy is the one that made the old log-probabilities.
        return means | {f"first_{name}": history[0][name] for name in ("ratio_mean",) if name in history[0]}

    @rpc(remote_call.save_state)
    def save_state(self, path: str) -> None:
        """All ranks write a part."""
        self.engine.save_state(Path(path) / self.role.lower())

    @rpc(remote_call.load_state)
    def load_state(self, path: str) -> list[str]:
        """All ranks read."""
        return self.engine.load_state(Path(path) / self.role.lower())

    def keep(self, minibatch: Batch, step: int) -> str:
        """Write a batch that could not be trained on to the run folder, once; says where."""
        path = Path(self.config.run_dir) / "failed" / f"step_{step:06d}-{self.role.lower()}.parquet"
        if self.rank == 0:
            minibatch.save(path)
        return f"the batch is in {path}"
