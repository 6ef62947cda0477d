"""A reward function and data for TRL's GRPOTrainer are used without changes."""

import json
import re
from pathlib import Path

import pyarrow.parquet
import pytest
from local_runs import run_here
from tiny_models import write_policy

from tests.messages import says

SMALL = [
    "data.prompt_key=prompt",
    "prompts_per_step=4",
    "samples_per_prompt=2",
    "train.mini_batch_size=8",
    "max_steps=2",
]
"""Two steps of 4 prompts x 2 responses, one optimizer step each."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A policy, and rows with a prompt and further columns."""
    folder = tmp_path_factory.mktemp("trl")
    rows = [{"prompt": f"{i} + 1 =", "solution": i + 1, "level": "easy"} for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    policy = write_policy(folder / "policy")
    return [f"model.path={policy}", f"data.path={folder}/rows.jsonl", "rollout.max_new_tokens=4", *SMALL]


def test_a_reward_function_of_trl_gets_every_column_and_the_step(data: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def easy(prompts, completions, solution, trainer_state, level, **kwargs):\n"
        "    assert set(level) == {'easy'} and len(kwargs['completion_ids']) == len(completions)\n"
        "    return [number + 100 * trainer_state.global_step for number in solution]\n"
    )
    run = run_here("grpo", tmp_path / "run", *data, f"reward.source={tmp_path}/own.py")
    assert run.code == 0, run.err
    assert re.search(says("own.py gives 1", "first row"), run.out)
    for step in (1, 2):
        table = pyarrow.parquet.read_table(run.run_dir / "rollouts" / f"step_{step:06d}.parquet").to_pydict()
        assert len(table["prompt"]) == 8
        for prompt, reward in zip(table["prompt"], table["reward"]):
            assert reward == int(prompt.split()[0]) + 1 + 100 * (step - 1)


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ("def f(completions, answer, **kwargs):\n    return [0.0]\n", ["f in", "'answer'", "solution"]),
        ("def f(completions, **kwargs):\n    return 1.0\n", ["f in", "float", "list"]),
        ("def f(completions, **kwargs):\n    return ['good']\n", ["f in", "str"]),
        ("def f(completions, **kwargs):\n    raise KeyError('gone')\n", ["f in", "KeyError", "gone"]),
    ],
)
def test_an_unsuitable_reward_function_is_refused_in_one_line_before_the_start(
    body: str, facts: list[str], data: list[str], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(body)
    run = run_here("grpo", tmp_path / "run", *data, f"reward.source={tmp_path}/own.py")
    assert run.code == 2
    assert re.search(says("reward.source", "first row", *facts), run.err)
    assert len(run.err.strip().splitlines()) == 1
    assert not run.run_dir.exists()


@pytest.mark.parametrize(
    ("recipe", "option"),
    [("grpo", "reward.source"), ("openrlhf_ppo", "reward.heldout_source"), ("verl_ppo", "reward.source")],
)
def test_one_value_for_many_responses_is_refused_before_the_start(
    recipe: str, option: str, data: list[str], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("def f(completions, **kwargs):\n    return [0.5]\n")
    options = [*data, f"{option}={tmp_path}/own.py"]
    facts = ["1 rewards", "2 responses"]
    if recipe == "openrlhf_ppo":
        path = next(word for word in data if word.startswith("data.path=")).partition("=")[2]
        options += ["reward.source=exact_match", f"evaluation.path={path}"]
    if recipe == "verl_ppo":
        (tmp_path / "own.py").write_text("def compute_score(data_source, solution_str, **kwargs):\n    return [1, 2]\n")
        rows = [
            {"data_source": "s", "prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": str(i)}}
            for i in range(8)
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        options = [word for word in options if not word.startswith("data.prompt_key")]
        options += [f"data.path={tmp_path}/rows.jsonl"]
        facts = ["(2, 2)", "2 queries"]
    run = run_here(recipe, tmp_path / "run", *options)
    assert run.code == 2, run.err
    assert re.search(says(option, "own.py", *facts), run.err)
    assert not run.run_dir.exists()
