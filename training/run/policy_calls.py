"""Calls of a run to the roles that hold the policy. A subclass may replace role groups by another style of call."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from components.registry import load
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
    from training.roles.rollout import RolloutWorker


UPDATES = "reference update", "sync"
"""Kind and name of the plug-in that moves the reference model towards the policy."""


class PolicyTrainer(Protocol):
    """Attributes of a trainer that `PolicyCalls` uses."""

    config: Any
    RG_ACTOR: RoleGroup[PolicyWorker[Any]]
    RG_ROLLOUT: RoleGroup[RolloutWorker]
    RG_REFERENCE: RoleGroup[Any]

    def info(self, text: str) -> None:
        """Print a line for the user."""


class PolicyCalls:
    """Calls that a `PolicyRun` makes to the roles, in addition to those of the recipe's loop.

    The roles are the role groups `RG_ACTOR`, `RG_ROLLOUT` and, with a KL penalty, `RG_REFERENCE` of the trainer.

    Engines and learners (actor and critic) that share devices can sleep in turns: learners between `begin_generation`
    and `end_generation`, engines at all other times.
    """

    trainer: PolicyTrainer

    def __init__(self, trainer: BaseTrainer, config: RLOptions) -> None:
        self.trainer = trainer
        self.config = config
        self.reference_folder: Path | None = None
        """Folder of the reference model after its last update, or None if it is still the initial model."""
        self._generates = False
        self._reported: set[str] = set()
        """Names of the workers whose freed memory was reported."""

    @property
    def samplers(self) -> RoleGroup[Any]:
        """Workers whose engines sample."""
        return RoleGroup(Role.ROLLOUT)

    @property
    def learners(self) -> Sequence[RoleGroup[Any]]:
        """Workers that train: the actor, and the critic if there is one."""
        return [group for role in (Role.ACTOR, Role.CRITIC) if (group := RoleGroup(role, optional=True))]

    @property
    def reference_model(self) -> str:
        """Path of the model that the reference role loads first."""
        return self.config.model.path

    @property
    def engines(self) -> int:
        """Number of engines that sample."""
        return len(self.samplers)

    def begin_generation(self) -> None:
        """Put the learners to sleep and wake the engines, as far as the options say so."""
        if self._generates:
            return
        # The learners first: an engine that wakes up allocates its cache at once, and needs the memory they free.
        if self.config.placement.learners_sleep:
            self._free("actor and critic", self.learners, "sleep_learner")
        if self.config.placement.engines_sleep:
            self.samplers.call("wake_engine").result()
        self._generates = True

    def end_generation(self) -> None:
        """Put the engines to sleep and wake the learners."""
        if not self._generates:
            return
        # In the reverse order of `begin_generation`, for the same reason.
        self._let_engines_sleep()
        if self.config.placement.learners_sleep:
            remote_call.wait_all([group.call("wake_learner") for group in self.learners])
        self._generates = False

    def _let_engines_sleep(self) -> None:
        if self.config.placement.engines_sleep:
            self._free("engines", [self.samplers], "sleep_engine")

    def _free(self, sleepers: str, groups: Sequence[RoleGroup[Any]], method: str) -> None:
        # All groups are called before the first result is read, so that they free their memory in parallel.
        nbytes = sum(sum(freeing.result()) for freeing in [group.call(method) for group in groups])
        if sleepers not in self._reported:
            effect = f"{nbytes / 1e9:.1f} GB are freed" if nbytes else "nothing is freed, as always on a CPU"
            self.trainer.info(f"{sleepers} sleep: {effect}")
            self._reported.add(sleepers)

    def finish_loading(self, engines: Future[Any]) -> None:
        """Wait for engines that share devices, then put them to sleep.

        vLLM sizes its cache by the free device memory, so no other role may load at the same time.
        """
        placement = self.config.placement
        if placement.engines_sleep or (placement.colocate and self.config.rollout.engine == "vllm"):
            engines.result()
        self._let_engines_sleep()

    def load(self, steps: int) -> None:
        """Load all models in parallel. `steps` is the length of the learning-rate schedules."""
        path = self.config.model.path
        # Engines first: `finish_loading` may have to wait for them before any other role takes device memory.
        loading = [self.trainer.RG_ROLLOUT.load(path)]
        self.finish_loading(loading[0])
        loading.append(self.trainer.RG_ACTOR.load(path, steps))
        if self.config.has_reference_role:
            loading.append(self.trainer.RG_REFERENCE.load(self.reference_model))
        remote_call.wait_all(loading)

    def begin(self, prompts: list[Batch | None], sampling: SamplingConfig) -> None:
        """Start responses that `collect` returns. `prompts` has one item per engine."""
        self.samplers.call_batch("begin", len(prompts), prompts, sampling).result()

    def collect(self, seconds: float) -> Sequence[Collected]:
        """Return the finished groups of each engine after at most `seconds`."""
        return self.samplers.call("collect", seconds).result()

    def old_and_reference_logprobs(self, tokens: Batch) -> dict[str, Tensor]:
        """Return the columns `logprob` and `reference_logprob` [N], in nats, as far as they are needed."""
        calls = []
        if self.config.needs_old_logprobs:
            calls.append(self.trainer.RG_ACTOR.logprobs(tokens, self.config.rollout.temperature))
            if self.config.placement.colocate:
                calls[0].result()  # wait, because the reference model needs the same cores
        if self.config.needs_reference:
            compute = self.trainer.RG_ACTOR.reference_logprobs
            if not self.config.is_own_reference:
                compute = self.trainer.RG_REFERENCE.logprobs
            calls.append(compute(tokens.only("tokens")))
        columns: dict[str, Tensor] = {}
        for future in calls:
            columns |= future.result().per_token
        return columns

    def sync_weights(self, version: int) -> dict[str, float]:
        """Send the policy to every engine. Return metrics of the engines."""
        return remote_call.sync_weights(version)

    def sync_reference(self, step: int, share: float) -> None:
        """Interpolate the reference model towards the policy. `share` is the weight of the policy."""
        load(*UPDATES, "algorithm.reference_sync_steps")(self, step, share)

    def _open_reference(self, path: Path) -> None:
        """Load a model in every instance of the reference role."""
        self.trainer.RG_REFERENCE.load(str(path)).result()

    def load_reference(self, path: Path) -> None:
        self._open_reference(path)
        self.reference_folder = path
        # Removed last: until the load has returned, an instance may still read the folder from before.
        for other in path.parent.iterdir():
            if other != path:
                shutil.rmtree(other)

    def save_state(self, folder: Path) -> None:
        """Save the training state in the folder of a checkpoint."""
        self._save_learners(folder / "state")
        # Copied: `model.path` is still the initial model, and the folder in run_dir is replaced by later updates.
        if self.reference_folder is not None:
            shutil.copytree(self.reference_folder, folder / "state" / "reference")

    def _save_learners(self, folder: Path) -> None:
        remote_call.wait_all([group.call("save_state", str(folder)) for group in self.learners])

    def _load_learners(self, folder: Path) -> list[str]:
        loading = [group.call("load_state", str(folder)) for group in self.learners]
        return [note for future in loading for note in future.result()[0]]

    def load_state(self, folder: Path) -> list[str]:
        """Resume from a checkpoint. Return a list of notes about state that could not be restored exactly."""
        reference = folder / "state" / "reference"
        if reference.exists():
            # Copied, because `checkpoint.keep` may remove the checkpoint while the run still needs its reference.
            target = Path(self.config.run_dir, "reference", "resumed")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(reference, target)
            self.load_reference(target)
        return self._load_learners(folder / "state")

    def save(self, folder: Path) -> None:
        """Save the policy in a folder that `from_pretrained` loads."""
        self.learners[0].call("save", str(folder)).result()

    def end(self) -> None:
        """Close the roles at the end of the job."""
        remote_call.end_job()
