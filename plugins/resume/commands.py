"""Checks of a command that continues a run: its data and its model are those of the checkpoint.

This module does not import torch before it has to read data.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from components.data.sources import is_drawn
from core import Role
from plugins.resume.continuation import Continued
from training.launch.inputs import CHECKED_ROWS, data_tokenizer
from training.launch.plan import Plan
from training.launch.policy_command import PolicyCommand
from training.launch.supervised_command import SupervisedCommand
from training.options.schema import ConfigError
from training.options.supervised_options import SupervisedOptions
from training.run.strategies import GROUPS

FEW_BYTES = 32 * 2**20
"""Maximum size of data files that are compared with those of a checkpoint before each start. Larger ones are compared
only if an option of the data has changed."""


def check_prompts(command: PolicyCommand[Any], plan: Plan, continued: Continued) -> None:
    """Check that a run that trains a policy can resume from a checkpoint, before anything is written.

    Args:
        command: command of the run.
        plan: plan of the run.
        continued: the checkpoint.

    Raises:
        ValueError: it cannot. The message says what to set.
    """
    config = plan.config
    saved = continued.state.get("prompts")
    if not saved:
        raise continued.no_state_of("prompts")
    continued.check_seed(config, saved)
    # With overrides the shapes of the model differ from those of the config.json that the check reads.
    if not config.model.config_overrides:
        continued.check_trained_model(config.model.path, "model.path", config.train.lora_rank)
    if Role.CRITIC in plan.job.roles and not (continued.folder / "state" / "critic").is_dir():
        raise continued.no_state_of("the critic")
    # Only a run with partial rollouts can continue unfinished responses. Another one would drop their prompts.
    waiting = (continued.state.get(GROUPS) or {}).get("steps", ())
    if waiting and not config.asynchronous.partial_rollout:
        raise continued.unfinished_groups(len(waiting))
    rows = command.rows(config)
    if len(rows) > CHECKED_ROWS and not continued.has_changed("data.", "model."):
        return  # the trainer compares them later; a pass over all of them here would delay the start
    try:
        config.data.source(rows, data_tokenizer(config.model), config.seed).load_state_dict(saved)
    except ValueError as error:
        raise continued.other_data(f"data.path={config.data.path}", error) from error


def check_examples(command: SupervisedCommand[Any], plan: Plan, continued: Continued) -> None:
    """Check that a run on a fixed dataset can resume from a checkpoint; see `check_prompts`."""
    from training.run.epochs import Epochs

    config = plan.config
    saved = continued.state.get("data")
    if not saved:
        raise continued.no_state_of(config.EXAMPLES)
    continued.check_seed(config, saved)
    if (batch_size := saved.get("batch_size", config.train.batch_size)) != config.train.batch_size:
        raise ConfigError(
            f"train.batch_size={config.train.batch_size}, but {continued.folder} was written with "
            f"train.batch_size={batch_size}; set train.batch_size={batch_size} to resume, or name another run_dir"
        )
    if not config.model.config_overrides:
        continued.check_trained_model(config.model.path, "model.path", config.train.lora_rank)
    if not _are_few(config) and not continued.has_changed("data.", "evaluation.", "model."):
        return  # the trainer compares them later; a pass over all of them here would delay the start
    # A model of the demonstration is created in a temporary folder, so that a refused run leaves no files.
    with TemporaryDirectory() as scratch:
        train = command.training_data(config, scratch).train
    try:
        Epochs.of(config, train).load_state_dict(saved)
    except ValueError as error:
        raise continued.other_data(f"data.path={config.data.path}", error) from error


def _are_few(config: SupervisedOptions) -> bool:
    """Return True if the examples are generated, or in files that are read in a second or two."""
    files = [Path(source.name) for source in config.sources if not is_drawn(source.name)]
    return all(file.is_file() for file in files) and sum(file.stat().st_size for file in files) <= FEW_BYTES
