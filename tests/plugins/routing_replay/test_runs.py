"""Runs of recipes with `rollout.routing_replay`, and the options that it cannot be combined with."""

import io
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

import pytest

from components.batch.reading import load_batch
from tests.recipe_copies import last_metrics
from tests.recipes.tiny_models import write_mixture, write_policy

REWARD = """
def reward_func(queries, prompts, labels):
    return {"rewards": [sum(map(ord, query[len(prompt):])) % 7 for query, prompt in zip(queries, prompts)]}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7
"""
OPTIONS = {
    "grpo": "prompts_per_step=4 samples_per_prompt=2 train.mini_batch_size=4",
    "verl_ppo": "prompts_per_step=4 samples_per_prompt=2 train.mini_batch_size=2 algorithm.estimator=grpo",
    "openrlhf_ppo": "prompts_per_step=4 samples_per_prompt=2 train.mini_batch_size=4 algorithm.estimator=reinforce",
}
COMMON = (
    "data.path=task:sort data.max_samples=8 max_steps=2 rollout.max_new_tokens=4 train.precision=fp32 "
    "train.learning_rate=0.02 rollout.engine=hf backend=local"
)


def run(recipe: str, *options: str) -> tuple[int, str]:
    """Run a recipe in this process. Return its exit code and its output."""
    console = io.StringIO()
    with redirect_stdout(console), redirect_stderr(console):
        code = import_module(f"recipes.{recipe}.main").main([*COMMON.split(), *options])
    return code, console.getvalue()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture") / "model", num_experts=4, head_dim=32)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the option of a reward that a random model does not get equally for all responses."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD)
    return f"reward.source={path}"


@pytest.mark.parametrize("recipe", OPTIONS)
def test_later_updates_of_a_step_replay_the_experts_of_the_old_policy(
    recipe: str, mixture: Path, reward: str, tmp_path: Path
) -> None:
    arguments = [*OPTIONS[recipe].split(), f"model.path={mixture}", reward, "rollout.routing_replay=policy"]
    code, console = run(recipe, *arguments, f"run_dir={tmp_path}/run")
    assert code == 0, console
    metrics = last_metrics(tmp_path / "run")
    # The first of two updates has the weights of the old policy. The high learning rate then changes the routing.
    assert 0 < metrics["actor/routes_differ_share"] < 0.9
    columns = load_batch(tmp_path / "run/rollouts/step_000002.parquet").names
    assert not [name for name in columns if name.startswith("routes_")], "files do not keep routes"


@pytest.mark.full
def test_a_run_without_replay_differs_only_in_the_updates_after_the_first(
    mixture: Path, reward: str, tmp_path: Path
) -> None:
    arguments = [*OPTIONS["grpo"].split(), f"model.path={mixture}", reward, "max_steps=1"]
    rows = {}
    for value in ("off", "policy"):
        code, console = run("grpo", *arguments, f"rollout.routing_replay={value}", f"run_dir={tmp_path}/{value}")
        assert code == 0, console
        rows[value] = last_metrics(tmp_path / value)
    assert rows["off"]["rollout/logprob_gap_mean"] == rows["policy"]["rollout/logprob_gap_mean"]
    assert rows["off"]["actor/loss"] != rows["policy"]["actor/loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("rollout.routing_replay=engine", "the engine hf does not report the experts of a token; set policy or off"),
        pytest.param("rollout.routing_replay=engine rollout.engine=vllm", "only on a GPU", marks=pytest.mark.full),
        (
            "rollout.routing_replay=engine rollout.engine=vllm rollout.prefix_caching=false",
            "leave rollout.prefix_caching out",
        ),
        (
            "rollout.routing_replay=policy parallel.context=2 placement.actor_ranks=2 train.engine=fsdp",
            "needs whole sequences on each rank, but parallel.context=2",
        ),
        ("rollout.routing_replay=router", "rollout.routing_replay=router"),
    ],
)
def test_unsupported_models_and_engines_are_refused_before_the_run_starts(
    options: str, message: str, mixture: Path, tmp_path: Path
) -> None:
    code, console = run("grpo", f"model.path={mixture}", f"run_dir={tmp_path}/run", *options.split(), "--dry_run")
    assert code == 2
    assert message in console


def test_a_dense_model_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    model = write_policy(tmp_path / "model")
    code, console = run("grpo", f"model.path={model}", "rollout.routing_replay=policy", "--dry_run")
    assert code == 2
    assert f"model.path={model} is no mixture of experts; set rollout.routing_replay=off" in console


def test_a_run_with_one_update_per_step_notes_that_replay_has_no_effect(mixture: Path, tmp_path: Path) -> None:
    options = (f"model.path={mixture}", f"run_dir={tmp_path}/run", "rollout.routing_replay=policy", "--dry_run")
    code, console = run("grpo", "prompts_per_step=4", *options)
    assert code == 0
    assert "no effect of rollout.routing_replay: each training step has a single optimizer step" in console
