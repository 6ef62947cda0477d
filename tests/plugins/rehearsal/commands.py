"""Commands of a cluster with a small model, its data and its reward, for rehearsals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.recipes.tiny_models import write_policy

REWARD = """def reward_func(queries, prompts, labels):
    return [float(query.endswith(label)) for query, label in zip(queries, labels)]
"""
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def rows(count: int = 1000) -> list[dict[str, str | None]]:
    """Return questions with their answers."""
    return [{"question": f"{number} plus 1?", "answer": str(number + 1)} for number in range(count)]


def write_inputs(
    folder: Path, data: list[dict[str, str | None]] | None = None, reward: str = REWARD, model: str = ""
) -> dict[str, str]:
    """Write model, data and reward. Return the options of a command for 4 machines with 8 GPUs each."""
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in data or rows()))
    (folder / "reward.py").write_text(reward)
    return {
        "model.path": model or str(write_policy(folder / "policy", num_attention_heads=8, num_key_value_heads=2)),
        "data.path": f"{folder}/rows.jsonl",
        "data.prompt_key": "question",
        "data.label_key": "answer",
        "data.apply_chat_template": "true",
        "evaluation.path": f"{folder}/rows.jsonl",
        "reward.source": f"{folder}/reward.py",
        "rollout.max_new_tokens": "256",
        "prompts_per_step": "128",
        "train.engine": "fsdp",
        "train.zero_stage": "3",
        "train.mini_batch_size": "512",
        "placement.nodes": "4",
        "placement.devices_per_node": "8",
        "run_dir": f"{folder}/run",
        "rehearse": "true",
    }


def words(options: Mapping[str, str]) -> list[str]:
    """Return options as arguments."""
    return [f"{name}={value}" for name, value in options.items()]
