"""Checks, before anything is written or started, that a run can continue with what its folder holds. Nothing here needs
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.models.size import ModelSize, model_size
from training.options.run_options import RunOptions
from training.run.checkpoint import changed_options, check_resume, find_checkpoint, read_state
from training.tracking import redact
from training.tracking.serialization import json_object

GROUPS = "groups"
"""Name of the `PartialRolloutBuffer` among the stream's sources: a run that begins to use it has no state of it yet."""
_SHAPE = ("layers", "hidden", "heads", "queries", "keys", "intermediate", "vocabulary", "experts")
"""Fields of a ModelSize that the weights of a checkpoint are shaped by."""


@dataclass(frozen=True)
class Continued:
    """The checkpoint that a run resumes from."""

    folder: Path
    """Of the step."""
    state: Mapping[str, Any]
    """Of the trainer, as `read_state` gives it."""
    changed: Sequence[str]
    """Options that differ from the checkpoint's, one line each, as `changed_options` has them."""

    def has_changed(self, *prefixes: str) -> bool:
        """True where an option whose name begins so differs from the checkpoint's."""
        return any(line.startswith(prefixes) for line in self.changed)


def continued_run(config: RunOptions, recipe: str) -> Continued | None:
    """Find the checkpoint that a run with these options resumes from; None where it begins anew.

    Args:
        config: the options of the run.
        recipe: the name of its recipe.

    Raises:
        ValueError: the folder of the run holds the record of another recipe, or of a finished run without a checkpoint,
            or no checkpoint is where `resume` says.
    """
    run_dir = Path(config.run_dir).expanduser().resolve()
    own: Any = config  # every recipe has a group `checkpoint`
    checkpoints = Path(own.checkpoint.path).expanduser() if own.checkpoint.path else run_dir / "checkpoints"
    check_resume(config.resume, checkpoints)
    record = json_object(run_dir / "summary.json")
    if record.get("recipe") not in (None, recipe):
        raise ValueError(f"run_dir={config.run_dir} holds a run of recipe {record['recipe']}; name another run_dir")
    folder = find_checkpoint(config.resume, checkpoints)
    if folder is None and record.get("status") == "finished" and record.get("steps"):
        raise ValueError(
            f"run_dir={config.run_dir} holds a finished run of {record['steps']} steps, and {checkpoints} has no "
            "checkpoint to continue it from; name another run_dir, or remove that one"
        )
    if folder is None:
        return None
    state = read_state(folder)
    return Continued(folder, state, changed_options(state.get("config", {}), redact(config)))


def check_seed(continued: Continued, config: RunOptions, saved: Mapping[str, Any]) -> None:
    """Check that the data are handed out in the order of the checkpoint.

    Args:
        continued: the checkpoint.
        config: the options of the run.
        saved: the state of the data in the checkpoint.

    Raises:
        ValueError: the seed is another one.
    """
    if (seed := saved.get("seed", config.seed)) != config.seed:
        raise ValueError(
            f"seed={config.seed}, and {continued.folder} was written with seed={seed}, which fixes the order of the "
            f"data; set seed={seed} to continue it, or name another run_dir"
        )


def other_data(continued: Continued, option: str, error: ValueError) -> ValueError:
    """An error about data that are not those of the checkpoint, with the options that may be the reason."""
    changed = [line for line in continued.changed if line.startswith(("data.", "evaluation."))]
    since = f" (changed since: {', '.join(changed)})" if changed else ""
    return ValueError(f"{option} is not what {continued.folder} was trained on{since}: {error}")


def check_trained_model(continued: Continued, path: str, option: str, lora_rank: int = 0) -> None:
    """Check that the weights of the checkpoint are those of the model that an option names.

    Args:
        continued: the checkpoint.
        path: of the model.
        option: the option that names it.
        lora_rank: of the run's adapters; 0: none.

    Raises:
        ValueError: they are of another model, or with other adapters.
    """
    exported = continued.folder / "hf"
    saved, here = model_size(str(exported)), model_size(path)
    if saved is not None and here is not None:
        differences = [
            f"{name} {getattr(here, name)} and {getattr(saved, name)} there" for name in _different(saved, here)
        ]
        if differences:
            raise ValueError(
                f"{option}={path} is another model than {continued.folder} holds ({', '.join(differences)}); set "
                f"{option} to the model of that run, or name another run_dir"
            )
    kinds = [json_object(Path(folder).expanduser() / "config.json").get("model_type") for folder in (exported, path)]
    if None not in kinds and kinds[0] != kinds[1]:
        raise ValueError(
            f"{option}={path} is a {kinds[1]} model, and {continued.folder} holds a {kinds[0]} model; set {option} to "
            "the model of that run, or name another run_dir"
        )
    for note in sorted(continued.folder.glob("state/*/engine.json")):
        rank = (json_object(note).get("adapters") or {}).get("lora_rank", 0)
        if rank != lora_rank and note.parent.name != "critic":
            raise ValueError(
                f"train.lora_rank={lora_rank}, and {continued.folder} was written with train.lora_rank={rank}; set "
                f"train.lora_rank={rank} to continue it, or name another run_dir"
            )


def _different(saved: ModelSize, here: ModelSize) -> list[str]:
    """Fields of the shape that differ, of those that are known of both."""
    pairs = {name: (getattr(saved, name), getattr(here, name)) for name in _SHAPE}
    return [name for name, (one, other) in pairs.items() if one and other and one != other]


def no_state_of(continued: Continued, part: str) -> ValueError:
    """An error about a checkpoint that lacks a part of what this run continues with."""
    return ValueError(
        f"{continued.folder} holds no state of {part}: another recipe or version wrote it, or a run with other "
        "options; name another run_dir"
    )


def unfinished_groups(folder: Path, count: int) -> ValueError:
    """An error about a checkpoint with prompts that a run without partial rollouts cannot continue with."""
    return ValueError(
        f"{folder} holds {count} prompts whose responses were under way; resume with asynchronous.partial_rollout, as "
        "before"
    )
