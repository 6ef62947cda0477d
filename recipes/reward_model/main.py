"""From the command line to a finished run: configuration -> job -> submit."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.data.tasks import get_task
from components.engines.choice import choose_attention
from components.hub import find_model
from core import Job, JobBuilder, Role
from core.placement import detect_devices
from training.config import ConfigError, changed_options, describe_options, given_options, load_config
from training.launch import STOP_GRACE_S, open_run
from training.plan import supervised_plan
from training.warm_start import WARM_START_PREFIX, resolve_model

from .config import NEW_FROM_TEXT, RECIPE, RewardModelConfig

PRESET = Path(__file__).parent / "tiny.yaml"


def presets(arguments: list[str]) -> list[Path]:
    """What a run starts from: without a model or a configuration file of the user's own the tiny preset."""
    return [] if given_options(RewardModelConfig, arguments) & {"pretrain", "config"} else [PRESET]


def read_config(arguments: list[str]) -> RewardModelConfig:
    """The configuration."""
    return load_config(RewardModelConfig, arguments, files=presets(arguments))


def build_job(config: RewardModelConfig) -> Job:
    """What runs where."""
    builder = JobBuilder().config(config).recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S)
    builder.role(Role.TRAINER).run(f"{__package__}.trainer:RewardModelTrainer")
    builder.role(Role.REWARD).train(f"{__package__}.roles.reward:Reward").resource(accelerator=1)
    builder.nnodes(config.num_nodes).nproc_per_node(config.num_gpus_per_node or 1)
    return builder.build()


def check_model(config: RewardModelConfig) -> None:
    """See that the model can be there, and its attention, before any process starts."""
    choose_attention(config.attn_implementation, detect_devices())
    try:
        if config.pretrain != NEW_FROM_TEXT and not config.pretrain.startswith(WARM_START_PREFIX):
            find_model(config.pretrain)
    except ValueError as error:
        raise ConfigError(f"pretrain={config.pretrain}: {error}") from error


def look_at_pairs(config: RewardModelConfig) -> dict[str, list[dict[str, Any]]]:
    """The first rows of the pairs, by option, before a model is made that is to read them; none where the model is made
    for these very pairs.
    """
    kind, _, task = config.dataset.partition(":")
    if kind == "task":
        try:
            get_task(task).pairs(1, config.seed)
        except ValueError as error:
            raise ConfigError(f"dataset={config.dataset}: {error}") from error
        if config.pretrain in (NEW_FROM_TEXT, f"{WARM_START_PREFIX}{task}") and not config.eval_dataset:
            return {}  # a tokenizer takes seconds to import
    from components.data.preferences import first_rows

    return first_rows(config.sources)


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; returns the exit code: 0 finished, 1 failed, 2 bad input, 130 stopped."""
    began = time.time()
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(describe_options(RewardModelConfig))
        return 0
    try:
        config = read_config(arguments)
        changed = changed_options(RewardModelConfig, arguments, presets(arguments))
        plan = supervised_plan(RECIPE, build_job(config), config, changed, Role.REWARD)
        if plan.is_all(config, given_options(RewardModelConfig, arguments)):
            return 0
        check_model(config)
        rows = look_at_pairs(config)
        model_path = resolve_model(config.pretrain)
        if rows:
            from .data import check_rows

            check_rows(config, model_path, rows)
        run_dir = open_run(config.run_dir, config.resume, config.ckpt_path, plan.json())
    except (ValueError, OSError) as error:
        print(f"{RECIPE}: {error}", file=sys.stderr)
        return 2
    plan.job.config = replace(config, run_dir=str(run_dir), pretrain=model_path)
    return plan.run(run_dir, began, warm_start=time.time() - began)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before there was anything to stop
        sys.exit(130)
