"""Calls every method of a recipe's roles in this process, and tells which of them changed its arguments.

`python role_arguments.py RECIPE MODEL FOLDER` prints a line per method: its name, and `kept` or `changed`.
"""

import contextlib
import copy
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from components.batch import Batch
from components.engines.config import SamplingConfig
from core import Identity, Role, WorkloadContext
from core.backends.ray import RayTransport
from core.context import entered
from core.invocation import exports_of

Calls = dict[str, list[tuple[str, tuple[Any, ...]]]]
"""The methods of each role, with their arguments, in the order of a step; "handle" stands for published weights."""


def experience() -> Batch:
    """Two answers of three tokens after a prompt of two, with all columns that any role reads."""
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
    """Equal to the bit; Batches column by column."""
    if not isinstance(before, Batch):
        return before == after
    columns = ((before[name], after[name]) for name in before.names)
    return before.names == after.names and all(
        x.equal(y) if isinstance(x, torch.Tensor) else x == y for x, y in columns
    )


def prompts() -> Batch:
    """Two of two tokens."""
    ids = {"prompt_id": torch.tensor([0, 1]), "sample_id": torch.tensor([0, 0])}
    return Batch.from_rows({"tokens": [[3, 4], [5, 6]]}, per_sequence=ids)


def ppo_calls(model: str, folder: Path) -> Calls:
    """Of openrlhf_ppo."""
    return {
        "Actor": [
            ("actor_init", (model, 1)),
            ("actor_forward", (experience().only("tokens"),)),
            ("append_experience", (experience(),)),
            ("actor_update", (1, 0.0)),
            ("publish_weights", (1,)),
            ("save_model", (str(folder / "saved"),)),
            ("save_state", (str(folder / "state"),)),
            ("load_state", (str(folder / "state"),)),
        ],
        "Critic": [
            ("critic_init", (model, 1)),
            ("critic_forward", (experience().only("tokens"),)),
            ("append_experience", (experience(),)),
            ("critic_update", (1,)),
            ("save_value_model", (str(folder / "critic"),)),
            ("save_state", (str(folder / "state"),)),
            ("load_state", (str(folder / "state"),)),
        ],
        "Rollout": [
            ("rollout_init", (model,)),
            ("generate_samples", (prompts(), SamplingConfig(max_new_tokens=4))),
            ("receive_weights", ("handle",)),
        ],
        "Reward": [("reward_init", (model,)), ("reward_forward", (experience(),))],
        "Reference": [("reference_init", (model,)), ("reference_forward", (experience().only("tokens"),))],
    }


def role_group_calls(model: str, folder: Path) -> Calls:
    """Of grpo and reinforce_pp."""
    return {
        "Actor": [
            ("load", (model, 1)),
            ("logprobs", (experience().only("tokens"),)),
            ("update", (experience(), 1)),
            ("publish_weights", (1,)),
            ("save", (str(folder / "saved"),)),
            ("save_state", (str(folder / "state"),)),
            ("load_state", (str(folder / "state"),)),
        ],
        "Rollout": [
            ("load", (model,)),
            ("generate", (prompts(), SamplingConfig(max_new_tokens=4))),
            ("receive_weights", ("handle",)),
        ],
        "Reference": [("load", (model,)), ("logprobs", (experience().only("tokens"),))],
    }


def main(recipe: str, model: str, folder: Path) -> None:
    """Walk the roles in the order of a step."""
    read_config = import_module(f"recipes.{recipe}.main").read_config
    if recipe == "openrlhf_ppo":
        sizes = ["train_batch_size=2", "rollout_batch_size=2", "n_samples_per_prompt=1"]
        config = import_module(f"recipes.{recipe}.layout").resolved(read_config([f"run_dir={folder}", *sizes]))
        calls = ppo_calls(model, folder)
    else:
        sizes = ["prompts_per_step=1", "samples_per_prompt=2", "minibatches=1"]
        config = read_config([f"run_dir={folder}", "algorithm.kl_coef=0.1", *sizes])
        calls = role_group_calls(model, folder)
    handle: Any = None
    ends: list[Callable[[], None]] = []
    inside = contextlib.ExitStack()
    for role_name, methods in calls.items():
        cls = getattr(import_module(f"recipes.{recipe}.roles.{role_name.lower()}"), role_name)
        identity = Identity("test", "0", 0.0, Role(role_name), 0, 1)
        context = WorkloadContext(identity, config, {}, RayTransport(), print, folder)
        inside.enter_context(entered(context))
        role = cls(None, config)
        role.setup()
        exports = exports_of(role)
        kept_for_update: list[tuple[Any, Any]] = []
        for name, given in methods:
            args = tuple(handle if arg == "handle" else arg for arg in given)
            before = copy.deepcopy(args)
            kept_for_update += [(args, before)]
            result = exports[name][1](*args)
            handle = result if name == "publish_weights" else handle
            # What was appended is held until the update, which must not write into it either.
            kept = all(same(x, y) for now, then in kept_for_update for x, y in zip(now, then, strict=True))
            print(f"{cls.__name__}.{name} {'kept' if kept else 'changed'}")
        untested = set(exports) - {name for name, _ in methods} - {"end_job", "mesh_position"}
        print(f"{cls.__name__} untested: {sorted(untested)}")
        if "end_job" in exports:
            ends.append(exports["end_job"][1])
    for end in ends:
        end()
    inside.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
