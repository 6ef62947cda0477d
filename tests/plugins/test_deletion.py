"""Every plug-in can be deleted: the rest imports, plans and runs, and the option that names it is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.architecture import ROOT
from tests.recipes.tiny_models import write_policy

LAYERS = ("core", "components", "agents", "training", "plugins", "recipes")
PLUGINS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/__init__.py"))
SAMPLE = ("vllm", "alarms")
"""Plug-ins that the full tier deletes; the nightly one deletes all."""

NAMED_BY: dict[str, list[str]] = {
    "best_policy": ["grpo", "checkpoint.export=best"],
    "curriculum": ["grpo", "data.curriculum=variance"],
    "data_files": ["grpo", "data.path=somebody/rows"],
    "data_rows": ["grpo"],
    "deepspeed": ["grpo", "train.engine=deepspeed"],
    "demo": ["grpo", "data.path=task:sort"],
    "assumed_machines": ["grpo", "assume_devices=8x2"],
    "chat_prompts": ["grpo", "data.apply_chat_template=true"],
    "chat_templates": ["grpo", "model.template_arguments={thinks: false}"],
    "dry_run": ["grpo", "dry_run=true"],
    "elastic": ["grpo", "placement.elastic=true"],
    "environment": ["grpo", "placement.interface=eth1"],
    "dynamic_sampling": ["grpo", "algorithm.filter_range=[0.0,1.0]"],
    "fsdp": ["grpo", "train.engine=fsdp", "train.zero_stage=2"],
    "loss_correction": ["grpo", "algorithm.correction=tis"],
    "generation_ahead": ["grpo", "placement.colocate=false", "asynchronous.enabled=true"],
    "kernels": ["grpo", "train.kernels=auto"],
    "handshake": ["grpo", "placement.handshake_timeout=20"],
    "lora": ["grpo", "train.lora_rank=4"],
    "manifests": ["grpo", "emit=kuberay"],
    "math_scorers": ["grpo", "reward.source=gsm8k"],
    "mixture": ["sft", "data.probs=1.0"],
    "model_view": ["grpo", "model.config_overrides={max_position_embeddings: 32768}"],
    "monitoring": ["grpo", "log.metrics_port=0"],
    "option_help": ["grpo", "--help"],
    "openrlhf": ["sft", "--max_norm", "1"],
    "parallel": ["grpo", "parallel.context=2", "placement.actor_ranks=2", "train.engine=fsdp"],
    "parallel_checks": ["grpo", "parallel.context=2", "placement.actor_ranks=2", "train.engine=fsdp"],
    "partial_rollouts": [
        *("grpo", "placement.colocate=false", "asynchronous.enabled=true", "asynchronous.partial_rollout=true")
    ],
    "reasoning_gym": ["grpo", "data.path=reasoning_gym:leg_counting"],
    "remote_reward": ["grpo", "reward.source=http://127.0.0.1:9/reward"],
    "reference_updates": ["grpo", "algorithm.kl_coef=0.1", "algorithm.reference_sync_steps=2"],
    "resume": ["grpo", "resume=somewhere"],
    "input_trial": ["grpo", "rehearse=true"],
    "rehearsal": ["grpo", "rehearse=true"],
    "replay": ["grpo", "rollout.replay_from=runs/a"],
    "reward_functions": ["grpo", f"reward.source={ROOT / 'tests' / 'their_plugin.py'}"],
    "reward_sum": ["grpo", "reward.source=0.5*exact_match + 0.5*exact_match"],
    "reward_trial": ["grpo", "reward.source=0.5*exact_match + 0.5*exact_match"],
    "shrink": ["grpo", "rehearse=true"],
    "sleep": ["grpo", "placement.learners_sleep=true"],
    "tensorboard": ["grpo", "log.tensorboard=true"],
    "vllm": ["grpo", "rollout.engine=vllm"],
    "vllm_arguments": ["grpo", "rollout.engine=vllm", "rollout.vllm.block_size=32"],
    "vllm_weights": ["grpo", "rollout.engine=vllm"],
    "wandb": ["grpo", "log.wandb=true"],
    "weight_average": ["grpo", "train.ema_beta=0.9"],
    "weights_broadcast": [*("grpo", "rollout.weight_sync=broadcast", "placement.colocate=false", "assume_devices=1x2")],
    "weights_verify": ["grpo", "rollout.verify_weight_sync=true"],
    "weights_ipc": ["grpo", "rollout.weight_sync=ipc", "assume_devices=1x1"],
}
"""Plug-in -> recipe and options that name it. A plug-in without an entry is used if its folder exists."""
ANSWER = {"openrlhf": "unknown option"}
"""Plug-in -> part of the message, if it is not the message about a missing plug-in."""


WITHOUT = {"data_rows": ["data.path=task:sort"]}
"""Plug-in -> options of a plan that does not need it, if the options for a user's data do."""


FLAG = {"dry_run": "--print_config"}
"""Plug-in -> flag with which a command plans a run and ends, if it is not --dry_run."""


def tree_without(plugin: str, folder: Path) -> Path:
    """Copy the tree, without a plug-in."""
    for layer in LAYERS:
        shutil.copytree(ROOT / layer, folder / layer, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(folder / "plugins" / plugin)
    return folder


def run_in(tree: Path, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python with the tree instead of this one on the import path."""
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=tree, env=env, input=text, capture_output=True, text=True, timeout=900)


def user_options(folder: Path) -> dict[str, list[str]]:
    """Return options by recipe for a model and data of the user, which are written into the folder."""
    model = write_policy(folder / "policy")
    rows = [{"input": f"{n} + 1 =", "label": str(n + 1)} for n in range(64)]
    pairs = [{"prompt": row["input"], "response": row["label"]} for row in rows]
    for name, records in (("prompts", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    sizes = ["prompts_per_step=4", "samples_per_prompt=2", "rollout.max_new_tokens=4", "rollout.engine=hf"]
    common = [f"model.path={model}", f"run_dir={folder}/run"]
    return {
        "grpo": [
            *(*common, *sizes, f"data.path={folder}/prompts.jsonl", "data.label_key=label"),
            "reward.source=exact_match",
        ],
        "sft": [*common, f"data.path={folder}/pairs.jsonl", "train.batch_size=8"],
    }


def check_deleted(plugin: str, folder: Path) -> Path:
    """Check a tree without the plug-in, and return it."""
    options_by_recipe = user_options(folder)
    plans = {recipe: [recipe, *options, *WITHOUT.get(plugin, ())] for recipe, options in options_by_recipe.items()}
    if plugin in NAMED_BY:
        recipe, *options = NAMED_BY[plugin]
        plans["named"] = [recipe, *options_by_recipe[recipe], *options]
    tree = tree_without(plugin, folder / "tree")
    done = run_in(
        tree,
        str(Path(__file__).with_name("deleted.py")),
        text=json.dumps({"flag": FLAG.get(plugin, "--dry_run"), "plans": plans}),
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["faults"] == []
    assert {recipe: result["plans"][recipe] for recipe in options_by_recipe if result["plans"][recipe][0]} == {}
    if plugin in NAMED_BY:
        code, error = result["plans"]["named"]
        assert (code, error.count("\n")) == (2, 1), error
        assert ANSWER.get(plugin, "plug-in") in error
    return tree


def test_every_plugin_named_by_an_option_exists() -> None:
    assert set(NAMED_BY) <= set(PLUGINS)


@pytest.mark.full
@pytest.mark.parametrize("plugin", SAMPLE)
def test_a_tree_without_the_plugin_imports_and_plans(plugin: str, tmp_path: Path) -> None:
    check_deleted(plugin, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_tree_without_the_plugin_imports_plans_and_runs(plugin: str, tmp_path: Path) -> None:
    tree = check_deleted(plugin, tmp_path)
    options = [f"run_dir={tmp_path}/run", "max_steps=2", "evaluation.path=null"]
    if plugin == "demo":
        options = [*user_options(tmp_path)["grpo"], "max_steps=2"]
    done = run_in(tree, "-m", "recipes.grpo.main", *options)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
