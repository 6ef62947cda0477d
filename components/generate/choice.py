"""Choice of the rollout engine. This module does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from components.generate.config import HFRolloutConfig, RolloutConfig
from components.installed import is_available
from components.registry import load, names

BASIC_ENGINES = ("auto", "hf")
"""Values of `rollout.engine` that no plug-in provides."""


def rollout_config(name: str) -> type[RolloutConfig]:
    """Return the configuration class of the rollout engine `name`.

    Raises:
        MissingPlugin: no plug-in provides the engine.
    """
    if name == HFRolloutConfig.NAME:
        return HFRolloutConfig
    return load("rollout config", name, "rollout.engine")


def choose_rollout_engine(name: str, gpus: int, model_path: str, *temperatures: float) -> tuple[str, str]:
    """Return the name of the rollout engine, and the reason for the choice in a few words.

    Args:
        name: name of an engine, or "auto".
        gpus: number of GPUs of a machine.
        model_path: folder, hub name, or name of a demonstration model that has not been created yet.
        temperatures: sampling temperatures of the run.

    Raises:
        ValueError: there is no such engine, or it cannot be used.
    """
    if name != "auto":
        fault, remedy = _fault(rollout_config(name), gpus, model_path, temperatures)
        if fault:
            raise ValueError(f"the rollout engine {name} cannot be used: {fault}; {remedy}")
        return name, "as asked for"
    # The first plug-in that can run and is expected to be faster is selected. hf is the fallback, which runs
    # everywhere.
    reasons: list[str] = []
    for candidate in names("rollout config"):
        config = rollout_config(candidate)
        fault, _ = _fault(config, gpus, model_path, temperatures)
        if not fault and (advantage := config.advantage(gpus, model_path)):
            return candidate, advantage
        reasons.append(fault or "faster for a small model on a CPU")
    return "hf", next(iter(reasons), "no plug-in brings another engine")


def _fault(config: type[RolloutConfig], gpus: int, model_path: str, temperatures: tuple[float, ...]) -> tuple[str, str]:
    """Return the reason why an engine cannot be used (empty if it can), and the remedy."""
    if config.PACKAGE and not is_available(config.PACKAGE):
        return f"{config.TITLE} is not installed", f"run {config.INSTALL}, or choose hf"
    return config.fault(gpus, model_path, temperatures), "choose hf"


def text_config(model: Path) -> dict[str, Any]:
    """Return the content of a model's config.json; empty if it cannot be read."""
    if not (model / "config.json").is_file():
        return {}
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return config.get("text_config", config)
    except (ValueError, AttributeError, RecursionError):
        # The recipe checks the model's files and raises an error that names the fault.
        return {}
