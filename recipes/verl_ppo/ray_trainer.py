"""verl's program as Python: `RayPPOTrainer`, `Role`, `ResourcePoolManager`, `RewardManager`, over this recipe.

    from recipes.verl_ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, RewardManager, Role, ...

A command line needs none of this: pools, workers and rewards are options (`placement.pools`, `placement.role_pools`,
`reward.source`), and the classes here write those options. Names and arguments are those of verl's PPO architecture
guide. Nothing else in the recipe imports this file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from components.batch import Batch
from components.process.code_files import load_file
from components.rewards.score_functions import ScoreCode, ScoreFunction, default_functions, find_function
from core import Job
from core import WorkerGroup as RayWorkerGroup

from .config import VerlPPOConfig
from .data import check_inputs
from .dataset import RLHFDataset
from .main import VerlCommand, build_job, role_worker_mapping
from .reward import OWN_FUNCTIONS
from .roles.actor_rollout_ref import ActorRolloutRefWorker
from .roles.critic import CriticWorker
from .roles.reward_model import RewardModelWorker
from .trainer import VerlPPOTrainer

__all__ = [
    "ActorRolloutRefWorker",
    "CriticWorker",
    "NVMegatronRayWorkerGroup",
    "RLHFDataset",
    "RayPPOTrainer",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "RewardManager",
    "RewardModelWorker",
    "Role",
    "_select_rm_score_fn",
]

NVMegatronRayWorkerGroup = RayWorkerGroup
"""Tensor and context parallelism are options of the same worker group (`parallel.tensor`, `parallel.context`)."""


class Role(Enum):
    """Parts of the policy and other models that a worker group may hold, as verl numbers them.

    Python allows no subclass of an Enum with members. A role of your own is its name, a string, wherever a Role goes.
    """

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6


_OPTION_NAMES: Mapping[Role | str, str] = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
}


def _option_name(role: Role | str) -> str:
    """Return the name of a role in `placement.role_pools`."""
    return _OPTION_NAMES.get(role) or str(role)


@dataclass
class ResourcePoolManager:
    """Pools of processes, and the pool of each role.

    Raises:
        ValueError: a role is mapped to a pool that does not exist.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    """Pool -> number of processes on each of its nodes (one GPU each where there are GPUs)."""
    mapping: Mapping[Role | str, str]
    """Role -> pool."""

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                pools = ", ".join(self.resource_pool_spec)
                raise ValueError(
                    f"mapping puts {_option_name(role)} into the pool {pool!r}; resource_pool_spec has {pools}"
                )

    def options(self) -> list[str]:
        """Write the pools as options of the recipe."""
        pools = {pool: list(counts) for pool, counts in self.resource_pool_spec.items()}
        roles = {_option_name(role): pool for role, pool in self.mapping.items()}
        return [f"placement.pools={json.dumps(pools)}", f"placement.role_pools={json.dumps(roles)}"]


def _select_rm_score_fn(data_source: str) -> ScoreFunction:
    """Return the built-in reward function of a data source.

    Raises:
        NotImplementedError: there is none.
    """
    function = find_function(default_functions() | OWN_FUNCTIONS, data_source)
    if function is None:
        raise NotImplementedError(
            f"no reward function for data source {data_source!r}; pass RewardManager(compute_score=...) or "
            "RewardManager(select_rm_score_fn=...)"
        )
    return function


@dataclass(frozen=True)
class RewardManager:
    """Rewards responses by a function that is chosen by the data source of the prompt.

    The functions run in processes of their own, with a deadline, as in every recipe here. With a reward model
    (`reward_model.enable`) the model's score is the reward of data sources without a function.
    """

    tokenizer: Any = None
    """Tokenizer of the policy. The run decodes responses with the tokenizer of `model.path`."""
    num_examine: int = 0
    """Number of scored responses to print per data source and step."""
    compute_score: ScoreFunction | None = None
    """`compute_score(data_source, solution_str, ground_truth, extra_info=None)` from the top level of a file. None: the
    built-in functions."""
    select_rm_score_fn: Callable[[str], ScoreFunction] | None = None
    """Instead: a function from the top level of a file that returns the reward function of a data source, which is
    called with `solution_str` and `ground_truth`. None: `_select_rm_score_fn` of the program, if it defines one."""
    reward_fn_key: str = "data_source"
    """Column of the data source."""
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `compute_score`."""

    def options(self) -> list[str]:
        """Write the reward function as options of the recipe."""
        options = [f"data.source_key={self.reward_fn_key}"]
        if self.compute_score is not None:
            path, name = _place_of(self.compute_score)
            options += [f"reward.source={path}", f"reward.function={name}"]
            options += [f"reward.arguments={json.dumps(dict(self.reward_kwargs))}"]
        return options

    def code(self) -> ScoreCode | None:
        """Return what reward processes run where options cannot name it, or None."""
        select = self.select_rm_score_fn or getattr(sys.modules["__main__"], "_select_rm_score_fn", None)
        if self.compute_score is not None or select in (None, _select_rm_score_fn):
            return None
        return ScoreCode(functions={"*": partial(_score_by_selection, *_place_of(select))})


RewardFunction = Callable[[Batch], "Batch | torch.Tensor | Sequence[float]"]
"""Rewards B rollouts: a tensor or list of B numbers, or the batch with the columns `reward`, `score`, `reward_failed`.
It runs in the trainer's process, without a deadline."""


def _place_of(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the file and the name of a function, by which another process finds it."""
    name = getattr(function, "__qualname__", "")
    code = getattr(function, "__code__", None)
    if code is None or "." in name or "<" in name:
        raise ValueError(f"{function!r} is not a function from the top level of a file; define it there")
    return str(Path(code.co_filename).resolve()), name


@cache
def _loaded(path: str) -> Any:
    return load_file(Path(path))


def _score_by_selection(
    path: str, name: str, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> Any:
    """Call the function that a user's `_select_rm_score_fn` returns for a data source."""
    function = getattr(_loaded(path), name)(data_source)
    if isinstance(function, partial):  # a built-in one, from this module's _select_rm_score_fn
        return function(data_source, solution_str, ground_truth, extra_info)
    return function(solution_str, ground_truth)


class _ObjectTrainer(VerlPPOTrainer):
    """Trainer of a run whose rewards are objects of the user's program."""

    def score(self, rollouts: Batch) -> Batch:
        """Add `reward` and `score` by `reward_fn`."""
        return self._score_by(getattr(self.config, "reward_fn", None), rollouts)

    def score_heldout(self, rollouts: Batch) -> Batch:
        """Add `reward` and `score` to held-out rollouts by `val_reward_fn`."""
        return self._score_by(getattr(self.config, "val_reward_fn", None), rollouts)

    def _score_by(self, function: RewardManager | RewardFunction | None, rollouts: Batch) -> Batch:
        if function is None or isinstance(function, RewardManager):
            self.policy_run.manager.num_examine = getattr(function, "num_examine", 0)
            return super().score(rollouts)
        rewards = function(rollouts)
        if isinstance(rewards, Batch):
            return rewards
        reward_B = torch.as_tensor(rewards, dtype=torch.float32)
        if reward_B.shape != (len(rollouts),):
            raise ValueError(f"reward_fn returned shape {tuple(reward_B.shape)} for {len(rollouts)} responses")
        return rollouts.with_sequences(reward=reward_B, score=reward_B, reward_failed=torch.zeros_like(reward_B))


class _ObjectCommand(VerlCommand):
    """The recipe's command with workers and rewards that are objects of the user's program."""

    workers: Mapping[str, str]
    rewards: Mapping[str, Any]

    def resolved(self, requested: VerlPPOConfig) -> VerlPPOConfig:
        """See `PolicyCommand.resolved`."""
        return self._with_rewards(super().resolved(requested))

    def ready(self, config: VerlPPOConfig) -> VerlPPOConfig:
        return self._with_rewards(super().ready(config))

    def _with_rewards(self, config: VerlPPOConfig) -> VerlPPOConfig:
        # Attributes, not options: workers receive them with the configuration, but no file or command line sets them.
        for name, value in self.rewards.items():
            setattr(config, name, value)
        return config


class RayPPOTrainer:
    """PPO, GRPO and their relatives, started from a program as verl's `main_ppo.py` does."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        role_worker_mapping: Mapping[Role | str, type[Any]] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        ray_worker_group_cls: type[Any] = RayWorkerGroup,
        reward_fn: RewardManager | RewardFunction | None = None,
        val_reward_fn: RewardManager | RewardFunction | None = None,
    ) -> None:
        """
        Args:
            config: verl's keys, as nested mapping or DictConfig; or a list of `key=value`.
            tokenizer: tokenizer of the policy. The roles load it from its `name_or_path`.
            role_worker_mapping: worker class of each role; classes from the top level of a module.
            resource_pool_manager: pools and the pool of each role. None: as the configuration says.
            ray_worker_group_cls: `RayWorkerGroup`.
            reward_fn: rewards in training. None: the built-in functions.
            val_reward_fn: rewards in validation. None: as `reward_fn`.
        """
        if not issubclass(ray_worker_group_cls, RayWorkerGroup):
            raise ValueError(f"ray_worker_group_cls={ray_worker_group_cls.__name__}; use RayWorkerGroup")
        self._options = [] if resource_pool_manager is None else resource_pool_manager.options()
        manager = reward_fn if isinstance(reward_fn, RewardManager) else RewardManager()
        self._options += manager.options()
        if tokenizer is not None:
            self._options.append(f"model.tokenizer_path={tokenizer.name_or_path}")
        self._written = config
        self._command = _ObjectCommand(VerlPPOConfig, Path(__file__).parent, self._build_job)
        self._command.rewards = {
            "reward_code": manager.code(),
            "reward_fn": reward_fn,
            "val_reward_fn": reward_fn if val_reward_fn is None else val_reward_fn,
        }
        self._workers = {_option_name(role): cls for role, cls in (role_worker_mapping or {}).items()}

    def init_workers(self) -> None:
        """Check the configuration, models and data, and plan which worker runs where.

        Worker processes start in `fit`, which also loads the models.

        Raises:
            ConfigError: something cannot work; the message says what to set.
        """
        self.build_job()

    def build_job(self) -> Job:
        """Return the plan of the processes; nothing is started."""
        return self._build_job(self._config())

    def count_prompts(self) -> int:
        """Check models, data and rewards as a run does, and return the number of prompts to train on."""
        return check_inputs(self._config(), [])

    def fit(self) -> None:
        """Train to the end.

        Raises:
            SystemExit: the run failed or was stopped; its code is that of the command line.
        """
        with tempfile.TemporaryDirectory() as folder:
            code = self._command.main(self._arguments(Path(folder)))
        if code:
            sys.exit(code)

    def _config(self) -> VerlPPOConfig:
        with tempfile.TemporaryDirectory() as folder:
            return self._command.read_resolved(self._arguments(Path(folder)))

    def _arguments(self, folder: Path) -> list[str]:
        if isinstance(self._written, list):
            return [*self._written, *self._options]
        file = folder / "config.yaml"
        OmegaConf.save(OmegaConf.create(self._written), file, resolve=True)
        return ["--config", str(file), *self._options]

    def _build_job(self, config: VerlPPOConfig) -> Job:
        builtin = role_worker_mapping(config)
        # Of the recipe's own classes it chooses the variant that ranks need.
        builtin_classes = (ActorRolloutRefWorker, CriticWorker, RewardModelWorker)
        workers = {name: _entrypoint(cls) for name, cls in self._workers.items() if cls not in builtin_classes}
        return build_job(config, {**builtin, **workers}, _entrypoint(_ObjectTrainer))


def _entrypoint(cls: type[Any]) -> str:
    """Return the path by which worker processes import a class; that of a program's own file is its name."""
    module = cls.__module__
    if module == "__main__":
        module = Path(str(getattr(sys.modules["__main__"], "__file__", "__main__"))).stem
    return f"{module}:{cls.__qualname__}"
