"""Calls every method of a recipe's roles in this process, and prints which of them changed its arguments."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tiny_models import write_reward_model

from components.batch import Batch
from components.generate.config import SamplingConfig
from core import Identity, Role, WorkloadContext
from core.backends.ray import RayTransport
from core.context import entered
from core.exports import export_of, exports_of
from core.members import Directory

Calls = dict[str, list[tuple[str, tuple[Any, ...]]]]
"""Methods of each role with their arguments, in the order of a step. "handle" stands for published weights."""


def experience() -> Batch:
    """Return two responses of three tokens after a prompt of two, with all columns that any role reads."""
    names = ("logprob", "advantage", "value", "return", "rollout_logprob", "reference_logprob")
    columns = {name: torch.full((10,), 0.25) for name in names}
    mask_N = torch.tensor([False, False, True, True, True] * 2)
    prompts: dict[str, Any] = {"prompt_length": torch.tensor([2, 2])}
    return Batch(
        torch.tensor([5, 5]),
        {"tokens": torch.arange(3, 13), "action_mask": mask_N, **columns},
        prompts,
        {"prompt": ["ab", "cd"], "label": ["abc", "def"]},
    )


def same(before: Any, after: Any) -> bool:
    """Compare bit by bit. Batches are compared column by column."""
    if isinstance(before, list):
        return len(before) == len(after) and all(same(x, y) for x, y in zip(before, after, strict=True))
    if not isinstance(before, Batch):
        return before == after
    columns = ((before[name], after[name]) for name in before.names)
    return before.names == after.names and all(
        x.equal(y) if isinstance(x, torch.Tensor) else x == y for x, y in columns
    )


def prompts() -> Batch:
    """Return two prompts of two tokens."""
    ids = {"prompt_id": torch.tensor([0, 1]), "sample_id": torch.tensor([0, 0])}
    return Batch.from_rows({"tokens": [[3, 4], [5, 6]]}, per_sequence=ids, objects={"prompt": ["ab", "cd"]})


def in_flight() -> list[tuple[str, tuple[Any, ...]]]:
    """Start responses, and return those that are finished later."""
    return [("begin", ([prompts()], SamplingConfig(max_new_tokens=4))), ("collect", (5.0,))]


def ppo_calls(model: str, folder: Path) -> Calls:
    """Return the calls of the roles of openrlhf_ppo."""
    return {
        "Actor": [
            ("actor_init", (model, 1)),
            ("actor_forward", (experience().only("tokens"), 1.0)),
            ("reference_forward", (experience().only("tokens"),)),
            ("append_experience", (experience(),)),
            ("sleep_learner", ()),
            ("wake_learner", ()),
            ("actor_update", (1, 0.0)),
            ("publish_weights", (1,)),
            ("save", (str(folder / "saved"),)),
            ("save_state", (str(folder / "state"),)),
            ("load_state", (str(folder / "state"),)),
        ],
        "Critic": [
            ("critic_init", (model, 1)),
            ("critic_forward", (experience().only("tokens"),)),
            ("append_experience", (experience(),)),
            ("sleep_learner", ()),
            ("wake_learner", ()),
            ("critic_update", (1,)),
            ("save", (str(folder / "critic"),)),
            ("save_state", (str(folder / "state"),)),
            ("load_state", (str(folder / "state"),)),
        ],
        "Rollout": [
            ("rollout_init", (model,)),
            ("generate_samples", ([prompts()], SamplingConfig(max_new_tokens=4))),
            *in_flight(),
            ("sleep_engine", ()),
            ("wake_engine", ()),
            ("receive_weights", ("handle",)),
        ],
        "Reward": [("reward_init", (model,)), ("reward_forward", (experience(),))],
        "Reference": [("reference_init", (model,)), ("reference_forward", (experience().only("tokens"),))],
    }


def role_group_calls(model: str, folder: Path) -> Calls:
    """Return the calls of the roles of grpo."""
    return {
        "Actor": [
            ("load", (model, 1)),
            ("logprobs", (experience().only("tokens"), 1.0)),
            ("update", (experience(), 1)),
            ("announce_weights", (1,)),
            ("publish_weights", (1,)),
            ("save", (str(folder / "saved"),)),
            ("save_state", (str(folder / "state"),)),
            ("load_state", (str(folder / "state"),)),
        ],
        "Rollout": [
            ("load", (model,)),
            ("generate", (prompts(), SamplingConfig(max_new_tokens=4))),
            *in_flight(),
            ("sleep_engine", ()),
            ("wake_engine", ()),
            ("receive_weights", ("handle",)),
            ("check_engine", ([[-1.0]],)),
        ],
        "Reference": [
            ("load", (model,)),
            ("logprobs", (experience().only("tokens"),)),
            ("follow", (str(folder / "saved"), 0.5, str(folder / "reference"))),
        ],
    }


def pairs() -> Batch:
    """Return two responses of three tokens to the same prompt. The first is better."""
    tokens = experience().only("tokens")
    mask_N = torch.tensor([False, False, True, True, True] * 2)
    columns = {"margin": torch.tensor([0.5, 0.5]), "reference_logprob": torch.tensor([-3.0, -2.0])}
    return tokens.with_tokens(loss_mask=mask_N).with_sequences(**columns)


def pair_calls(recipe: str, model: str, folder: Path) -> Calls:
    """Return the calls of the roles of reward_model and dpo."""
    state, responses = str(folder / "state"), pairs().only("tokens", "loss_mask")
    kept = [("save_state", (state,)), ("load_state", (state,))]
    if recipe == "reward_model":
        calls = [("load", (model, 1)), ("train_step", (pairs(),)), ("score", (responses.only("tokens"),)), *kept]
        return {"Reward": [*calls, ("save", (str(folder / "saved"),))]}
    reference = [("load_reference", (model,)), ("reference_logprobs", (responses,)), ("drop_reference", ())]
    calls = [*reference, ("load", (model, 1)), ("train_step", (pairs(),))]
    return {"Actor": [*calls, ("logprobs", (responses,)), *kept, ("save", (str(folder / "saved"),))]}


def verl_calls(model: str, folder: Path) -> Calls:
    """Return the calls of verl_ppo by role. One process holds the policy in all of its functions."""
    tokens, sampling = experience().only("tokens"), SamplingConfig(max_new_tokens=4)
    kept = [("save_state", (str(folder / "state"),)), ("load_state", (str(folder / "state"),))]
    return {
        "actor_rollout_ref": [
            ("init_rollout", (model,)),
            ("init_model", (model, 1)),
            ("generate_sequences", (prompts(), sampling)),
            *in_flight(),
            ("compute_log_prob", (tokens, 1.0)),
            ("compute_sharp_log_prob", (tokens,)),
            ("compute_ref_log_prob", (tokens,)),
            ("load_reference", (model,)),
            ("update_actor", (experience(), 1)),
            ("publish_weights", (1,)),
            ("receive_weights", ("handle",)),
            *kept,
            ("save", (str(folder / "saved"),)),
        ],
        "critic": [
            ("init_model", (model, 1)),
            ("compute_values", (tokens,)),
            ("update_critic", (experience(), 1)),
            *kept,
        ],
        "rm": [("init_model", (str(write_reward_model(folder / "rm", 0)),)), ("compute_rm_score", (tokens,))],
    }


def verl_config(model: str, folder: Path) -> Any:
    """Return a configuration of verl_ppo that enables every option with an effect in a worker."""
    text = f"""run_dir={folder} actor_rollout_ref.model.path={model} reward_model.model.path={model}
        data.train_files=task:sort data.train_batch_size=2 actor_rollout_ref.rollout.n=1
        actor_rollout_ref.actor.ppo_mini_batch_size=1 actor_rollout_ref.actor.ppo_epochs=2
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.actor.shuffle=true
        actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov
        reward_model.enable=true actor_rollout_ref.hybrid_engine=false async_train=true partial_rollout=true""".split()
    apart = ["trainer.resource_pool_spec={train: [1], sample: [1]}"]
    apart += ["trainer.role_mapping={actor: train, ref: train, critic: train, rm: train, rollout: sample}"]
    return import_module("recipes.verl_ppo.main").read_config(text + apart)


VERL_WORKERS = {
    "actor_rollout_ref": ("actor_rollout_ref", "ActorRolloutRefWorker"),
    "critic": ("critic", "CriticWorker"),
    "rm": ("reward_model", "RewardModelWorker"),
}
"""File and class of a role of verl_ppo. In the other recipes a role is called by its class."""


def main(recipe: str, model: str, folder: Path) -> None:
    """Call the roles in the order of a step. Prints a line per method: its name, and `kept` or `changed`."""
    if recipe == "verl_ppo":
        walk(recipe, verl_config(model, folder), verl_calls(model, folder), folder)
        return
    read_config = import_module(f"recipes.{recipe}.main").read_config
    if recipe in ("reward_model", "dpo"):
        config = read_config([f"run_dir={folder}", f"model.path={model}", "data.path=task:sort"]).resolved(0)
        calls = pair_calls(recipe, model, folder)
    elif recipe == "openrlhf_ppo":
        sizes = ["train_batch_size=2", "rollout_batch_size=2", "n_samples_per_prompt=1"]
        # adapters: the actor also serves as reference
        sizes += ["async_train=true", "partial_rollout=true", "train.lora_rank=2"]
        config = import_module(f"recipes.{recipe}.layout").resolved(read_config([f"run_dir={folder}", *sizes]))
        config = replace(config, model=replace(config.model, path=model))
        calls = ppo_calls(model, folder)
    else:
        sizes = ["prompts_per_step=1", "samples_per_prompt=2", "train.mini_batch_size=2"]
        apart = ["asynchronous.enabled=true", "asynchronous.partial_rollout=true", "placement.colocate=false"]
        config = read_config([f"run_dir={folder}", "algorithm.kl_coef=0.1", *sizes, *apart])
        config = replace(config, model=replace(config.model, path=model))
        calls = role_group_calls(model, folder)
    walk(recipe, config, calls, folder)


def walk(recipe: str, config: Any, calls: Calls, folder: Path) -> None:
    """Call the methods of each role, and print whether their arguments changed."""
    handle: Any = None
    ends: list[Callable[[], None]] = []
    inside = contextlib.ExitStack()
    for role_name, methods in calls.items():
        module, name = VERL_WORKERS.get(role_name, (role_name.lower(), role_name))
        package = f"recipes.{recipe}.roles"
        if find_spec(f"{package}.{module}") is None:  # this recipe has no such role
            package, name = "training.roles", f"{name}Worker"
        cls = getattr(import_module(f"{package}.{module}"), name)
        identity = Identity("test", "0", 0.0, Role(role_name), 0, 1)
        context = WorkloadContext(identity, config, Directory(), RayTransport(), print, folder)
        inside.enter_context(entered(context))
        role = cls(None, config)
        role.setup()
        exports = exports_of(role)
        kept_for_update: list[tuple[Any, Any]] = []
        for name, arguments in methods:
            args = tuple(handle if arg == "handle" else arg for arg in arguments)
            before = copy.deepcopy(args)
            kept_for_update += [(args, before)]
            result = exports[name][1](*args)
            handle = result if name == "publish_weights" else handle
            # Appended data is kept until the update, which must not write to it either.
            kept = all(same(x, y) for now, then in kept_for_update for x, y in zip(now, then, strict=True))
            print(f"{cls.__name__}.{name} {'kept' if kept else 'changed'}")
        # Tests of core export functions to every workload of a process.
        ours = ("core.", f"{package.partition('.')[0]}.")
        methods_by_name = {
            name for name, (_, method) in exports.items() if export_of(method) and method.__module__.startswith(ours)
        }
        untested = methods_by_name - {name for name, _ in methods} - {"end_job", "mesh_position"}
        print(f"{cls.__name__} untested: {sorted(untested)}")
        if "end_job" in exports:
            ends.append(exports["end_job"][1])
    for end in ends:
        end()
    inside.close()
