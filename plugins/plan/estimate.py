"""Memory that the roles of a run need, which work on the same sequences. Nothing here needs torch."""

from __future__ import annotations

from typing import Any

from components.generate.config import RolloutConfig
from components.models.size import model_size
from components.train.config import FrozenConfig, TrainConfig
from core import Job
from plugins.plan.memory import Need, frozen, learning, sampling
from plugins.plan.plan import Capacity


class Estimate:
    """Computes the memory of a process of each role."""

    def __init__(self, job: Job, policy: str, max_prompt: int, max_new: int, agent: Any) -> None:
        """
        Args:
            job: what runs where.
            policy: the model that writes the sequences.
            max_prompt: tokens of a prompt.
            max_new: tokens of a response.
            agent: the options of agents, which know how long an episode may be.
        """
        self._gpu, self._processes = job.device_type == "GPU", job.placement.processes
        self._device = Capacity.here(self._gpu, job.node_num).device
        read, size = agent.longest_prompt(max_prompt, max_new), model_size(policy)
        limits = (read and read + max_new, size and size.positions)
        self._longest = min(filter(None, limits), default=max_prompt + max_new)

    def trained(self, role: str, model: str, config: TrainConfig, sequences: int, **options: Any) -> Need:
        """A model under an engine, whose optimizer steps have so many sequences; options as in `training`."""
        ranks = self._processes.get(role)
        if ranks is None:
            return Need()  # nobody has this role
        return learning(model_size(model), config, ranks, self._longest, sequences, gpu=self._gpu, **options)

    def inferred(self, role: str, model: str, config: FrozenConfig, sequences: int, has_head: bool = True) -> Need:
        """A model under a frozen engine, which the workers of this role ask about so many sequences."""
        most, rows = config.limits.max_tokens, config.limits.max_sequences
        tokens = max(self._longest, min(most, min(rows or sequences, sequences) * self._longest))
        options = {"gpu": self._gpu, "has_head": has_head, "ranks": self._processes.get(role, 1)}
        return frozen(model_size(model), config.precision, tokens=tokens, layout=config.layout, **options)

    def sampled(self, role: str, model: str, config: RolloutConfig, responses: int) -> Need:
        """One of the engines that share so many responses."""
        rows = -(-responses // self._processes.get(role, 1))
        return sampling(model_size(model), config, rows, self._longest, self._device, gpu=self._gpu)
