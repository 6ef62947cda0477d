"""Creation of the rollout engine that a configuration names.

Engines of plug-ins are imported only when they are needed. transformers is imported at once, which takes seconds, while
other roles of the run are set up.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.generate.config import HFRolloutConfig, RolloutConfig
from components.generate.hf_engine import HFRolloutEngine
from components.registry import find, load

if TYPE_CHECKING:
    from components.generate.engine import RolloutEngine


def open_rollout_engine(model_path: str | Path, config: RolloutConfig) -> RolloutEngine:
    """Return the rollout engine of a configuration, with the weights at `model_path`.

    A plug-in provides the class of its engine as the `rollout engine` of the configuration's NAME.

    Args:
        model_path: folder or hub name of a causal model. See end_tokens.py for the tokens that end a response.
        config: configuration of the engine.
    """
    if config.NAME == HFRolloutConfig.NAME:
        return (find("timed engine", config.NAME) or cast(Any, HFRolloutEngine))(model_path, config)
    return load("rollout engine", config.NAME, "rollout.engine")(model_path, config)
