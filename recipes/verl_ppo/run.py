"""What every run has (`PolicyRun`), on verl's keys: its rows, rewards, baselines, validation and names of metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from components.data.samples import for_samples
from components.engines.config import TrainConfig, TrainOptions
from training import options
from training.policy_run import Generate, PolicyRun, Score
from training.rl_options import RLOptions

from .config import VerlPPOConfig
from .data import prompt_source, read_rows
from .keys import refuse
from .metrics import experience_metrics, heldout_metrics, performance, renamed
from .remote_call import VerlCalls
from .reward import RewardManager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch
    from components.data.prompts import PromptSource
    from core import BaseTrainer
    from training.rollout_queue import Stateful

SHOWN = (
    "reward/score",
    "eval/score",
    "val-core/",
    "response_length/mean",
    "actor/ppo_kl",
    "actor/entropy",
    "timing_s/step",
)
"""What a person sees of a step."""


@dataclass(kw_only=True)
class SharedOptions(RLOptions):
    """The options that recipes share, of verl's keys, which config.py has checked."""

    FILTER_OPTION: ClassVar[str] = "algorithm.filter_groups"
    keys: VerlPPOConfig

    def __post_init__(self) -> None:
        """Nothing is left to check."""

    @property
    def filter_range(self) -> tuple[None, None] | None:
        """See `RLOptions.filter_range`."""
        return (None, None) if self.keys.algorithm.filter_groups.enable else None

    def steps(self, num_prompts: int) -> int:
        """Steps that so many prompts fill, of all epochs together."""
        return self.keys.steps_of(num_prompts)

    def arithmetic(self, num_prompts: int) -> str:
        """How much of what a run does, in a sentence."""
        return self.keys.arithmetic(num_prompts)


def of_engine(engine: TrainConfig) -> options.PolicyTrainOptions:
    """The options that come to a training engine."""
    return options.PolicyTrainOptions(**{name.name: getattr(engine, name.name) for name in fields(TrainOptions)})


def shared_options(keys: VerlPPOConfig) -> SharedOptions:
    """What verl's keys come to in the options that recipes share."""
    loggers, rollouts = keys.trainer.logger, keys.rollout
    return SharedOptions(
        keys=keys,
        run_dir=keys.run_dir,
        seed=keys.seed,
        resume=keys.resume,
        agent=keys.agent,
        asynchronous=keys.asynchronous,
        model=options.ModelOptions(**keys.shared("model")),
        data=options.DataOptions(**keys.shared("data")),
        rollout=rollouts,
        train=of_engine(keys.engine("actor", 1)),
        evaluation=options.EvaluationOptions(**keys.shared("evaluation"), temperature=keys.val_temperature),
        placement=options.PlacementOptions(
            actor_ranks=keys.pools.workers(keys.policy_role),
            rollout_engines=keys.pools.workers(keys.rollout_role) // rollouts.tensor_parallel,
        ),
        checkpoint=options.CheckpointOptions(**keys.shared("checkpoint")),
        log=options.LogOptions(**keys.shared("log"), wandb="wandb" in loggers, tensorboard="tensorboard" in loggers),
        **keys.shared(""),
    )


class VerlRun(PolicyRun):
    """See `PolicyRun`."""

    def __init__(self, trainer: BaseTrainer, keys: VerlPPOConfig, recipe: Path, parts: Mapping[str, Stateful]) -> None:
        """
        Args:
            trainer: whose run it is; it has the worker groups.
            keys: the options.
            recipe: the folder of the recipe.
            parts: what else of the trainer a checkpoint holds, by name.
        """
        self.keys = keys
        config = shared_options(keys)
        super().__init__(trainer, config, recipe, calls=VerlCalls(trainer, config), shown=SHOWN, parts=parts)

    def close(self) -> None:
        """See `PolicyRun.close`."""
        self.manager.close()
        super().close()

    # --- data and rewards

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.keys.tokenizer()

    def _read_rows(self, heldout: bool = False) -> list[dict[str, Any]]:
        return read_rows(self.keys, heldout)

    def _open_prompts(self, rows: list[dict[str, Any]], heldout: bool = False) -> PromptSource:
        return prompt_source(self.keys, rows, self.tokenizer, heldout, self.info)

    def _open_reward(self) -> None:
        self.manager = RewardManager(self.keys, self.tokenizer, self.info)

    def add_rewards(self, rollouts: Batch) -> Batch:
        """Add `reward` and `score`, as the reward manager says."""
        return self.manager(rollouts)

    def _respond_to(self, prompts: Batch, step: int) -> Batch:
        """See `PolicyRun`; for ReMax with `greedy_reward`, that of the greedy response to the same prompt."""
        rollouts = super()._respond_to(prompts, step)
        if self.keys.algorithm.adv_estimator != "remax":
            return rollouts
        with self.phase("generate"):
            greedy = self.generate(for_samples(prompts, 1), self.config.sampling(step, 0.0))
        rewards = self._scored(greedy)["reward"].tolist()
        baselines = dict(zip(prompts["prompt_id"].tolist(), rewards, strict=True))
        baseline_B = torch.tensor([baselines[prompt] for prompt in rollouts["prompt_id"].tolist()])
        return rollouts.with_sequences(greedy_reward=baseline_B)

    # --- steps, and where they begin

    def _count_steps(self) -> int:
        refuse({"few_prompts": self.keys.steps(len(self.prompts)) < 1}, c=self.keys, count=len(self.prompts))
        return super()._count_steps()

    def _steps_left(self) -> int:
        steps, most = super()._steps_left(), self.keys.trainer.total_training_steps
        return steps if most is None else min(steps, max(most - self.step - self.stream.queued, 0))

    def _restore(self, folder: Path) -> None:
        if self.config.asynchronous.ahead:
            # Each step has a version of its own; the run before may have trained the critic alone, with none.
            self.progress.version = self.step
        super()._restore(folder)

    # --- validation

    def validate(self, generate: Generate, score: Score) -> None:
        """Evaluate the policy as it is, log what was found, and end the run (trainer.val_only)."""
        self.generate = generate
        self._score_heldout = score
        found = self.evaluation.at_step(is_last=True)
        self.tracker.log(self.step, found)
        if self.evaluation.prompts is not None:
            end = {"end": found["eval/score"], "end_greedy": found["eval/score_greedy"]}
            self.tracker.update_summary(score=end | {"examples": len(self.evaluation.prompts)})
        self.info("nothing was trained (trainer.val_only)")
        self.close()

    def _evaluate_start(self) -> None:
        if self.keys.trainer.val_before_train:
            super()._evaluate_start()

    def _evaluate(self) -> dict[str, float]:
        began = time.monotonic()
        found = super()._evaluate()
        return found | {"timing_s/testing": time.monotonic() - began}

    # --- metrics

    def measure(self, experience: Batch) -> dict[str, float]:
        """See `PolicyRun.measure`."""
        took = renamed(self.count(experience))
        found = experience_metrics(experience, self.keys) | took | self.checkpoints.metrics | self.stream.metrics
        found |= performance(experience, took, self.config.placement.actor_ranks or 1)
        return found | {"training/global_step": float(self.step), "training/epoch": float(self.prompts.epoch)}

    def rename(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics under verl's names."""
        return renamed(metrics)

    def describe_heldout(self, rollouts: Batch) -> Mapping[str, float]:
        """`val-core/...` and `val-aux/...`, see `heldout_metrics`."""
        return heldout_metrics(rollouts)
