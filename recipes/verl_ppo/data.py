"""Checks of a run's inputs. torch is imported only if a user's model has to be read."""

from collections.abc import Collection
from functools import partial

from agents.first_call import try_agent
from components.data.values import check_one_kind
from training.launch.inputs import check_encoding, check_heldout, data_tokenizer
from training.launch.model_checks import check_model
from training.launch.reader_checks import check_reader, check_reward_model
from training.options.schema import ConfigError

from .config import VerlPPOConfig
from .reward import check_rewards, try_function


def check_inputs(config: VerlPPOConfig, notes: list[str], absent: Collection[str] = ()) -> int:
    """Check models, data and rewards before any process starts, and return the number of prompts.

    Args:
        config: configuration of the run.
        notes: list to which notes about unused rows and the trials of rewards and agents are appended.
        absent: options whose models are missing on this machine. They are not checked.

    Raises:
        ConfigError: one of them cannot be used.
    """
    try:
        encodes = "model.path" not in absent
        if encodes:
            check_model(config.model.path)
        if config.needs_critic and config.critic.path and "critic.path" not in absent:
            check_reader(config.critic.path, "critic.path", config.model)
        reference = config.algorithm.reference_path
        if config.needs_reference and reference and "algorithm.reference_path" not in absent:
            check_reader(reference, "algorithm.reference_path", config.model)
        if config.reward.model_path and encodes and "reward.model_path" not in absent:
            check_reward_model(config.reward.model_path, "reward.model_path", config.model)
        rows = config.rows(notes=notes)
        heldout = config.rows(heldout=True, notes=notes)
        for path, some in ((config.data.path, rows), (config.evaluation.path, heldout)):
            check_one_kind((row["input"] for row in some), str(path))
        check_rewards(config, rows, heldout)
        # An episode has several responses, so the limit of one does not bound its length.
        most = None if config.agent.func_path else config.rollout.max_new_tokens
        too_long = 0
        if encodes:
            too_long = check_encoding(config.model, config.data, rows, config.seed, most)
            check_heldout(config.model, config.data, heldout, config.seed, most)
        tried = {"the data": rows, "the held-out data": heldout}
        notes += try_function(config, tried)
        if config.agent.func_path:
            notes += try_agent(
                config.agent, config.data, tried, partial(data_tokenizer, config.model) if encodes else None
            )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return len(rows) - too_long
