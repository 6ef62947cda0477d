"""Choice between plain and fused kernels, in the plan of a run and in its training engines."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

from components.models.sources import config_of
from components.net.hub import cached_folder
from components.registry import find

FAMILIES = frozenset({"gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Model types for which `auto` selects fused kernels. tests/plugins/kernels compares them with the plain ones."""
NEVER_RUN = "they have been tested with Triton's interpreter and have not run on a GPU yet"
_PLAIN = "set train.kernels=plain"


def choose(kernels: str, path: str, on_gpu: bool) -> str:
    """Return the choice of `train.kernels` with its reason, for the plan of a run.

    Args:
        kernels: value of the option, "auto" or "fused".
        path: path of the model.
        on_gpu: True if the model is trained on a GPU.

    Raises:
        ValueError: `kernels` is "fused", and the fused kernels cannot run.
    """
    if (obstacle := why_plain(kernels, _family(path), on_gpu)) is not None:
        return f"train.kernels={kernels} selects plain kernels: {obstacle}"
    parts = "output layer"
    if find("training kernels", "layers") is not None:
        parts += " and layers"
    return f"fused kernels ({parts}; {NEVER_RUN})"


def _family(path: str) -> str:
    """Return the model type in the config.json of a model, or an empty string if it cannot be read yet."""
    config = config_of(path)
    if config is None:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            folder = cached_folder(path)
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # The checks of the run report a model that is missing or unreadable.
            return ""
    return config.get("text_config", config).get("model_type", "")


def why_plain(kernels: str, family: str, on_gpu: bool) -> str | None:
    """Return the reason for plain kernels, or None if fused kernels are used.

    Args:
        kernels: "auto" or "fused".
        family: model type of the model, or an empty string if it is not known yet.
        on_gpu: True if the model is trained on a GPU.

    Raises:
        ValueError: `kernels` is "fused", and the fused kernels cannot run.
    """
    obstacle = None
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if importlib.util.find_spec("triton") is None:
        obstacle = "Triton is not installed; install torch for CUDA, which includes it"
    elif not on_gpu and not is_interpreted:
        obstacle = "the model is trained on a CPU, where Triton has only its interpreter (TRITON_INTERPRET=1)"
    if kernels == "fused":
        if obstacle is not None:
            raise ValueError(f"train.kernels=fused cannot be used: {obstacle}; or {_PLAIN}")
        return None
    if obstacle is None and not on_gpu:
        obstacle = "the model is trained on a CPU"
    if obstacle is None and family and family not in FAMILIES:
        obstacle = f"fused kernels have not been tested with models of type {family}; train.kernels=fused tries them"
    return obstacle
