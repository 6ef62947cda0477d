"""Calls every method of openrlhf_ppo's roles in this process, and tells which of them changed its arguments.

`python role_arguments.py MODEL FOLDER` prints a line per method: its name, and `kept` or `changed`.
"""

import contextlib
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from components.batch import Batch
from components.engines.config import SamplingConfig
from core import Identity, Role, WorkloadContext
from core.backends.ray import RayTransport
from core.context import entered
from core.invocation import exports_of
from recipes.openrlhf_ppo.layout import resolved
from recipes.openrlhf_ppo.main import read_config
from recipes.openrlhf_ppo.roles.actor import Actor
from recipes.openrlhf_ppo.roles.critic import Critic
from recipes.openrlhf_ppo.roles.reference import Reference
from recipes.openrlhf_ppo.roles.reward import Reward
from recipes.openrlhf_ppo.roles.rollout import Rollout


def experience() -> Batch:
    """Two answers of three tokens after a prompt of two, with all columns that any role reads."""
    columns = {name: torch.full((10,), 0.25) for name in ("logprob", "advantage", "value", "return")}
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


def main(model: str, folder: Path) -> None:
    """Walk the roles in the order of a step."""
    prompts = Batch.from_rows(
        {"tokens": [[3, 4], [5, 6]]},
        per_sequence={"prompt_id": torch.tensor([0, 1]), "sample_id": torch.tensor([0, 0])},
    )
    sizes = ["train_batch_size=2", "rollout_batch_size=2", "n_samples_per_prompt=1"]
    config = resolved(read_config([f"run_dir={folder}", *sizes]))
    handle: Any = None
    ends: list[Callable[[], None]] = []
    inside = contextlib.ExitStack()
    calls: dict[type, list[tuple[str, tuple[Any, ...]]]] = {
        Actor: [
            ("actor_init", (model, 1)),
            ("actor_forward", (experience().only("tokens"),)),
            ("append_experience", (experience(),)),
            ("actor_update", (1, 0.0)),
            ("publish_weights", (1,)),
            ("save_model", (str(folder / "saved"),)),
            ("save_state", (str(folder / "state"),)),
            ("load_state", (str(folder / "state"),)),
        ],
        Critic: [
            ("critic_init", (model, 1)),
            ("critic_forward", (experience().only("tokens"),)),
            ("append_experience", (experience(),)),
            ("critic_update", (1,)),
            ("save_value_model", (str(folder / "critic"),)),
            ("save_state", (str(folder / "state"),)),
            ("load_state", (str(folder / "state"),)),
        ],
        Rollout: [
            ("rollout_init", (model,)),
            ("generate_samples", (prompts, SamplingConfig(max_new_tokens=4))),
            ("receive_weights", ("handle",)),
        ],
        Reward: [("reward_init", (model,)), ("reward_forward", (experience(),))],
        Reference: [("reference_init", (model,)), ("reference_forward", (experience().only("tokens"),))],
    }
    for cls, methods in calls.items():
        identity = Identity("test", "0", 0.0, Role(cls.__name__), 0, 1)
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
        ends.append(exports["end_job"][1])
    for end in ends:
        end()
    inside.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
