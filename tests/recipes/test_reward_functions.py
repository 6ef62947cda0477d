"""A function and data made for TRL's GRPOTrainer train here as they are."""

import json
import re
from pathlib import Path

import pyarrow.parquet
import pytest
from local_runs import run_here
from tiny_models import write_policy

from tests.messages import says

SMALL = [
    "data.input_key=prompt",
    "prompts_per_step=4",
    "samples_per_prompt=2",
    "train.mini_batch_size=8",
    "max_steps=2",
]
"""Two steps of 4 prompts x 2 responses, one optimizer step each."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A policy, and rows with a prompt and columns of their own."""
    folder = tmp_path_factory.mktemp("trl")
    rows = [{"prompt": f"{i} + 1 =", "solution": i + 1, "level": "easy"} for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    policy = write_policy(folder / "policy")
    return [f"model.path={policy}", f"data.path={folder}/rows.jsonl", "rollout.max_new_tokens=4", *SMALL]


def test_a_function_of_trls_reads_every_column_and_the_step(data: list[str], tmp_path: Path) -> None:
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
def test_a_function_that_does_not_fit_is_one_line_before_anything_starts(
    body: str, facts: list[str], data: list[str], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(body)
    run = run_here("grpo", tmp_path / "run", *data, f"reward.source={tmp_path}/own.py")
    assert run.code == 2
    assert re.search(says("reward.source", "first row", *facts), run.err)
    assert len(run.err.strip().splitlines()) == 1
    assert not run.run_dir.exists()
