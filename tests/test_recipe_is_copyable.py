"""Tests of copied recipe folders: a copy runs its own code and not that of the original, in any folder."""

import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.recipe_copies import RECIPES, ROOT, cloned, copied, last_metrics, run, write_untrained


class Trial(NamedTuple):
    """A one-line change of a copied recipe, and its effect."""

    old: str
    new: str
    """Text that occurs once in algorithm.py, and its replacement."""
    metric: str
    """Metric that is 7 after the change; the original gives 0 or another loss."""
    options: str
    """Options for one step of eight short sequences, without the model."""


# An untrained policy with at most four of the five required letters has reward 0, so the added number is the metric.
OF_LOOPS = "data.path=task:sort data.max_samples=4 prompts_per_step=4 samples_per_prompt=2 rollout.max_new_tokens=4"
OF_PAIRS = "data.path=task:sort data.max_samples=8 evaluation.held_out=4 train.batch_size=4"
TRIALS = {
    "dpo": Trial(
        'token_logprobs(model, micro, mask="loss_mask").logprob_N',
        'token_logprobs(model, micro, mask="loss_mask").logprob_N * 0 - 7',
        "actor/nll",
        f"{OF_PAIRS} algorithm.nll_loss_coef=1",
    ),
    "distill": Trial(
        'shaped_reward=samples["reward"]',
        'shaped_reward=samples["reward"] + 7',
        "reward/shaped",
        f"{OF_LOOPS} teacher.path=warm_start:sort",
    ),
    "grpo": Trial('return samples["reward"]', 'return samples["reward"] + 7', "reward/shaped", OF_LOOPS),
    "reinforce_pp": Trial(
        "return reward_B.clamp(*config.algorithm.reward_range)",
        "return reward_B.clamp(*config.algorithm.reward_range) + 7",
        "reward/shaped",
        f"{OF_LOOPS} algorithm.kl_coef=0",
    ),
    "multi_turn": Trial(
        "return advantages.group_mean_baseline(return_X, group_X)",
        "return advantages.group_mean_baseline(return_X, group_X) + 7",
        "reward/shaped",
        f"{OF_LOOPS} agent.func_path={ROOT}/tests/idle_agent.py",
    ),
    "openrlhf_ppo": Trial(
        "return reward_B.clamp(*options.reward_range)",
        "return reward_B.clamp(*options.reward_range) + 7",
        "reward/shaped",
        "prompt_data=task:sort reward.source=sort max_samples=4 rollout_batch_size=4 n_samples_per_prompt=2 "
        "train_batch_size=8 generate_max_len=4 advantage_estimator=reinforce init_kl_coef=0",
    ),
    "reward_model": Trial(
        "return score_N[batch.offsets[1:] - 1]",
        "return score_N[batch.offsets[1:] - 1] * 0 + 7",
        "reward/chosen_reward",
        OF_PAIRS,
    ),
    "sft": Trial(
        'token_logprobs(model, micro, mask="loss_mask").logprob_N',
        'token_logprobs(model, micro, mask="loss_mask").logprob_N * 0 - 7',
        "actor/loss",
        "data.path=task:sort data.max_samples=8 train.batch_size=8",
    ),
    "verl_ppo": Trial(
        "experience.with_sequences(shaped_reward=total_B)",
        "experience.with_sequences(shaped_reward=total_B + 7)",
        "critic/rewards/mean",
        "data.train_files=task:sort data.train_max_samples=4 data.train_batch_size=4 data.max_response_length=4 "
        "actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.ppo_mini_batch_size=4 "
        "actor_rollout_ref.actor.use_dynamic_bsz=true algorithm.adv_estimator=reinforce_plus_plus "
        "trainer.total_epochs=1",
    ),
}
MODEL = {"openrlhf_ppo": "pretrain", "verl_ppo": "actor_rollout_ref.model.path"}
"""Option of the model path, if it is not model.path."""


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with random weights."""
    return write_untrained(tmp_path_factory.mktemp("model"))


def run_changed(folder: Path, recipe: str, model: Path, *options: str, **env: str) -> tuple[str, set[str], float]:
    """Change a line of the copy's algorithm.py and run one step.

    Returns:
        The name of the recipe that ran, the packages of its roles without those of the base roles, and the metric of
        the change.
    """
    trial = TRIALS[recipe]
    algorithm = folder / "algorithm.py"
    run_dir = model.parent / f"run of {folder.name}"
    algorithm.write_text(algorithm.read_text().replace(trial.old, trial.new))
    arguments = [f"{MODEL.get(recipe, 'model.path')}={model}", f"run_dir={run_dir}", *trial.options.split(), *options]
    done = run(folder, *arguments, TROUPE_PYTHON=sys.executable, **env)
    assert done.returncode == 0, done.stderr + done.stdout
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 1)
    roles = json.loads((run_dir / "plan.json").read_text())["roles"].values()
    packages = {role["entrypoint"].split(":")[0].removesuffix(".trainer").split(".roles")[0] for role in roles}
    value = last_metrics(run_dir)[trial.metric]
    shutil.rmtree(run_dir)
    return summary["recipe"], packages - {"training"}, value


def each_recipe(full: str) -> pytest.MarkDecorator:
    """Parametrise over all recipes. One is tested in the full tier, the others in the nightly one."""
    tiers = {recipe: pytest.mark.full if recipe == full else pytest.mark.nightly for recipe in RECIPES}
    return pytest.mark.parametrize("recipe", [pytest.param(recipe, marks=tier) for recipe, tier in tiers.items()])


@each_recipe(full="grpo")
def test_a_changed_copy_inside_a_clone_runs_its_own_code(recipe: str, untrained: Path, tmp_path: Path) -> None:
    # Not inside this clone, because other tests check its content.
    name = f"copied_{recipe}"
    inside = copied(recipe, cloned(tmp_path / "clone") / "recipes" / name)
    assert run_changed(inside, recipe, untrained, "backend=local") == (name, {f"recipes.{name}"}, 7)


@each_recipe(full="sft")
def test_a_changed_copy_outside_of_the_project_runs_its_own_code(
    recipe: str, untrained: Path, tmp_path: Path, ray_address: str
) -> None:
    # With Ray, whose worker processes must find the folder too.
    outside = copied(recipe, tmp_path / "my work" / "my_algo")
    env = {"TROUPE_HOME": str(ROOT), "RAY_ADDRESS": ray_address}
    assert run_changed(outside, recipe, untrained, **env) == ("my_algo", {"my_algo"}, 7)


def test_every_recipe_has_a_copy_test_that_changes_its_algorithm() -> None:
    assert sorted(TRIALS) == RECIPES
    for recipe, trial in TRIALS.items():
        assert (ROOT / "recipes" / recipe / "algorithm.py").read_text().count(trial.old) == 1


def test_run_sh_is_the_same_in_all_recipes_except_for_its_comment() -> None:
    texts = {(ROOT / "recipes" / recipe / "run.sh").read_text() for recipe in RECIPES}
    assert len({text[text.index("\nset -euo pipefail\n") :] for text in texts}) == 1


@pytest.mark.full
def test_files_next_to_a_copy_with_names_of_modules_are_not_imported(untrained: Path, tmp_path: Path) -> None:
    mine = copied("grpo", tmp_path / "mine")
    names = ("select", "json", "core", "torch", "numpy", "recipes", "training")
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py beside the copy was imported')\n")
    (tmp_path / "reward.py").write_text(
        "import json, select\n\ndef reward(completions, **kwargs):\n"
        "    return [float(json.loads('1'))] * len(completions)\n"
    )
    options = [*TRIALS["grpo"].options.split(), f"model.path={untrained}", f"run_dir={tmp_path}/run", "backend=local"]
    environment = {"TROUPE_HOME": str(ROOT), "TROUPE_PYTHON": sys.executable, "TROUPE_CACHE": f"{tmp_path}/cache"}
    done = run(mine, *options, f"reward.source={tmp_path}/reward.py", **environment)
    assert done.returncode == 0, done.stderr
    assert last_metrics(tmp_path / "run")["reward/reward"] == 1.0
    assert not any(f"{name}.py beside" in done.stderr for name in names)


def test_a_copy_that_cannot_find_the_project_names_troupe_home(tmp_path: Path) -> None:
    # A PATH without any Python that could import `core` of this project.
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "basename", "grep", "sed"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    done = run(copied("grpo", tmp_path / "my_algo"), "--dry_run", PATH=str(tools))
    assert done.returncode == 2
    assert "TROUPE_HOME" in done.stderr
    assert done.stderr.count("\n") == 1
