"""What docs/make_your_own.md shows, applied to a copy of recipes/grpo and run for a step."""

import json
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import pytest

from tests.recipe_copies import ROOT, copied, last_metrics, run, write_untrained

pytestmark = pytest.mark.timeout(300)  # the first test starts a recipe; a busy machine needs a while

PAGE = (ROOT / "docs/make_your_own.md").read_text(encoding="utf-8")
DIFFS: list[str] = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
MOST_LINES = (10, 25, 10, 10)
"""How many lines each edit may change: the advantage, the role, the reward, the metric."""
GROUP = 4
OPTIONS = f"data.path=task:sort data.max_rows=8 prompts_per_step=8 samples_per_prompt={GROUP} rollout.max_new_tokens=6"


class Outcome(NamedTuple):
    """What the changed copy is, and what a step of it left."""

    folder: Path
    console: str
    metrics: dict[str, Any]
    events: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    """An answer each, with its `answer` as text."""

    @property
    def groups(self) -> list[list[dict[str, Any]]]:
        """The answers to each prompt."""
        found: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in self.rows:
            found[row["prompt_id"]].append(row)
        return list(found.values())


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """All four edits, applied in order, and one step of what they make."""
    from transformers import AutoTokenizer

    top = tmp_path_factory.mktemp("make_your_own")
    folder, run_dir, model = copied("grpo", top / "recipes" / "my_algo"), top / "run", write_untrained(top / "model")
    # As in the root of a clone: a repository around the temporary folder would make git look for the paths there.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(top.parent)}
    for diff in DIFFS:
        done = subprocess.run(["git", "apply"], cwd=top, env=env, input=diff, capture_output=True, text=True)
        assert done.returncode == 0, (
            f"{done.stderr}\ndocs/make_your_own.md is behind recipes/grpo; show it anew:\n{diff}"
        )
    given = [f"model.path={model}", f"run_dir={run_dir}", *OPTIONS.split(), "backend=local"]
    done = run(folder, *given, TROUPE_HOME=str(ROOT))
    assert done.returncode == 0, done.stderr + done.stdout
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = pyarrow.parquet.read_table(run_dir / "rollouts" / "step_000001.parquet").to_pylist()
    for row in rows:
        row["answer"] = tokenizer.decode(row["tokens"][row["prompt_length"] :], skip_special_tokens=True)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return Outcome(folder, done.stdout, last_metrics(run_dir), events, rows)


def test_each_edit_is_small() -> None:
    counts = [len(re.findall(r"^[+-](?!--|\+\+)", diff, re.MULTILINE)) for diff in DIFFS]
    assert len(counts) == 4
    for count, most in zip(counts, MOST_LINES, strict=True):
        assert 0 < count <= most


def test_the_advantage_counts_by_what_is_missing(outcome: Outcome) -> None:
    means = []
    for group in outcome.groups:
        rewards, missing = [row["reward"] for row in group], 1 - statistics.mean(row["score"] for row in group)
        center, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        for row in group:
            expected = (row["reward"] - center) / (deviation + 1e-6) * missing
            assert row["advantage"][-1] == pytest.approx(expected, abs=1e-4)
            assert row["advantage"][0] == 0  # of the prompt
        means.append(missing)
    assert min(means) < 1  # otherwise nothing was weighed


def test_the_judges_shared_the_answers_and_took_their_part_of_the_reward(outcome: Outcome) -> None:
    calls = [
        event["rank"] for event in outcome.events if (event.get("role"), event.get("method")) == ("JUDGE", "judge")
    ]
    assert sorted(calls) == [0, 1]
    for row in outcome.rows:
        tokens, start = row["tokens"], row["prompt_length"]
        repeats = sum(tokens[t] == tokens[t - 1] for t in range(start, len(tokens)))
        assert row["log_repeats"] == repeats
        assert row["reward"] == pytest.approx(row["score"] - 0.1 * repeats, abs=1e-6)
    found = [row["log_repeats"] for row in outcome.rows]
    assert outcome.metrics["reward/repeats"] == pytest.approx(statistics.mean(found)) and sum(found) > 0


def test_the_reward_is_the_share_of_the_right_letters(outcome: Outcome) -> None:
    for row in outcome.rows:
        right = [letter for letter in "abcdefghijklmnop" if letter in row["answer"] and letter in row["label"]]
        assert row["score"] == pytest.approx(len(right) / len(set(row["label"])), abs=1e-6)
    assert outcome.metrics["reward/score"] > 0


def test_the_metric_is_the_best_answer_of_each_prompt(outcome: Outcome) -> None:
    best = statistics.mean(max(row["score"] for row in group) for group in outcome.groups)
    assert outcome.metrics["reward/best_of_group"] == pytest.approx(best)
    assert f"reward/best_of_group={best:.4g} " in outcome.console


def test_what_the_page_makes_is_written_as_the_house_writes(outcome: Outcome) -> None:
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), str(outcome.folder)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
