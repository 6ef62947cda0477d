"""Scorers by name, and reward functions from a file, behind one call."""

from pathlib import Path

import pytest
import torch

from components.data.scorers import (
    check_reward,
    exact_match,
    get_scorer,
    load_reward_function,
    register_scorer,
    scorer_names,
)

QUERIES, PROMPTS, LABELS = ["ba>ab", "dc>dc"], ["ba>", "dc>"], ["ab", "cd"]


def reward_file(folder: Path, body: str) -> str:
    path = folder / "reward.py"
    path.write_text(body)
    return str(path)


def returning(folder: Path, expression: str) -> str:
    return reward_file(
        folder, f"import torch\ndef reward_func(queries, prompts, labels, **kwargs):\n    return {expression}\n"
    )


def test_a_tasks_scorer_reads_what_follows_the_prompt() -> None:
    output = load_reward_function("sort")(QUERIES, PROMPTS, LABELS)
    assert output.reward_B.tolist() == output.score_B.tolist() == [1.0, 0.0]
    assert output.reward_B.dtype == torch.float32
    assert output.logs == {}


def test_responses_given_apart_are_scored_whatever_the_query_looks_like() -> None:
    output = load_reward_function("exact_match")(["<s>q</s>"], ["q"], [12], responses=[" 12\n"])
    assert output.reward_B.tolist() == [1.0]
    with pytest.raises(ValueError, match=r"does not begin with its prompt 'q'; pass responses="):
        load_reward_function("exact_match")(["<s>q"], ["q"], [12])


def test_a_registered_scorer_is_found_by_its_name_and_names_are_taken_once() -> None:
    register_scorer("length_of_test", lambda response, label: len(response) / label)
    assert get_scorer("length_of_test")("ab", 4) == 0.5
    assert {"length_of_test", "exact_match", "sort"} <= set(scorer_names())
    for name in ("length_of_test", "sort"):
        with pytest.raises(ValueError, match="already; choose another name"):
            register_scorer(name, exact_match)


def test_a_file_sees_all_sequences_at_once_and_may_return_tensors_lists_and_numbers(tmp_path: Path) -> None:
    function = load_reward_function(
        returning(
            tmp_path,
            "{'rewards': torch.tensor([[float(len(queries))], [2.0]]), 'scores': [0.5, torch.tensor(1.0)],"
            " 'extra_logs': {'each': [1, 2], 'one': 3, 'kwarg': kwargs['seed']}}",
        )
    )
    output = function(QUERIES, PROMPTS, LABELS, seed=7)
    assert output.reward_B.tolist() == [2.0, 2.0]
    assert output.score_B.tolist() == [0.5, 1.0]
    assert {name: value.tolist() for name, value in output.logs.items()} == {
        "each": [1.0, 2.0],
        "one": [3.0, 3.0],
        "kwarg": [7.0, 7.0],
    }


def test_a_function_without_kwargs_gets_only_what_it_takes(tmp_path: Path) -> None:
    body = (
        "def reward_func(queries, prompts, labels, responses):\n    return {'rewards': [len(r) for r in responses]}\n"
    )
    function = load_reward_function(reward_file(tmp_path, body))
    assert function(QUERIES, PROMPTS, LABELS, responses=["a", "abc"], seed=7).reward_B.tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("[1.0, 2.0]", "returned a list; return a dict with 'rewards'"),
        ("{'reward': [1.0, 2.0]}", r"returned a dict with the keys \['reward'\]"),
        ("{'rewards': [1.0]}", r"'rewards' has the shape \(1,\); give one number for each of the 2 queries"),
        ("{'rewards': 1.0}", r"'rewards' has the shape \(\)"),
        ("{'rewards': torch.ones(1, 2)}", r"'rewards' has the shape \(1, 2\)"),
        ("{'rewards': ['a', 'b']}", "'rewards' must be numbers, found a list"),
        ("{'rewards': [1.0, None]}", "'rewards' must be numbers"),
        ("{'rewards': [1.0, float('nan')]}", r"'rewards' is nan for query 1 \(prompt 'dc>'\)"),
        ("{'rewards': [1.0, 1.0], 'scores': [1.0, float('inf')]}", r"'scores' is inf for query 1 \(prompt 'dc>'\)"),
        ("{'rewards': [1.0, 1.0], 'extra_logs': {'x': [1, 2, 3]}}", r"extra_logs\['x'\] has the shape \(3,\)"),
    ],
)
def test_what_a_function_returns_wrongly_is_said_with_its_file(tmp_path: Path, expression: str, message: str) -> None:
    function = load_reward_function(returning(tmp_path, expression))
    with pytest.raises(ValueError, match=rf"reward_func in '.*reward\.py'.*{message}"):
        function(QUERIES, PROMPTS, LABELS)


def test_what_cannot_be_loaded_is_refused_without_running_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no scorer 'sorted'; set it to one of: .*sort.*, or a \.py file"):
        check_reward("sorted")
    with pytest.raises(ValueError, match=r"nothing\.py' does not exist"):
        check_reward(str(tmp_path / "nothing.py"))
    with pytest.raises(ValueError, match=r"does not define reward_func\(.*functions found: score"):
        check_reward(reward_file(tmp_path, "raise SystemExit\ndef score(): ...\n"))
    with pytest.raises(ValueError, match="is not valid Python"):
        check_reward(reward_file(tmp_path, "def reward_func(:\n"))
    check_reward(reward_file(tmp_path, "raise SystemExit\nfrom math import sqrt as reward_func\n"))


def test_an_error_while_loading_names_the_file(tmp_path: Path) -> None:
    path = reward_file(tmp_path, "import no_such_module\ndef reward_func(): ...\n")
    with pytest.raises(ModuleNotFoundError) as caught:
        load_reward_function(path)
    assert caught.value.__notes__ == [f"while loading the reward file {path!r}"]


def test_two_files_of_the_same_name_are_two_functions(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        returning(tmp_path / name, f"{{'rewards': [{value}] * 2}}")
    first, second = (load_reward_function(str(tmp_path / name / "reward.py")) for name in "ab")
    assert first(QUERIES, PROMPTS, LABELS).reward_B.tolist() == [1.0, 1.0]
    assert second(QUERIES, PROMPTS, LABELS).reward_B.tolist() == [2.0, 2.0]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 queries came with 1 labels"):
        load_reward_function("sort")(QUERIES, PROMPTS, ["ab"])
