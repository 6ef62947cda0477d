"""Checks that a run can resume from the checkpoint in its folder. They run before anything is written or started.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.models.size import model_size
from plugins.resume.checkpoints import changed_options, check_resume, find_checkpoint, read_state
from training.options.run_options import RunOptions
from training.tracking import redact
from training.tracking.serialization import json_object

_SHAPE = ("layers", "hidden", "heads", "queries", "keys", "intermediate", "vocabulary", "experts")
"""Fields of a ModelSize that determine the shapes of the weights."""


@dataclass(frozen=True)
class Continued:
    """The checkpoint that a run resumes from."""

    folder: Path
    """Folder of the step."""
    state: Mapping[str, Any]
    """State of the trainer, as `read_state` returns it."""
    changed: Sequence[str]
    """Options that differ from those of the checkpoint, one line each, as `changed_options` returns them."""

    def has_changed(self, *prefixes: str) -> bool:
        """Return True if an option whose name starts with a prefix differs from the checkpoint."""
        return any(change.startswith(prefixes) for change in self.changed)

    def check_seed(self, config: RunOptions, saved: Mapping[str, Any]) -> None:
        """Check that the seed, and with it the order of the data, is that of the checkpoint.

        Args:
            config: options of the run.
            saved: state of the data in the checkpoint.

        Raises:
            ValueError: the seeds differ.
        """
        # The order of the data follows from the seed. With another one, some data would be used twice and some never.
        if (seed := saved.get("seed", config.seed)) != config.seed:
            raise ValueError(
                f"seed={config.seed}, but {self.folder} was written with seed={seed}, and the order of the data "
                f"depends on it; set seed={seed} to resume, or name another run_dir"
            )

    def check_trained_model(self, path: str, option: str, lora_rank: int = 0) -> None:
        """Check that the weights of the checkpoint fit the model that an option names.

        Args:
            path: path of the model.
            option: name of the option that holds the path.
            lora_rank: rank of the run's adapters, or 0 without adapters.

        Raises:
            ValueError: the checkpoint is of another model, or has adapters of another rank.
        """
        exported = self.folder / "hf"
        saved = model_size(str(exported))
        current = model_size(path)
        # A size is None if it cannot be computed for this kind of model. The engine then finds a difference when it
        # loads the state.
        if saved is not None and current is not None:
            differences: list[str] = []
            for name in _SHAPE:
                new = getattr(current, name)
                old = getattr(saved, name)
                # 0 is a size that is not known, so it can be equal.
                if new and old and new != old:
                    differences.append(f"{name} {new} and {old} there")
            if differences:
                raise ValueError(
                    f"{option}={path} differs from the model in {self.folder} ({', '.join(differences)}); set "
                    f"{option} to the model of that run, or name another run_dir"
                )
        # Two architectures may have equal sizes. Their weights have other names, so loading them would fail on every
        # rank.
        configs = [json_object(Path(folder).expanduser() / "config.json") for folder in (exported, path)]
        kinds = [config.get("model_type") for config in configs]
        if None not in kinds and kinds[0] != kinds[1]:
            raise ValueError(
                f"{option}={path} is a {kinds[1]} model, but {self.folder} holds a {kinds[0]} model; set {option} to "
                "the model of that run, or name another run_dir"
            )
        # Adapters of another rank have other shapes, so the saved optimizer state would not fit them. A critic has
        # none.
        for note in sorted(self.folder.glob("state/*/engine.json")):
            rank = (json_object(note).get("adapters") or {}).get("lora_rank", 0)
            if rank != lora_rank and note.parent.name != "critic":
                raise ValueError(
                    f"train.lora_rank={lora_rank}, but {self.folder} was written with train.lora_rank={rank}; set "
                    f"train.lora_rank={rank} to resume, or name another run_dir"
                )

    def other_data(self, option: str, error: ValueError) -> ValueError:
        """Return an error about data that differ from those of the checkpoint, with the changed options of the data."""
        changed = ", ".join(change for change in self.changed if change.startswith(("data.", "evaluation.")))
        since = changed and f" (changed since: {changed})"
        return ValueError(f"{option} is not what {self.folder} was trained on{since}: {error}")

    def no_state_of(self, part: str) -> ValueError:
        """Return an error about a checkpoint that lacks the state of a part of the run."""
        return ValueError(
            f"{self.folder} holds no state of {part}: another recipe or version wrote it, or a run with other "
            "options; name another run_dir"
        )

    def unfinished_groups(self, count: int) -> ValueError:
        """Return an error about a checkpoint whose unfinished prompts only a run with partial rollouts can continue."""
        return ValueError(
            f"{self.folder} holds {count} prompts with unfinished responses; set "
            "asynchronous.partial_rollout=true, as in the run that wrote it"
        )


def continued_run(config: RunOptions, recipe: str) -> Continued | None:
    """Return the checkpoint that a run with these options resumes from, or None if it starts from the beginning.

    Args:
        config: options of the run.
        recipe: name of its recipe.

    Raises:
        ValueError: the run folder holds a run of another recipe, or a finished run without a checkpoint, or there is no
            checkpoint at the path that `resume` names.
    """
    run_dir = Path(config.run_dir).expanduser().resolve()
    options: Any = config  # RunOptions lacks the group `checkpoint`, which every recipe adds
    checkpoints = Path(options.checkpoint.path or run_dir / "checkpoints").expanduser()
    check_resume(config.resume, checkpoints)
    # The state of another recipe has other parts. Without this check the error would name the first missing part.
    record = json_object(run_dir / "summary.json")
    if record.get("recipe") not in (None, recipe):
        raise ValueError(f"run_dir={config.run_dir} holds a run of recipe {record['recipe']}; name another run_dir")
    folder = find_checkpoint(config.resume, checkpoints)
    # Without this check the same command would train a second time and overwrite the records of the first run.
    if folder is None and record.get("status") == "finished" and record.get("steps"):
        raise ValueError(
            f"run_dir={config.run_dir} holds a finished run of {record['steps']} steps, and {checkpoints} has no "
            "checkpoint to continue it from; name another run_dir, or remove that one"
        )
    if folder is None:
        return None
    state = read_state(folder)
    return Continued(folder, state, changed_options(state.get("config", {}), redact(config)))
