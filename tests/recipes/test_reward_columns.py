"""Every column of the data reaches the reward function, in every recipe and for every kind of response."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from local_runs import LocalRun, run_here
from tiny_models import write_policy, write_reward_model

pytestmark = pytest.mark.full

SMALL = ["prompts_per_step=4", "samples_per_prompt=2", "train.mini_batch_size=8", "max_steps=2"]
"""Two steps of 4 prompts x 2 responses, one optimizer step each."""
OPENRLHF = ["algorithm.estimator=reinforce_baseline", "reward_model.path=null"]
EVALUATED = ["evaluation.every=1", "evaluation.temperature=1"]
ACCURACY = """
def accuracy(prompts, completions, solution, **kwargs):
    assert all(prompt == f"{number - 1} + 1 =" for prompt, number in zip(prompts, solution))
    assert set(kwargs["level"]) == {"easy"} and len(kwargs["completion_ids"]) == len(completions)
    return [float(number) for number in solution]
"""
"""A function in TRL's signature. The reward is the column `solution`, which depends on the prompt."""
AGENT = """
from agents.executor import SingleTurnAgentExecutor
from columns_reward import accuracy


class AgentExecutor(SingleTurnAgentExecutor):
    def __init__(self):
        super().__init__(accuracy)
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(extra_info["solution"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a reward model, reward functions, and rows with columns besides prompt and label."""
    folder = tmp_path_factory.mktemp("columns")
    rows = [{"prompt": f"{i} + 1 =", "solution": i + 1, "level": "easy"} for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "columns_reward.py").write_text(ACCURACY)
    of_verl = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": "x"},
            "extra_info": {"solution": row["solution"]},
        }
        for row in rows
    ]
    (folder / "verl.jsonl").write_text("\n".join(map(json.dumps, of_verl)))
    (folder / "verl.py").write_text(VERL)
    write_policy(folder / "policy")
    write_reward_model(folder / "reward_model", seed=0)
    return folder


def run(recipe: str, folder: Path, run_dir: Path, *options: str, rows: str = "rows.jsonl") -> LocalRun:
    """Run a recipe on the rows of the fixture. It must succeed."""
    paths = [f"model.path={folder}/policy", f"data.path={folder}/{rows}", f"evaluation.path={folder}/{rows}"]
    keys = ["data.prompt_key=prompt"] if recipe != "verl_ppo" else []
    done = run_here(recipe, run_dir, *paths, *keys, "rollout.max_new_tokens=4", *SMALL, *EVALUATED, *options)
    assert done.code == 0, done.err
    return done


def assert_rewarded(done: LocalRun, steps: Sequence[int] = (1, 2)) -> None:
    """Check that each response of these steps, and of the evaluations, has the reward of its own column."""
    for step in steps:
        table = pyarrow.parquet.read_table(done.run_dir / "rollouts" / f"step_{step:06d}.parquet").to_pydict()
        assert len(table["prompt"]) == 8
        for prompt, reward in zip(table["prompt"], table["reward"]):
            numbers = [word for word in prompt.replace("<user>", "").split() if word.isdigit()]
            assert reward == int(numbers[0]) + 1
    assert done.metrics[-1]["eval/score"] == pytest.approx(4.5)  # the mean of 1 to 8


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("grpo", []),
        ("grpo", ["algorithm.filter_range=[0,100]", "data.epochs=2"]),
        ("reinforce_pp", []),
        ("openrlhf_ppo", OPENRLHF),
        ("openrlhf_ppo", [*OPENRLHF, "algorithm.filter_range=[0,100]", "data.epochs=2"]),
        ("openrlhf_ppo", [*OPENRLHF, "placement.rewards=2"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(o.partition("=")[0] for o in value[-1:]) or "plain",
)
def test_a_function_reads_the_columns_of_its_own_row(
    recipe: str, options: list[str], folder: Path, tmp_path: Path
) -> None:
    done = run(recipe, folder, tmp_path / "run", f"reward.source={folder}/columns_reward.py:accuracy", *options)
    assert_rewarded(done)


@pytest.mark.parametrize("source", ["source", "reward_model"])
def test_the_reward_of_heldout_prompts_reads_the_columns(source: str, folder: Path, tmp_path: Path) -> None:
    trained = {
        "source": ["reward.source=exact_match"],
        "reward_model": [f"reward_model.path={folder}/reward_model"],
    }[source]
    heldout = [f"reward.heldout_source={folder}/columns_reward.py:accuracy"]
    done = run("openrlhf_ppo", folder, tmp_path / "run", OPENRLHF[0], *trained, *heldout)
    assert [line["eval/score"] for line in done.metrics] == pytest.approx([4.5] * 2)


def test_a_metric_logged_by_both_rewards_is_kept_for_each(folder: Path, tmp_path: Path) -> None:
    body = "def f(completions, log_metric):\n    log_metric('x', {})\n    return [1.0] * len(completions)\n"
    sources = []
    for name, value in (("reward.source", 1.0), ("reward.heldout_source", 2.0)):
        (tmp_path / f"{name}.py").write_text(body.format(value))
        sources.append(f"{name}={tmp_path}/{name}.py")
    done = run("openrlhf_ppo", folder, tmp_path / "run", *OPENRLHF, *sources, "max_steps=1")
    line = done.metrics[-1]
    assert (line["eval/default_x"], line["eval/default_reward/x"], line["reward/x"]) == (2.0, 1.0, 1.0)


def test_a_reward_function_of_verl_gets_extra_info(folder: Path, tmp_path: Path) -> None:
    done = run("verl_ppo", folder, tmp_path / "run", f"reward.source={folder}/verl.py", rows="verl.jsonl")
    assert_rewarded(done)


@pytest.mark.parametrize("recipe", ["multi_turn", "openrlhf_ppo"])
def test_the_function_of_a_single_turn_agent_reads_the_columns(
    recipe: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)  # the agent imports the function
    (tmp_path / "agent.py").write_text(AGENT)
    options: list[Any] = OPENRLHF if recipe == "openrlhf_ppo" else []
    done = run(recipe, folder, tmp_path / "run", f"agent.func_path={tmp_path}/agent.py", *options)
    assert_rewarded(done)


def test_a_resumed_run_reads_the_columns(folder: Path, tmp_path: Path) -> None:
    options = [f"reward.source={folder}/columns_reward.py:accuracy", "checkpoint.every=1"]
    run("openrlhf_ppo", folder, tmp_path / "run", *OPENRLHF, *options, "max_steps=1")
    assert_rewarded(run("openrlhf_ppo", folder, tmp_path / "run", *OPENRLHF, *options, "resume=auto"))
