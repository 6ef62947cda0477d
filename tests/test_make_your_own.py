"""Tests of docs/make_your_own.md: its edits are applied to a copy of recipes/grpo, which runs for a step."""

import contextlib
import importlib
import io
import json
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import pytest

from tests.recipe_copies import ROOT, copied, last_metrics, write_untrained

PAGE = (ROOT / "docs/make_your_own.md").read_text(encoding="utf-8")
DIFFS: list[str] = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
MOST_LINES = (10, 25, 10, 10, 25)
"""Maximum number of changed lines of each edit: advantage, role, reward, metric, remote call."""
GROUP = 4
OPTIONS = (
    f"data.path=task:sort data.max_samples=8 prompts_per_step=8 samples_per_prompt={GROUP} rollout.max_new_tokens=6 "
    f"train.mini_batch_size={4 * GROUP}"
)


class Outcome(NamedTuple):
    """Output of a step of the changed copy."""

    console: str
    metrics: dict[str, Any]
    events: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    """The stored responses."""

    @property
    def groups(self) -> list[list[dict[str, Any]]]:
        """Responses by prompt."""
        groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in self.rows:
            groups[row["prompt_id"]].append(row)
        return list(groups.values())


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of recipes/grpo with all five edits, applied in order, that this process can import."""
    top = tmp_path_factory.mktemp("make_your_own")
    folder = copied("grpo", top / "recipes" / "my_algo")
    # As in the root of a clone: a repository around the temporary folder would make git look for the paths there.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(top.parent)}
    for diff in DIFFS:
        done = subprocess.run(["git", "apply"], cwd=top, env=env, input=diff, capture_output=True, text=True)
        assert done.returncode == 0, (
            f"{done.stderr}\ndocs/make_your_own.md is behind recipes/grpo; show it anew:\n{diff}"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder.parent)
        yield folder
        for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def outcome(changed: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One step of the changed copy, in this process."""
    from transformers import AutoTokenizer

    top = tmp_path_factory.mktemp("step")
    run_dir = top / "run"
    model = write_untrained(top / "model")
    main = importlib.import_module("my_algo.main").main
    console = io.StringIO()
    errors = io.StringIO()
    with contextlib.redirect_stdout(console), contextlib.redirect_stderr(errors):
        code = main([f"model.path={model}", f"run_dir={run_dir}", *OPTIONS.split(), "backend=local"])
    assert code == 0, errors.getvalue() + console.getvalue()
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = pyarrow.parquet.read_table(run_dir / "rollouts" / "step_000001.parquet").to_pylist()
    for row in rows:
        row["answer"] = tokenizer.decode(row["tokens"][row["prompt_length"] :], skip_special_tokens=True)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return Outcome(console.getvalue(), last_metrics(run_dir), events, rows)


def test_each_edit_is_small() -> None:
    counts = [len(re.findall(r"^[+-](?!--|\+\+)", diff, re.MULTILINE)) for diff in DIFFS]
    assert len(counts) == 5
    for count, most in zip(counts, MOST_LINES, strict=True):
        assert 0 < count <= most


def test_the_edits_apply_and_the_copy_plans_two_instances_of_the_new_role(
    changed: Path,
) -> None:
    modules = [".".join(file.relative_to(changed.parent).with_suffix("").parts) for file in changed.rglob("*.py")]
    for module in modules:
        imported = importlib.import_module(module.removesuffix(".__init__"))
        assert Path(str(imported.__file__)).is_relative_to(changed)
    main = importlib.import_module("my_algo.main")
    config = main.read_config([*OPTIONS.split(), "algorithm.hardness=2"])
    assert config.algorithm.hardness == 2
    assert config.reward.source == f"{changed}/reward.py"
    style = main.build_job(config).roles["STYLE"]
    assert (style.entrypoint, style.total) == ("my_algo.roles.style:Style", 2)


@pytest.mark.full
def test_the_advantage_is_weighted_by_the_missing_share_of_the_score(outcome: Outcome) -> None:
    means = []
    for group in outcome.groups:
        rewards, missing = [row["reward"] for row in group], 1 - statistics.mean(row["score"] for row in group)
        center, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        for row in group:
            expected = (row["reward"] - center) / (deviation + 1e-4) * missing
            assert row["advantage"][-1] == pytest.approx(expected, abs=1e-4)
            assert row["advantage"][0] == 0  # of the prompt
        means.append(missing)
    assert min(means) < 1  # otherwise the weighting would have no effect


@pytest.mark.full
def test_the_instances_of_the_new_role_split_the_responses_and_reduce_the_reward(outcome: Outcome) -> None:
    calls = [
        event["rank"] for event in outcome.events if (event.get("role"), event.get("method")) == ("STYLE", "penalize")
    ]
    assert sorted(calls) == [0, 1]
    for row in outcome.rows:
        tokens, start = row["tokens"], row["prompt_length"]
        repeats = sum(tokens[t] == tokens[t - 1] for t in range(start, len(tokens)))
        assert row["log_repeats"] == repeats
        assert row["reward"] == pytest.approx(row["score"] - 0.1 * repeats, abs=1e-6)
    repeats = [row["log_repeats"] for row in outcome.rows]
    assert outcome.metrics["reward/repeats"] == pytest.approx(statistics.mean(repeats)) and sum(repeats) > 0


@pytest.mark.full
def test_the_remote_call_reached_both_instances(outcome: Outcome) -> None:
    calls = [event["rank"] for event in outcome.events if event.get("method") == "set_penalty"]
    assert sorted(calls) == [0, 1]


@pytest.mark.full
def test_the_reward_is_the_share_of_the_right_letters(outcome: Outcome) -> None:
    for row in outcome.rows:
        right = [letter for letter in "abcdefghijklmnop" if letter in row["answer"] and letter in row["label"]]
        assert row["score"] == pytest.approx(len(right) / len(set(row["label"])), abs=1e-6)
    assert outcome.metrics["reward/score"] > 0


@pytest.mark.full
def test_the_metric_is_the_best_response_of_each_prompt(outcome: Outcome) -> None:
    best = statistics.mean(max(row["score"] for row in group) for group in outcome.groups)
    assert outcome.metrics["reward/best_of_group"] == pytest.approx(best)
    assert f"reward/best_of_group={best:.4g}" in outcome.console.split()


@pytest.mark.full
def test_the_edited_copy_passes_the_architecture_checks(changed: Path) -> None:
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), str(changed)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
