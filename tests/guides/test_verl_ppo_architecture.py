"""The program of verl's PPO architecture guide: workers, pools and rewards as Python objects."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from components.models.value_model import ValueModel
from plugins.demo.tasks import get_task
from plugins.demo.tiny_model import task_tokenizer, tiny_model
from recipes.verl_ppo.main import read_config
from recipes.verl_ppo.ray_trainer import (
    ActorRolloutRefWorker,
    CriticWorker,
    NVMegatronRayWorkerGroup,
    RayPPOTrainer,
    RayWorkerGroup,
    ResourcePoolManager,
    RewardManager,
    RLHFDataset,
    Role,
    _select_rm_score_fn,
)
from tests.guides.rows import check_rows
from tests.messages import says
from tests.recipe_copies import ROOT, last_metrics, write_untrained
from training.options.schema import ConfigError

PROGRAM = """
import sys

from omegaconf import OmegaConf
from transformers import AutoTokenizer

from recipes.verl_ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, RewardManager, Role


FUNCTIONS
def main(config):
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)

    if config.actor_rollout_ref.actor.strategy == "fsdp":
        assert config.actor_rollout_ref.actor.strategy == config.critic.strategy
        from recipes.verl_ppo.ray_trainer import ActorRolloutRefWorker, CriticWorker
        from recipes.verl_ppo.ray_trainer import RayWorkerGroup

        ray_worker_group_cls = RayWorkerGroup
    elif config.actor_rollout_ref.actor.strategy == "megatron":
        assert config.actor_rollout_ref.actor.strategy == config.critic.strategy
        from recipes.verl_ppo.ray_trainer import ActorRolloutRefWorker, CriticWorker
        from recipes.verl_ppo.ray_trainer import NVMegatronRayWorkerGroup

        ray_worker_group_cls = NVMegatronRayWorkerGroup
    else:
        raise NotImplementedError

    role_worker_mapping = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Critic: CriticWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
    }
    global_pool_id = "global_pool"
    resource_pool_spec = {global_pool_id: [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
    mapping = {
        Role.ActorRollout: global_pool_id,
        Role.Critic: global_pool_id,
        Role.RefPolicy: global_pool_id,
    }
    if config.reward_model.enable:
        from recipes.verl_ppo.ray_trainer import RewardModelWorker

        role_worker_mapping[Role.RewardModel] = RewardModelWorker
        mapping[Role.RewardModel] = global_pool_id
    REWARDS
    resource_pool_manager = ResourcePoolManager(resource_pool_spec=resource_pool_spec, mapping=mapping)
    trainer = RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=role_worker_mapping,
        resource_pool_manager=resource_pool_manager,
        ray_worker_group_cls=ray_worker_group_cls,
        reward_fn=reward_fn,
        val_reward_fn=val_reward_fn,
    )
    trainer.init_workers()
    trainer.fit()


if __name__ == "__main__":
    main(OmegaConf.load(sys.argv[1]))
"""
FUNCTIONS = """
def count_letter(solution_str, ground_truth):
    return solution_str.count("a") / 6


def _select_rm_score_fn(data_source):
    if data_source == "letters":
        return count_letter
    raise NotImplementedError


def always_two(batch):
    return [2.0] * len(batch)


"""
REWARDS = {
    "built_in": """
    reward_fn = RewardManager(tokenizer=tokenizer, num_examine=0)
    val_reward_fn = RewardManager(tokenizer=tokenizer, num_examine=1)""",
    "selected": """
    reward_fn = RewardManager(tokenizer=tokenizer, num_examine=0)
    val_reward_fn = always_two""",
}
"""Reward objects, which the guide leaves to the user. The second one uses a function of the program."""


def config_of(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """Verl's configuration for a tiny run on rows.parquet of the folder."""
    config: dict[str, Any] = {
        "data": {
            "train_files": f"{folder}/rows.parquet", "val_files": f"{folder}/rows.parquet", "train_batch_size": 4,
            "max_prompt_length": 8, "max_response_length": 6,
        },
        "actor_rollout_ref": {
            "model": {"path": str(model)}, "actor": {"strategy": "fsdp", "ppo_mini_batch_size": 4},
            "rollout": {"name": "hf", "n": 1},
        },
        "critic": {"strategy": "fsdp", "model": {"path": str(model)}},
        "reward_model": {"enable": False},
        "algorithm": {"kl_ctrl": {"kl_coef": 0.01}, "use_kl_in_reward": True},
        "trainer": {
            "n_gpus_per_node": 1, "nnodes": 1, "total_training_steps": 2, "test_freq": 2, "logger": ["console"],
            "default_local_dir": f"{folder}/checkpoints",
        },
        "run_dir": f"{folder}/run",
        "backend": "local",
    }  # fmt: skip
    return config | changes


def write_rows(folder: Path, source: str) -> None:
    """Write eight rows of verl's format."""
    letters = ("cab", "dca", "bda", "fab", "gac", "bea", "cad", "eab")
    rows = [
        {"prompt": f"{word}>", "data_source": source, "reward_model": {"ground_truth": "".join(sorted(word))}}
        for word in letters
    ]
    parquet.write_table(Table.from_pylist(rows), folder / "rows.parquet")


def run_program(folder: Path, kind: str, source: str, **changes: Any) -> tuple[Path, str]:
    """Run the guide's program for two steps with a tiny model. Return the run folder and the output."""
    model = write_untrained(folder / "model")
    write_rows(folder, source)
    (folder / "config.yaml").write_text(json.dumps(config_of(folder, model, **changes)))
    program = folder / "my_main_ppo.py"
    text = PROGRAM.replace("    REWARDS\n", REWARDS[kind].removeprefix("\n") + "\n")
    program.write_text(text.replace("FUNCTIONS\n", FUNCTIONS if kind == "selected" else ""))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program), str(folder / "config.yaml")]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", done.stdout


@pytest.mark.full
def test_the_guides_program_trains_with_the_built_in_functions(tmp_path: Path) -> None:
    run_dir, printed = run_program(tmp_path, "built_in", "sort")
    # The output of validation, whose reward manager has num_examine=1. Training prints nothing.
    assert printed.count("[ground_truth]") == 2
    plan = json.loads((run_dir / "plan.json").read_text())
    assert {"ACTOR_ROLLOUT", "CRITIC", "REF"} <= set(plan["roles"])
    metrics = last_metrics(run_dir)
    assert metrics["step"] == 2
    assert "val-core/sort/reward/mean@1" in metrics


@pytest.mark.full
def test_the_guides_program_trains_with_user_functions(tmp_path: Path) -> None:
    metrics = last_metrics(run_program(tmp_path, "selected", "letters")[0])
    assert 0 <= metrics["critic/score/mean"] <= 1
    assert metrics["val-core/letters/reward/mean@1"] == 2


@pytest.mark.full
def test_the_guides_program_trains_with_a_reward_model(tmp_path: Path) -> None:
    tokenizer = task_tokenizer(get_task("sort"))
    ValueModel(tiny_model(tokenizer, seed=3).model).save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    enabled = {"enable": True, "model": {"path": f"{tmp_path}/rm"}}
    run_dir, _ = run_program(tmp_path, "built_in", "no_function_for_this", reward_model=enabled)
    assert "RM" in json.loads((run_dir / "plan.json").read_text())["roles"]
    assert math.isfinite(last_metrics(run_dir)["critic/score/mean"])


def test_a_reward_model_without_a_score_head_is_refused(tmp_path: Path) -> None:
    model = write_untrained(tmp_path / "model")
    write_rows(tmp_path, "sort")
    config = config_of(tmp_path, model, reward_model={"enable": True, "model": {"path": str(model)}})
    with pytest.raises(SystemExit, match="2"):
        RayPPOTrainer(config).fit()


def test_the_megatron_program_accepts_the_same_classes(tmp_path: Path) -> None:
    assert NVMegatronRayWorkerGroup is RayWorkerGroup
    model = write_untrained(tmp_path / "model")
    config = config_of(tmp_path, model)
    config["actor_rollout_ref"]["actor"] = {"strategy": "megatron", "ppo_mini_batch_size": 4}
    config["critic"]["strategy"] = "megatron"
    RayPPOTrainer(config, ray_worker_group_cls=NVMegatronRayWorkerGroup).init_workers()


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, write_untrained(tmp_path / "model"))
    config["actor_rollout_ref"]["actor"]["strategy"] = config["critic"]["strategy"] = "colossal"
    with pytest.raises(ConfigError, match="colossal"):
        RayPPOTrainer(config).init_workers()


def test_a_wrong_configuration_is_refused_by_init_workers(tmp_path: Path) -> None:
    config = config_of(tmp_path, write_untrained(tmp_path / "model"))
    config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 3
    with pytest.raises(ConfigError, match="3"):
        RayPPOTrainer(config).init_workers()


class MyCritic(CriticWorker):
    """A worker class defined by the user."""


def test_a_worker_class_of_the_user_is_used(tmp_path: Path) -> None:
    config = config_of(tmp_path, write_untrained(tmp_path / "model"))
    workers = {Role.ActorRollout: ActorRolloutRefWorker, Role.Critic: MyCritic, "judge": MyCritic}
    manager = ResourcePoolManager({"pool": [1]}, {Role.ActorRollout: "pool", Role.Critic: "pool", "judge": "pool"})
    trainer = RayPPOTrainer(config, role_worker_mapping=workers, resource_pool_manager=manager)
    roles = trainer.build_job().roles
    assert roles["CRITIC"].entrypoint == f"{__name__}:MyCritic"
    assert roles["JUDGE"].entrypoint == f"{__name__}:MyCritic"  # the name of a custom role
    assert roles["ACTOR_ROLLOUT"].entrypoint == "recipes.verl_ppo.roles.actor_rollout_ref:ActorRolloutRefWorker"


def test_each_combination_of_policy_roles_is_accepted() -> None:
    for names in (["actor_rollout_ref"], ["actor_rollout", "ref"], ["actor", "rollout", "ref"]):
        manager = ResourcePoolManager({"pool": [1]}, dict.fromkeys(names, "pool"))
        options = [*manager.options(), "data.path=task:sort", "model.path=warm_start:sort", "algorithm.kl_coef=0.1"]
        assert set(names) <= set(read_config(options).roles)


def test_a_prompt_is_the_only_required_field_of_a_row(tmp_path: Path) -> None:
    parquet.write_table(Table.from_pylist([{"prompt": "cab>"}] * 8), tmp_path / "rows.parquet")
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
    )
    model = write_untrained(tmp_path / "model")
    config = config_of(tmp_path, model, custom_reward_function={"path": f"{tmp_path}/score.py"})
    trainer = RayPPOTrainer(config)
    trainer.init_workers()
    assert trainer.count_prompts() == 8


def test_the_four_data_sets_have_their_scripts() -> None:
    names = {path.stem for path in (ROOT / "scripts" / "data_preprocess").glob("*.py")}
    assert {"gsm8k", "math", "hellaswag", "full_hh_rlhf"} <= names


def test_each_row_of_the_guide_has_a_test() -> None:
    check_rows(Path(__file__))


def test_the_roles_are_an_enum_with_the_numbers_of_the_guide() -> None:
    names = ["Actor", "Rollout", "ActorRollout", "Critic", "RefPolicy", "RewardModel", "ActorRolloutRef"]
    assert [(role.name, role.value) for role in Role] == [(name, number) for number, name in enumerate(names)]
    assert Role["Critic"] is Role.Critic


def test_an_unknown_pool_is_refused() -> None:
    with pytest.raises(ValueError, match=says("critic", "other", "global_pool")):
        ResourcePoolManager({"global_pool": [1]}, {Role.Critic: "other"})


def test_pools_and_mapping_become_options() -> None:
    manager = ResourcePoolManager({"a": [2, 2], "b": [1, 1]}, {Role.ActorRollout: "a", Role.RefPolicy: "b"})
    config = read_config([*manager.options(), "data.path=task:sort", "model.path=warm_start:sort"])
    assert config.placement.workers("actor_rollout") == 4
    assert config.placement.roles_of("b") == ["ref"]


def test_the_dataset_tokenizes_rows_that_have_a_prompt(tmp_path: Path) -> None:
    tokenizer = task_tokenizer(get_task("sort"))
    rows = [{"prompt": "cab>", "data_source": "sort"}, {"prompt": "fedcba>", "data_source": "sort"}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "rows.parquet")
    dataset = RLHFDataset(f"{tmp_path}/rows.parquet", tokenizer, {"prompt_key": "prompt", "max_prompt_length": 5})
    assert len(dataset) == 1
    assert dataset[0]["prompt"] == "cab>"
    assert dataset[0]["input_ids"].tolist() == tokenizer("cab>")["input_ids"]


def test_a_data_source_selects_its_reward_function() -> None:
    assert _select_rm_score_fn("openai/gsm8k")("openai/gsm8k", "#### 7", "7") == 1
    assert _select_rm_score_fn("lighteval/MATH")
    with pytest.raises(NotImplementedError, match="no_such_source"):
        _select_rm_score_fn("no_such_source")


def test_a_reward_function_that_other_processes_cannot_import_is_refused() -> None:
    with pytest.raises(ValueError, match="top level"):
        RewardManager(compute_score=lambda data_source, solution_str, ground_truth, extra_info=None: 1.0).options()


def test_actor_and_critic_have_the_same_strategy() -> None:
    options = ["actor_rollout_ref.actor.strategy=fsdp", "critic.strategy=megatron", "data.path=task:sort"]
    with pytest.raises(ConfigError, match=says("fsdp", "megatron")):
        read_config([*options, "model.path=warm_start:sort"])
