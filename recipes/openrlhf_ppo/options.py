"""The flat options of config.py as the groups of options that recipes share. Nothing here needs torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from components.engines.config import RolloutConfig, TrainConfig
from core import BaseWorkload
from training.options import LogOptions, RunOptions
from training.rl_options import RLOptions
from training.tracking import WandbConfig

from . import flags

UNLIMITED = 2**62
"""Tokens of a micro-batch that is cut by responses."""


@dataclass(kw_only=True)
class FlatLog(LogOptions):
    """Who reads along, as the flat options say it."""

    flat: Any = None

    def sinks(self) -> dict[str, Any]:
        """See `LogOptions.sinks`; W&B's switch may be a key, and TensorBoard's a folder."""
        own = self.flat
        names = {"org": own.wandb_org, "project": own.wandb_project, "group": own.wandb_group}
        wandb = WandbConfig.asked(own.use_wandb, run_name=own.wandb_run_name, **names)
        return {"wandb": wandb, "tensorboard": own.use_tensorboard}


@dataclass(kw_only=True)
class SharedOptions(RLOptions):
    """What a `PolicyRun` and the roles of the training layer read."""

    APART: ClassVar = "colocate_all_models=false, vllm_enable_sleep=false and deepspeed_enable_sleep=false"
    CORRECT: ClassVar = "enable_vllm_is_correction=true"

    flat: Any
    """The PPOConfig that these are made of."""

    def _faults_of_reward(self) -> Iterator[str]:
        """Neither files nor scorers are looked at before a run is planned; see `check_inputs`."""
        yield from ()

    @property
    def reward_source(self) -> None:
        """None: the reward role scores, or the agent's environment does."""

    @property
    def filter_range(self) -> tuple[float, float] | None:
        """See `RLOptions.filter_range`."""
        return self.flat.dynamic_filtering_reward_range if self.flat.dynamic_filtering else None

    @property
    def forward_limits(self) -> tuple[int, int]:
        """See `RLOptions.forward_limits`."""
        own = self.flat
        if own.use_dynamic_batch:
            return own.rollout_max_tokens_per_gpu or own.train_max_tokens_per_gpu, 0
        return UNLIMITED, own.micro_rollout_batch_size

    @property
    def micro_batch_size(self) -> str:
        """See `RLOptions.micro_batch_size`."""
        own = self.flat
        return super().micro_batch_size if own.use_dynamic_batch else f"{own.micro_train_batch_size} responses"

    def optimizer_steps(self, count: int) -> int:
        """All of train_batch_size, but at the end of filtered data, where one of a few responses would move as far."""
        return max(round(count / self.flat.train_batch_size), 1)

    def rollout_engine(self) -> RolloutConfig:
        """See `RLOptions.rollout_engine`."""
        own = self.flat
        longest = self.agent.longest_prompt(own.prompt_max_len, own.generate_max_len)
        return self.rollout.engine_config(self.dtype, longest, own.colocate_all_models, sleeps=own.vllm_enable_sleep)

    def train_engine(self, steps: int) -> TrainConfig:
        """See `RLOptions.train_engine`."""
        own = self.flat
        forward_max_tokens, forward_max_sequences = self.forward_limits
        return replace(
            super().train_engine(steps),
            max_sequences=0 if own.use_dynamic_batch else own.micro_train_batch_size,
            forward_max_tokens=forward_max_tokens,
            forward_max_sequences=forward_max_sequences,
            ema_beta=own.ema_beta if own.enable_ema else None,
        )

    def critic_engine(self, steps: int) -> TrainConfig:
        """The engine of the critic's ranks, in a run of so many steps."""
        return replace(self.train_engine(steps), learning_rate=self.flat.critic_learning_rate, ema_beta=None)


def shared_options(flat: Any) -> SharedOptions:
    """The groups of options that a PPOConfig means.

    Raises:
        ValueError: a group refuses its options; `renamed` makes its message one about the flat ones.
    """
    own: dict[str, dict[str, Any]] = {
        group: {there: getattr(flat, here) for there, here in names.items()} for group, names in flags.GROUPS.items()
    }
    own["algorithm"]["correction"] = "tis" if flat.enable_vllm_is_correction else "none"
    own["train"]["mini_batch_size"] = flat.train_batch_size
    own["train"]["epochs"] = flat.max_epochs
    own["train"]["precision"] = "bf16" if flat.bf16 else "fp32"
    own["train"]["max_tokens"] = flat.train_max_tokens_per_gpu if flat.use_dynamic_batch else UNLIMITED
    own["train"]["lora_target_modules"] = ",".join(flat.target_modules)
    own["placement"] = {
        "nodes": flat.nodes,
        "colocate": flat.colocate_all_models or flat.vllm_enable_sleep or flat.deepspeed_enable_sleep,
        # Whatever this is read for, ranks of actor and critic alike have to have a response each.
        "actor_ranks": max(flat.ranks.values()),
        "rollout_engines": flat.vllm_num_engines,
    }
    usual = RLOptions.__dataclass_fields__
    groups: dict[str, Any] = {name: replace(usual[name].default_factory(), **values) for name, values in own.items()}
    run = {option.name: getattr(flat, option.name) for option in fields(RunOptions)}
    return SharedOptions(
        flat=flat,
        **run,
        **groups,
        prompts_per_step=flat.rollout_batch_size,
        samples_per_prompt=flat.n_samples_per_prompt,
        log=FlatLog(flat=flat),
    )


def renamed(text: str) -> str:
    """A sentence about options of the groups, with their names in config.py."""
    return re.sub(r"[a-z_]+(\.[a-z_]+)?", lambda found: flags.RENAMED.get(found[0], found[0]), text)


class FlatRole(BaseWorkload):
    """A role whose job has the flat options, and whose base class reads the groups; `config.flat` has the flat ones."""

    def setup(self) -> None:
        """Called before any other call."""
        self.config = shared_options(self.config)
        super().setup()
