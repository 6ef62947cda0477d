"""From the command line to a finished run: configuration -> job -> submit."""

import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path

from components.data.tasks import get_task
from components.hub import find_model
from components.launch import STOP_GRACE_S, open_run, printed, run_job
from components.tracking import redact
from components.warm_start import WARM_START_PREFIX, resolve_model
from core import ConfigError, Job, JobBuilder, Role, describe_options, given_options, load_config
from core.placement import detect_devices

from .config import NEW_FROM_TEXT, RECIPE, RewardModelConfig

PRESET = Path(__file__).parent / "tiny.yaml"


def read_config(arguments: list[str]) -> RewardModelConfig:
    """The configuration. Without a model or a configuration file of the user's own it starts from the tiny preset."""
    given = given_options(RewardModelConfig, arguments)
    return load_config(RewardModelConfig, arguments, files=[] if given & {"pretrain", "config"} else [PRESET])


def build_job(config: RewardModelConfig) -> Job:
    """What runs where."""
    builder = JobBuilder().config(config).recovery(config.max_restarts, config.stall_timeout, STOP_GRACE_S)
    builder.role(Role.TRAINER).run(f"{__package__}.trainer:RewardModelTrainer")
    builder.role(Role.REWARD).train(f"{__package__}.roles.reward:Reward").resource(accelerator=1)
    builder.nnodes(config.num_nodes).nproc_per_node(config.num_gpus_per_node or 1)
    return builder.build()


def check_model(config: RewardModelConfig) -> None:
    """See that the model can be there, and its attention, before any process starts."""
    attention = config.attn_implementation or ""
    if attention.startswith("flash_attention") and not detect_devices():
        raise ConfigError(f"attn_implementation={attention} needs a GPU, and this machine shows none; leave it out")
    if attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise ConfigError(f"attn_implementation={attention} needs the package flash_attn; install it, or set sdpa")
    try:
        if config.pretrain != NEW_FROM_TEXT and not config.pretrain.startswith(WARM_START_PREFIX):
            find_model(config.pretrain)
    except ValueError as error:
        raise ConfigError(f"pretrain={config.pretrain}: {error}") from error


def check_pairs(config: RewardModelConfig, model_path: str) -> None:
    """See that pairs are there and that the model, by now a folder or hub name, can read them."""
    kind, _, task = config.dataset.partition(":")
    if kind == "task":
        try:
            get_task(task).pairs(1, config.seed)
        except ValueError as error:
            raise ConfigError(f"dataset={config.dataset}: {error}") from error
        if config.pretrain in (NEW_FROM_TEXT, f"{WARM_START_PREFIX}{task}") and not config.eval_dataset:
            return  # made for these pairs; a tokenizer takes seconds to import
    from .data import check_rows

    check_rows(config, model_path)


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; returns the exit code: 0 finished, 1 failed, 2 bad input, 130 stopped."""
    began = time.time()
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(describe_options(RewardModelConfig))
        return 0
    try:
        config = read_config(arguments)
        job = build_job(config)
        job.check_backend(config.backend)
        plan = job.model_copy(update={"config": redact(config)}).model_dump_json(indent=2)
        if config.print_config or config.dry_run:
            print(printed(config, given_options(RewardModelConfig, arguments)) if config.print_config else plan)
            return 0
        check_model(config)
        model_path = resolve_model(config.pretrain)
        check_pairs(config, model_path)
        run_dir = open_run(config.run_dir, config.resume, config.ckpt_path, plan)
    except (ValueError, OSError) as error:
        print(f"{RECIPE}: {error}", file=sys.stderr)
        return 2
    job.config = replace(config, run_dir=str(run_dir), pretrain=model_path)
    return run_job(
        job,
        recipe=RECIPE,
        run_dir=run_dir,
        seed=config.seed,
        backend=config.backend,
        began=began,
        job_name=config.job_name,
        seconds={"warm_start": time.time() - began},
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before there was anything to stop
        sys.exit(130)
