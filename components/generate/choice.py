"""Choices that the user leaves open: the rollout engine, and the attention kernels. Nothing here needs torch."""

from __future__ import annotations

import importlib.util
import json
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from components.generate.config import HFRolloutConfig, RolloutConfig
from components.registry import load, names

BASIC_ENGINES = ("auto", "hf")
"""Values of `rollout.engine` that no plug-in provides."""
is_elsewhere: ContextVar[bool] = ContextVar("is_elsewhere", default=False)
"""True while choices are made for another machine, on which packages may be installed that are missing here."""


def rollout_config(name: str) -> type[RolloutConfig]:
    """Return the class of the configuration of the rollout engine `name`.

    Raises:
        MissingPlugin: no plug-in provides the engine.
    """
    return HFRolloutConfig if name == HFRolloutConfig.NAME else load("rollout config", name, "rollout.engine")


def choose_rollout_engine(name: str, gpus: int, model_path: str, *temperatures: float) -> tuple[str, str]:
    """Which engine generates, and why, in a few words.

    Args:
        name: name of an engine, or "auto".
        gpus: of a machine.
        model_path: folder, hub name, or the name of a demonstration model that is still to be made.
        temperatures: that will be sampled at.

    Raises:
        ValueError: there is no such engine, or the named one cannot be had.
    """
    if name != "auto":
        fault, remedy = _fault(rollout_config(name), gpus, model_path, temperatures)
        if fault:
            raise ValueError(f"the rollout engine {name} cannot be used: {fault}; {remedy}")
        return name, "as asked for"
    reasons: list[str] = []
    for candidate in names("rollout config"):
        config = rollout_config(candidate)
        fault, _ = _fault(config, gpus, model_path, temperatures)
        if not fault and (advantage := config.advantage(gpus, model_path)):
            return candidate, advantage
        reasons.append(fault or "faster for a small model on a CPU")
    return "hf", reasons[0] if reasons else "no plug-in brings another engine"


def choose_attention(asked: str | None, gpus: int) -> str | None:
    """The attention kernels to load models with: those asked for, and sdpa in place of flash attention that cannot run
    there; of `auto` flash attention where it can run, else transformers' own choice, which is None.
    """
    if asked == "auto":
        return "flash_attention_2" if gpus and importlib.util.find_spec("flash_attn") is not None else None
    return "sdpa" if attention_note(asked, gpus) else asked


def attention_note(asked: str | None, gpus: int) -> str:
    """Why sdpa is used in place of the attention that is asked for; empty where it is not."""
    if asked is None or not asked.startswith("flash_attention"):
        return ""
    if not gpus:
        return f"attn_implementation={asked} needs a GPU, and there is none: sdpa is used"
    if asked == "flash_attention_2" and not _is_there("flash_attn"):
        return f"attn_implementation={asked} needs the package flash_attn, which is not installed: sdpa is used"
    return ""


def _is_there(package: str) -> bool:
    return is_elsewhere.get() or importlib.util.find_spec(package) is not None


def _fault(config: type[RolloutConfig], gpus: int, model_path: str, temperatures: tuple[float, ...]) -> tuple[str, str]:
    """Return why an engine cannot be used, empty if it can, and what to do about it."""
    if config.PACKAGE and not _is_there(config.PACKAGE):
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
        return {}  # the recipe's own checks say what is wrong with it
