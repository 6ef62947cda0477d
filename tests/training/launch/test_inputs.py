"""Data that do not fit the model are refused before a run starts."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.chat_models import THINK, THINK_ID, chat_model
from tests.messages import says


@pytest.mark.parametrize(
    ("recipe", "rows", "option"),
    [
        ("grpo", ["a", "b"], "evaluation.path"),
        ("grpo", ["a", THINK], "data.path"),
        ("sft", [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": THINK}], "data.path"),
        ("dpo", [{"prompt": "a", "chosen": "b", "rejected": THINK}], "data.path"),
        ("reward_model", [{"prompt": "a", "chosen": THINK, "rejected": "b"}], "data.path"),
    ],
)
def test_data_with_a_token_id_beyond_the_embedding_exits_with_code_2(
    recipe: str, rows: list[Any], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = chat_model(tmp_path / "model", rows=THINK_ID)
    keys = {"dpo": ["data.prompt_key=prompt"], "reward_model": ["data.prompt_key=prompt"]}.get(recipe, [])
    for name, texts in (("data", rows), ("heldout", ["a", THINK])):
        records = [{"input": text, "label": "b"} if isinstance(text, str) else text for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    if recipe == "grpo":
        keys = ["reward.source=exact_match", "data.label_key=label", "prompts_per_step=2"]
        keys += ["rollout.engine=hf", "rollout.max_new_tokens=8"]
        keys += [f"evaluation.path={tmp_path}/heldout.jsonl"] if option == "evaluation.path" else []
    options = [f"model.path={model}", f"data.path={tmp_path}/data.jsonl", f"run_dir={tmp_path}/run", "backend=local"]
    main = import_module(f"recipes.{recipe}.main").main
    assert main([*options, *keys]) == 2
    # transformers may print warnings first.
    *_, line = capsys.readouterr().err.splitlines()
    assert re.search(says(THINK, f"id {THINK_ID}", f"{THINK_ID} rows", "row"), line)
