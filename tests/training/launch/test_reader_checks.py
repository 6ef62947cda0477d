"""Checks, before a run, of models that read the tokens of a policy."""

from pathlib import Path

import pytest

from tests.chat_models import THINK_ID, chat_model
from tests.messages import says
from training.launch.reader_checks import check_reader
from training.options.model_options import ModelOptions


def test_a_critic_with_a_smaller_embedding_than_the_policy_is_refused(tmp_path: Path) -> None:
    policy = ModelOptions(path=str(chat_model(tmp_path / "policy")))
    check_reader(policy.path, "critic.path", policy)
    # Embedding rows beyond the tokenizer's are never sampled.
    padded = ModelOptions(path=str(chat_model(tmp_path / "padded", rows=THINK_ID + 50)))
    check_reader(policy.path, "critic.path", padded)
    short = str(chat_model(tmp_path / "short", rows=THINK_ID))
    with pytest.raises(ValueError, match=says("critic.path", short, THINK_ID, policy.path, THINK_ID + 1)):
        check_reader(short, "critic.path", policy)
