"""generation_config.json is saved without settings that transformers refuses to save."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, Qwen2Config

from components.models.disk.settings import save_settings
from tests.messages import says


@pytest.mark.parametrize(
    ("settings", "dropped"),
    [
        ({"do_sample": True, "temperature": 0.6}, []),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 0]}, ["temperature", "top_p"]),
        ({"num_beams": 1, "early_stopping": True, "length_penalty": 2.0}, ["early_stopping", "length_penalty"]),
        ({"use_cache": False, "cache_implementation": "static"}, ["cache_implementation"]),
        ({"output_scores": True}, ["output_scores"]),
        ({"pad_token_id": -1}, ["pad_token_id"]),
    ],
)
def test_settings_that_transformers_refuses_are_omitted(
    settings: dict[str, Any], dropped: list[str], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    config = GenerationConfig.from_pretrained(tmp_path)
    assert save_settings(tmp_path, Qwen2Config(), config) == dropped
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    saved.pop("transformers_version")
    assert saved == {name: value for name, value in settings.items() if name not in dropped}
    assert all(getattr(config, name) == settings[name] for name in dropped)  # the model in use keeps them


def test_a_config_value_without_json_form_is_refused_by_name(tmp_path: Path) -> None:
    config: Any = Qwen2Config()
    config.extra = object()
    with pytest.raises(ValueError, match=says("config.json cannot be saved", "object")):
        save_settings(tmp_path, config, None)
