"""N tokens, B answers."""

import re

import pytest
import torch

from components.batch import Batch
from tests.messages import says
from training.weight_check import COLD, check_greedy, greedy_prompts

ANSWERS = Batch.from_rows(
    {
        "tokens": [[5, 7, 8], [6, 9]],
        "action_mask": [[False, True, True], [False, True]],
        "rollout_logprob": [[0.0, -0.1, -0.2], [0.0, -0.3]],
    }
)
PLAIN_N = torch.tensor([-9.0, -0.1, -0.2, -9.0, -0.3])
COLD_N = torch.tensor([-9.0, 0.0, 0.0, -9.0, 0.0])


def test_answers_that_the_policy_would_give_too_are_said_to_agree() -> None:
    found = check_greedy(ANSWERS, PLAIN_N + 0.004, COLD_N, "float32")
    assert re.search(says("2 greedy responses", "3 tokens", 0.004), found)


def test_a_token_that_is_not_the_policys_likeliest_is_named() -> None:
    # The second token of response 0 is 0.05 nats behind the likeliest.
    cold_N = COLD_N - torch.tensor([0, 0, 0.05 / COLD, 0, 0])
    with pytest.raises(RuntimeError, match=says(0.05, "token 2 of response 0")):
        check_greedy(ANSWERS, PLAIN_N, cold_N, "float32")
    check_greedy(ANSWERS, PLAIN_N, cold_N, "bfloat16")


def test_another_probability_of_the_same_token_is_named_and_so_is_nan() -> None:
    for wrong in (-0.4, float("nan")):
        plain_N = PLAIN_N.clone()
        plain_N[4] = wrong
        with pytest.raises(RuntimeError, match="token 1 of response 1"):
            check_greedy(ANSWERS, plain_N, COLD_N, "float32")


def test_prompts_are_cut_out_of_samples_and_repeated_when_there_are_too_few() -> None:
    samples = ANSWERS.with_sequences(prompt_length=torch.tensor([2, 1]))
    prompts = greedy_prompts(samples, 3)
    assert [prompts.row(i, "tokens").tolist() for i in range(3)] == [[5, 7], [6], [5, 7]]
    assert prompts["prompt_id"].tolist() == [0, 1, 2]
