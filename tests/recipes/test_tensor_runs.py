"""Recipes with tensor parallelism (parallel.tensor) give the results of one rank."""

from pathlib import Path

import pytest
from local_runs import run_locally
from recipe_runs import Run
from safetensors.torch import load_file
from test_openrlhf_ppo import SMALL as OPENRLHF
from test_role_group_runs import TWO_STEPS, options
from verl_runs import SMALL as VERL
from verl_runs import write_files

FSDP = {
    "grpo": ["train.engine=fsdp", "train.zero_stage=3"],
    "openrlhf_ppo": ["train.engine=fsdp", "zero_stage=3"],
    "verl_ppo": ["actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp2"],
}
RANKS = {
    "grpo": ["placement.actor_ranks=2"],
    "openrlhf_ppo": ["actor_num_gpus_per_node=2", "critic_num_gpus_per_node=2"],
    "verl_ppo": ["trainer.n_gpus_per_node=2"],
}


def _given(recipe: str, policy: Path, folder: Path) -> list[str]:
    if recipe == "grpo":
        return [*options(policy, folder), *TWO_STEPS]
    if recipe == "openrlhf_ppo":
        return [f"pretrain={policy}", *OPENRLHF]
    return [*VERL.split(), *write_files(folder, policy)]


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", list(FSDP))
def test_tensor_parallel_training_on_two_ranks_matches_one_rank(
    recipe: str, policy: Path, ray_address: str, tmp_path: Path
) -> None:
    arguments = [*_given(recipe, policy, tmp_path), *FSDP[recipe]]
    alone = run_locally(recipe, tmp_path, {"alone": arguments})["alone"]
    run = Run(recipe, ray_address, tmp_path / "run", *arguments, *RANKS[recipe], "parallel.tensor=2").wait()
    assert run.code == 0, run.err
    assert run.summary["steps"] == 2
    for actual, expected in zip(run.metrics, alone.metrics, strict=True):
        for name in sorted({"actor/loss", "actor/grad_norm", "actor/entropy", "critic/loss"} & expected.keys()):
            assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    exported = [load_file(one.run_dir / "checkpoints/step_2/hf/model.safetensors") for one in (run, alone)]
    assert exported[0].keys() == exported[1].keys()
    assert run.left_behind() == []
