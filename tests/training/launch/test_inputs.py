"""What is said of prompts before a run starts."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from plugins.demo.tiny_model import character_tokenizer, learnt_tokenizer
from tests.chat_models import THINK, THINK_ID, chat_model
from tests.messages import says
from training.launch.inputs import check_reader, unused_template
from training.options.data_options import DataOptions
from training.options.model_options import ModelOptions

CHAT = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("options", "prompt", "is_said"),
    [
        ({}, "2 + 2?", True),
        ({"apply_chat_template": True}, "2 + 2?", False),
        ({"input_template": "Q: {} A:"}, "2 + 2?", False),
        ({}, [{"role": "user", "content": "2 + 2?"}], False),  # messages always go through it
    ],
)
def test_text_that_is_read_without_the_tokenizers_chat_template_is_a_warning(
    options: dict[str, Any], prompt: Any, is_said: bool
) -> None:
    tokenizer = learnt_tokenizer(["2 + 2?"] * 4, 300)
    tokenizer.chat_template = CHAT
    data = DataOptions(path="rows.jsonl", **options)
    warning = unused_template(data, prompt, tokenizer)
    assert (warning is not None) == is_said
    if warning is not None:
        assert re.search(says("warning", "data.apply_chat_template=true"), warning)
    tokenizer.chat_template = None
    assert unused_template(data, prompt, tokenizer) is None


def test_a_template_that_refuses_the_prompt_is_not_missed() -> None:
    tokenizer = learnt_tokenizer(["2 + 2?"] * 4, 300)
    tokenizer.chat_template = "{{ raise_exception('a system message has to come first') }}"
    assert unused_template(DataOptions(path="rows.jsonl"), "2 + 2?", tokenizer) is None


def test_a_template_that_changes_nothing_is_not_missed() -> None:
    assert unused_template(DataOptions(path="task:sort"), "abc", character_tokenizer("abc")) is None


def test_a_critic_with_fewer_rows_than_the_policy_has_tokens_is_refused(tmp_path: Path) -> None:
    policy = ModelOptions(path=str(chat_model(tmp_path / "policy")))
    check_reader(policy.path, "critic.path", policy)
    # Rows beyond the tokenizer's are never drawn.
    padded = ModelOptions(path=str(chat_model(tmp_path / "padded", rows=THINK_ID + 50)))
    check_reader(policy.path, "critic.path", padded)
    short = str(chat_model(tmp_path / "short", rows=THINK_ID))
    with pytest.raises(ValueError, match=says("critic.path", short, THINK_ID, policy.path, THINK_ID + 1)):
        check_reader(short, "critic.path", policy)


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
def test_data_with_a_token_that_the_model_has_no_row_for_ends_with_code_2(
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
    # transformers may warn before.
    *_, line = capsys.readouterr().err.splitlines()
    assert re.search(says(THINK, f"id {THINK_ID}", f"{THINK_ID} rows", "row"), line)
