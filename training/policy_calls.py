"""How a run reaches the roles that hold the policy: by role groups, or, in a subclass, by another call style."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from training import remote_call

if TYPE_CHECKING:
    from torch import Tensor

    from agents.runner import Collected
    from components.batch import Batch
    from components.engines.config import SamplingConfig
    from core import BaseTrainer, RoleGroup
    from training.rl_options import RLOptions
    from training.roles.policy import PolicyWorker
    from training.roles.reference import ReferenceWorker
    from training.roles.rollout import RolloutWorker


class PolicyTrainer(Protocol):
    """What `PolicyCalls` uses of a trainer."""

    config: Any
    RG_ACTOR: RoleGroup[PolicyWorker[Any]]
    RG_ROLLOUT: RoleGroup[RolloutWorker]
    RG_REFERENCE: RoleGroup[ReferenceWorker]

    def info(self, text: str) -> None:
        """Show a line to the person at the terminal."""


class PolicyCalls:
    """What a `PolicyRun` asks of the roles besides what the loop of a recipe does; here of the trainer's `RG_ACTOR`,
    `RG_ROLLOUT` and, where there is a KL, `RG_REFERENCE`.
    """

    trainer: PolicyTrainer

    def __init__(self, trainer: BaseTrainer, config: RLOptions) -> None:
        self.trainer = trainer
        self.config = config

    @property
    def engines(self) -> int:
        """How many sample."""
        return len(self.trainer.RG_ROLLOUT)

    def load(self, steps: int) -> None:
        """Load every model, in parallel; `steps` set the length of schedules."""
        path = self.config.model.path
        loading = [self.trainer.RG_ROLLOUT.load(path)]
        if self.config.rollout.engine == "vllm" and self.config.placement.colocate:
            loading[0].result()  # it measures what memory is free, so nobody else takes some meanwhile
        loading.append(self.trainer.RG_ACTOR.load(path, steps))
        if self.config.has_reference_role:
            loading.append(self.trainer.RG_REFERENCE.load(path))
        for future in loading:
            future.result()

    def generate_plain(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """One response to each prompt, without the agent."""
        return self.trainer.RG_ROLLOUT.generate(prompts, sampling, True)

    def begin(self, prompts: list[Batch | None], sampling: SamplingConfig) -> None:
        """Begin responses that `collect` brings; the list has an item for every engine."""
        self.trainer.RG_ROLLOUT.begin(prompts, sampling)

    def collect(self, seconds: float) -> Sequence[Collected]:
        """From every engine what has finished, in whole groups, after at most so many seconds."""
        return self.trainer.RG_ROLLOUT.collect(seconds)

    def old_and_reference_logprobs(self, tokens: Batch) -> dict[str, Tensor]:
        """`logprob` and `reference_logprob` [N], in nats, where needed."""
        asked = []
        if self.config.needs_old_logprobs:
            asked.append(self.trainer.RG_ACTOR.logprobs(tokens, self.config.rollout.temperature))
            if self.config.placement.colocate:
                asked[0].result()  # so that the reference has the cores for itself
        if self.config.needs_reference:
            ask = self.trainer.RG_ACTOR.reference_logprobs
            asked.append((ask if self.config.is_own_reference else self.trainer.RG_REFERENCE.logprobs)(tokens))
        found: dict[str, Tensor] = {}
        for future in asked:
            found |= future.result().per_token
        return found

    def logprobs(self, tokens: Batch, temperatures: Sequence[float]) -> list[Batch]:
        """`logprob` per token under the policy, in nats, at each temperature."""
        asked = [self.trainer.RG_ACTOR.logprobs(tokens, temperature) for temperature in temperatures]
        return [future.result() for future in asked]

    def sync_weights(self, version: int) -> None:
        """Bring the policy to every engine."""
        remote_call.sync_weights(version)

    def save_state(self, folder: Path) -> None:
        """Write what training resumes from into the folder of a step's checkpoint."""
        self.trainer.RG_ACTOR.save_state(str(folder / "state"))

    def load_state(self, folder: Path) -> list[str]:
        """Resume from it; what cannot be exact is returned in words."""
        return self.trainer.RG_ACTOR.load_state(str(folder / "state"))

    def save(self, folder: Path) -> None:
        """Write the policy as a folder that `from_pretrained` loads."""
        self.trainer.RG_ACTOR.save(str(folder))

    def end(self) -> None:
        """Tell the roles that no call will follow."""
        remote_call.end_job()
