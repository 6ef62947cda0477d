"""How a run reaches the roles that hold the policy: by role groups, or, in a subclass, by another call style."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from core import Role, RoleGroup
from training import remote_call

if TYPE_CHECKING:
    from torch import Tensor

    from components.batch import Batch
    from components.generate.config import SamplingConfig
    from components.generate.sampler import Collected
    from core import BaseTrainer, Future
    from training.options.rl_options import RLOptions
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

    Engines and learners (actor and critic) that share devices may sleep while the others work: the engines between
    `end_generation` and `begin_generation`, the learners between `begin_generation` and `end_generation`.
    """

    trainer: PolicyTrainer

    def __init__(self, trainer: BaseTrainer, config: RLOptions) -> None:
        self.trainer = trainer
        self.config = config
        self.reference_folder: Path | None = None
        """Where the reference model lies since it was moved; None: where the run started from."""
        self._generates = False
        self._reported: set[str] = set()
        """Whose freed memory was shown."""

    @property
    def samplers(self) -> RoleGroup[Any]:
        """The workers whose engines sample."""
        return RoleGroup(Role.ROLLOUT)

    @property
    def learners(self) -> Sequence[RoleGroup[Any]]:
        """The workers that train: actor, and critic where there is one."""
        return [group for role in (Role.ACTOR, Role.CRITIC) if (group := RoleGroup(role, optional=True))]

    @property
    def engines(self) -> int:
        """How many sample."""
        return len(self.samplers)

    def begin_generation(self) -> None:
        """Let the learners sleep, and the engines wake; nothing happens where they are, or have no need to."""
        if self._generates:
            return
        if self.config.placement.learners_sleep:
            self._free("actor and critic", self.learners, "sleep_learner")
        if self.config.placement.engines_sleep:
            self.samplers.call("wake_engine").result()
        self._generates = True

    def end_generation(self) -> None:
        """Let the engines sleep, and the learners wake."""
        if not self._generates:
            return
        self._let_engines_sleep()
        if self.config.placement.learners_sleep:
            remote_call.wait_all([group.call("wake_learner") for group in self.learners])
        self._generates = False

    def _let_engines_sleep(self) -> None:
        if self.config.placement.engines_sleep:
            self._free("engines", [self.samplers], "sleep_engine")

    def _free(self, who: str, groups: Sequence[RoleGroup[Any]], method: str) -> None:
        nbytes = sum(sum(freeing.result()) for freeing in [group.call(method) for group in groups])
        if who not in self._reported:
            shown = f"{nbytes / 1e9:.1f} GB are freed" if nbytes else "nothing is freed, as always on a CPU"
            self.trainer.info(f"{who} sleep: {shown}")
            self._reported.add(who)

    def finish_loading(self, engines: Future[Any]) -> None:
        """Let engines that share devices load alone, and sleep: vllm measures what memory is free."""
        own = self.config.placement
        if own.engines_sleep or (own.colocate and self.config.rollout.engine == "vllm"):
            engines.result()
        self._let_engines_sleep()

    def load(self, steps: int) -> None:
        """Load every model, in parallel; `steps` set the length of schedules."""
        path = self.config.model.path
        loading = [self.trainer.RG_ROLLOUT.load(path)]
        self.finish_loading(loading[0])
        loading.append(self.trainer.RG_ACTOR.load(path, steps))
        if self.config.has_reference_role:
            loading.append(self.trainer.RG_REFERENCE.load(path))
        remote_call.wait_all(loading)

    def begin(self, prompts: list[Batch | None], sampling: SamplingConfig) -> None:
        """Begin responses that `collect` brings; the list has an item for every engine."""
        self.samplers.call_batch("begin", len(prompts), prompts, sampling).result()

    def collect(self, seconds: float) -> Sequence[Collected]:
        """From every engine what has finished, in whole groups, after at most so many seconds."""
        return self.samplers.call("collect", seconds).result()

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

    def sync_weights(self, version: int) -> dict[str, float]:
        """Bring the policy to every engine; returns metrics of the engines."""
        return remote_call.sync_weights(version)

    def sync_reference(self, step: int, share: float) -> None:
        """Let the reference model move towards the policy, by this share of the way."""
        self.end_generation()
        folder = Path(self.config.run_dir, "reference")
        policy, target = folder / "policy", folder / f"step_{step}"
        for old in (policy, target):
            shutil.rmtree(old, ignore_errors=True)
        self.save(policy)
        # What it is from here on lies in a folder, from which a replacement or a resumed run loads it too.
        self.trainer.RG_REFERENCE.follow(str(policy), share, str(target))
        self._load_reference(target)

    def _open_reference(self, path: Path) -> None:
        """Let every instance of the reference load a model."""
        self.trainer.RG_REFERENCE.load(str(path)).result()

    def _load_reference(self, path: Path) -> None:
        self._open_reference(path)
        self.reference_folder = path
        for other in path.parent.iterdir():
            if other != path:
                shutil.rmtree(other)

    def save_state(self, folder: Path) -> None:
        """Write what training resumes from into the folder of a step's checkpoint."""
        self._save_learners(folder / "state")
        if self.reference_folder is not None:
            shutil.copytree(self.reference_folder, folder / "state" / "reference")

    def _save_learners(self, folder: Path) -> None:
        remote_call.wait_all([group.call("save_state", str(folder)) for group in self.learners])

    def _load_learners(self, folder: Path) -> list[str]:
        loading = [group.call("load_state", str(folder)) for group in self.learners]
        return [line for future in loading for line in future.result()[0]]

    def load_state(self, folder: Path) -> list[str]:
        """Resume from it; what cannot be exact is returned in words."""
        reference = folder / "state" / "reference"
        if reference.exists():
            target = Path(self.config.run_dir, "reference", "resumed")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(reference, target)
            self._load_reference(target)
        return self._load_learners(folder / "state")

    def save(self, folder: Path) -> None:
        """Write the policy as a folder that `from_pretrained` loads."""
        self.learners[0].call("save", str(folder)).result()

    def end(self) -> None:
        """Let the roles know that no call will follow."""
        remote_call.end_job()
