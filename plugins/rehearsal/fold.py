"""Options of a rehearsal: those of the command, with roles, model and steps folded to the size of a laptop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from components.generate.config import HFRolloutConfig
from components.installed import is_available
from components.weights.choice import BASIC_CARRIERS
from training.launch.plan import Plan
from training.tracking.serialization import flat

RANKS = 2
"""Maximum number of ranks, and of engines, of a role."""
RESPONSES = 8
"""Number of responses of a step."""
EXAMPLES = 4
"""Number of held-out prompts or examples, and of examples of an optimizer step."""
NEW_TOKENS = 16
"""Maximum number of tokens of a response."""
PASS_TOKENS = 4096
"""Maximum number of tokens of a micro-batch."""
ROWS = 200
"""Maximum number of rows of the data that are trained on. All rows are checked."""
STALL_S = 120.0
"""Seconds without progress after which a process is reported as hung. Imports on two busy cores take longest."""
STEPS_PER_ROLE = 6
"""Steps for the loss of one worker of each role. Some steps pass before a lost worker is noticed."""


@dataclass
class Fold:
    """Options by dotted name, and the parts of the command that a laptop cannot rehearse."""

    values: dict[str, Any]
    changes: list[str] = field(default_factory=list)
    """Sentences about what is smaller than in the command."""
    untried: list[tuple[str, str]] = field(default_factory=list)
    """Parts that are left out, each with the reason."""

    @classmethod
    def of(cls, requested: Any) -> Fold:
        """Return all options of a requested configuration."""
        # JSON has no tuples, and OmegaConf reads them from lists.
        return cls(flat(json.loads(json.dumps(asdict(requested)))))

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def put(self, name: str, value: Any) -> None:
        """Set an option if the recipe has it. A mapping replaces all entries of the option."""
        names = [entry for entry in self.values if entry == name or entry.startswith(f"{name}.")]
        if not names:
            return
        for entry in names:
            del self.values[entry]
        self.values[name] = value

    def lower(self, name: str, most: float) -> bool:
        """Set an option to at most `most`, if it is a number. Return True if that has changed it."""
        value = self.values.get(name)
        if not isinstance(value, int | float) or value <= most:
            return False
        self.values[name] = most
        return True

    def leave_out(self, name: str, value: Any, reason: str) -> None:
        """Set an option to another value, and report the part as not rehearsed."""
        if name in self.values and self.values[name] != value:
            self.untried.append((f"{name}={self.values[name]}", reason))
            self.values[name] = value

    def arguments(self, file: Path) -> list[str]:
        """Write the options to a file, and return the arguments that read it."""
        import yaml

        file.write_text(yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True), encoding="utf-8")
        return [f"--config={file}"]


def fold_roles(fold: Fold, plan: Plan) -> None:
    """Fold nodes, ranks and engines, and keep the axes of the mesh as far as two ranks allow.

    Args:
        fold: options to change.
        plan: plan of the command at its full size.
    """
    counts = plan.job.placement.processes
    axes = [axis for axis in ("tensor", "context", "expert") if int(fold.values.get(f"parallel.{axis}") or 1) > 1]
    # Experts are spread over an axis of their own, which excludes the tensor axis.
    kept = {*axes[:1], *set(axes).intersection(("expert",))}
    for axis in axes:
        name = f"parallel.{axis}"
        if axis in kept:
            fold.changes.append(f"{name} {fold.values[name]} to {RANKS}")
            fold.put(name, RANKS)
        else:
            fold.leave_out(name, 1, f"{RANKS} ranks have one axis, which is {axes[0]}")
    most = {role: min(RANKS, count) for role, count in counts.items()}
    if fold.values.get("placement.frozen_models") == "whole":
        # Independent copies: one shows as much as two.
        most |= dict.fromkeys(("REFERENCE", "REWARD"), 1)
    changes = [(role, count, most[role]) for role, count in counts.items() if count > most[role]]
    fold.changes += [f"{role.lower()} {count} to {few}" for role, count, few in changes]
    if fold.values.get("placement.nodes", 1) > 1:
        fold.changes.append(f"nodes {fold.values['placement.nodes']} to 1")
    fold.put("placement.nodes", 1)
    for name in ("actor_nodes", "critic_nodes", "reference_nodes", "reward_nodes"):
        fold.put(f"placement.{name}", None)
    fold.put("placement.devices_per_node", None)
    if "placement.ranks_per_node" in fold:
        fold.put("placement.ranks_per_node", min(RANKS, max(counts.values())))
    elif "placement.role_pools" in fold or any(name.startswith("placement.role_pools.") for name in fold.values):
        _fold_pools(fold, plan)
    else:
        fold.put("placement.actor_ranks", most["ACTOR"])
        fold.put("placement.rollout_engines", most["ROLLOUT"])
        fold.put("placement.references", most.get("REFERENCE", 1))
        fold.put("placement.critic_ranks", most.get("CRITIC", 1))
        fold.put("placement.rewards", most.get("REWARD", 1))


def _fold_pools(fold: Fold, plan: Plan) -> None:
    """Fold pools of processes, each on one node."""
    pools: Mapping[str, list[int]] = plan.config.placement.pools
    fold.put("placement.pools", {pool: [min(RANKS, sum(counts))] for pool, counts in pools.items()})
    for name in ("actor_ranks", "rollout_engines", "references"):
        fold.put(f"placement.{name}", None)


def fold_engines(fold: Fold, plan: Plan) -> None:
    """Replace engines and carriers that this machine lacks, and keep the choices of the plan for the others.

    Args:
        fold: options to change.
        plan: plan of the command at its full size.
    """
    for name in ("zero_stage", "precision", "gradient_checkpointing"):
        # Left to the machine, they would be chosen for a CPU.
        fold.put(f"train.{name}", getattr(plan.config.train, name))
    engine = fold.values.get("rollout.engine")
    if engine not in (None, "auto", HFRolloutConfig.NAME) and not is_available(str(engine)):
        fold.leave_out("rollout.engine", "auto", f"{engine} is not installed here; hf generates")
    elif engine == "auto" and is_available("vllm"):
        fold.untried.append(("vllm", "rollout.engine=auto chooses hf for a small model; set vllm to rehearse it"))
    if fold.values.get("rollout.engine") == "vllm":
        # Two engines on two cores would take longer to start than everything else.
        fold.put("placement.rollout_engines", 1)
    fold.leave_out("rollout.tensor_parallel", 1, "an engine has one process here")
    fold.put("rollout.gpu_memory", None)
    fold.lower("rollout.cpu_cache_gb", 0.5)
    carrier = fold.values.get("rollout.weight_sync")
    if carrier not in (None, *BASIC_CARRIERS):
        fold.leave_out("rollout.weight_sync", "auto", "this carrier needs GPUs; shared memory carries the weights")
    if fold.values.get("train.engine") == "deepspeed" and not is_available("deepspeed"):
        fold.leave_out("train.engine", "fsdp", "deepspeed is not installed here")
        fold.put("train.zero_stage", max(2, int(fold.values.get("train.zero_stage") or 2)))
    for name in ("train.adam_offload", "critic.adam_offload"):
        fold.leave_out(name, False, "on a CPU the optimizer is in host memory already")
    fold.leave_out("train.lora_path", "", "these adapters do not fit the small model; new ones are trained")


def fold_sizes(fold: Fold, folder: Path, roles: int) -> None:
    """Cut the number of steps, prompts and responses, and the lengths of responses. Prompts keep their lengths.

    Args:
        fold: options to change.
        folder: folder of the rehearsal.
        roles: number of roles, each of which loses a worker.
    """
    steps = 4 + STEPS_PER_ROLE * roles
    if fold.lower("rollout.max_new_tokens", NEW_TOKENS):
        fold.changes.append(f"responses to {NEW_TOKENS} tokens")
    if "prompts_per_step" in fold:
        samples = min(2, int(fold.values["samples_per_prompt"]))
        full = int(fold.values["prompts_per_step"]) * int(fold.values["samples_per_prompt"])
        for name in ("train.mini_batch_size", "critic.mini_batch_size"):
            if (fold.values.get(name) or full) < full:
                fold.put(name, RESPONSES // 2)
            else:
                fold.put(name, None)
        fold.put("samples_per_prompt", samples)
        fold.put("prompts_per_step", RESPONSES // samples)
        fold.changes.append(f"{full} responses of a step to {RESPONSES}")
        fold.put("max_steps", steps)
        # An epoch may have fewer prompts than these steps.
        fold.put("data.epochs", max(steps, int(fold.values["data.epochs"])))
        fold.put("data.max_samples", min(ROWS, int(fold.values["data.max_samples"] or ROWS)))
    else:
        held_out = min(EXAMPLES, int(fold.values["evaluation.held_out"]))
        fold.put("evaluation.held_out", held_out)
        fold.put("train.batch_size", EXAMPLES)
        fold.put("train.epochs", 1)
        fold.put("data.max_samples", held_out + EXAMPLES * steps)
    for name, value in {"algorithm.filter_range": None, "algorithm.dynamic_sampling": False}.items():
        fold.leave_out(name, value, "all rewards of an untrained model are equal")
    for name, most in {
        "train.micro_batch_size": EXAMPLES,
        "train.forward_micro_batch_size": EXAMPLES,
        "train.max_tokens": PASS_TOKENS,
        "critic.max_tokens": PASS_TOKENS,
        "critic.warmup_steps": 1,
        "rollout.max_num_seqs": 2 * RESPONSES,
        "algorithm.overlong_buffer": NEW_TOKENS // 2,
        "evaluation.samples_per_prompt": 2,
        "asynchronous.in_flight_prompts": RESPONSES,
        "stall_timeout": STALL_S,
        "log.metrics_port": 0,
    }.items():
        fold.lower(name, most)
    fold.put("evaluation.max_samples", EXAMPLES)
    fold.put("evaluation.every", 2)
    if fold.values.get("log.wandb_key"):
        fold.put("log.wandb", True)
    checkpoint = {"every": 1, "keep": 2, "max_gb": None, "export_path": str(folder / "export")}
    for name, value in checkpoint.items():
        fold.put(f"checkpoint.{name}", value)
    start = {"run_dir": str(folder / "run"), "resume": "auto", "rehearse": False, "assume_devices": None}
    limits = {"max_restarts": roles + 2, "placement_timeout": STALL_S, "dry_run": False, "print_config": False}
    for name, value in (start | limits | {"log.wandb_key": None, "model.config_overrides": {}}).items():
        fold.put(name, value)
