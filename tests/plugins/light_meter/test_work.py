"""Operations of the phases."""

from pathlib import Path
from typing import Any

import pytest

from components.batch import Batch
from components.models.size import model_size
from plugins.light_meter.work import Lengths, Work, phases, worker_threads
from recipes.distill.main import read_config as read_distill_config
from tests.components.conftest import write_model


def test_lengths_of_a_batch_count_a_common_prompt_once() -> None:
    mask = [[False, False, True], [False, False, True, True], [False, True]]
    batch = Batch.from_rows(
        {"tokens": [[1, 2, 3], [1, 2, 4, 5], [6, 7]], "action_mask": mask},
        {"prompt_length": [2, 2, 1], "prompt_id": [5, 5, 9]},
    )
    lengths = Lengths.of_batch(batch)
    assert (lengths.rows, lengths.prompt_tokens, lengths.distinct_prompt_tokens) == (3, 5, 3)
    assert (lengths.response_tokens, lengths.longest, lengths.computed_tokens) == (4, 2, 7)
    assert lengths.pairs == pytest.approx(1 * 2.5 + 2 * 3 + 1 * 1.5)


def test_training_has_three_times_the_operations_of_a_forward_pass_which_has_two_for_each_weight(model: Path) -> None:
    size = model_size(str(model))
    assert size is not None
    lengths = Lengths(rows=1, prompt_tokens=0, distinct_prompt_tokens=0, response_tokens=100, longest=100, pairs=0)
    forward = Work(kind="forward", role="ACTOR", size=size, ranks=1).operations(lengths)
    # The embedding is the output layer too, so that each weight takes part in a product.
    assert forward == pytest.approx(2 * size.parameters * 100)
    assert Work(kind="train", role="ACTOR", size=size, ranks=1, epochs=2).operations(lengths) == 6 * forward


def test_phases_have_the_models_that_the_options_ask_for(config: Any) -> None:
    work = phases(config)
    assert [each.kind for each in work["logprobs"]] == ["forward"]  # old log-probs, because there are 2 updates
    assert [each.updates for each in work["train"]] == [2]
    config.algorithm.kl_coef = 0.1
    assert [each.role for each in phases(config)["logprobs"]] == ["ACTOR", "REFERENCE"]


def test_the_reference_of_a_distillation_has_the_size_of_the_teacher(model: Path, tmp_path: Path) -> None:
    teacher = write_model(tmp_path / "teacher", seed=1, tied=False)
    words = [f"model.path={model}", f"teacher.path={teacher}", "data.path=task:sort"]
    (reference,) = [each for each in phases(read_distill_config(words))["logprobs"] if each.role == "REFERENCE"]
    assert reference.size == model_size(str(teacher)) != model_size(str(model))


def test_threads_are_those_of_the_workers_in_the_plan() -> None:
    hosts = [{"threads": 1, "workers": [["TRAINER", 0]]}, {"threads": 4, "workers": [["ACTOR", 0]]}]
    assert worker_threads({"placement": {"hosts": hosts}}) == 4
    assert worker_threads({}) == 1
