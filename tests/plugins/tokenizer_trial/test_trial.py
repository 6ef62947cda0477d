"""A tokenizer or template that hangs, aborts or exhausts the memory raises a one-line error and harms nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.data.text import load_tokenizer
from plugins.tokenizer_trial.child import MOST_CPU_S
from plugins.tokenizer_trial.trial import try_tokenizer
from tests.chat_models import CHATML, chat_model
from tests.messages import says

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


def with_normalizers(settings: dict[str, Any], *contents: str) -> None:
    replace = [{"type": "Replace", "pattern": {"String": "a"}, "content": content} for content in contents]
    settings["normalizer"] = {"type": "Sequence", "normalizers": replace}


def grows_a_thousandfold(settings: dict[str, Any]) -> None:
    with_normalizers(settings, *["a" * 1000] * 8)


def backtracks(settings: dict[str, Any]) -> None:
    settings["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }


@pytest.mark.parametrize("change", [grows_a_thousandfold, backtracks])
def test_a_tokenizer_that_hangs_or_grows_too_large_raises_an_error(
    change: Callable[[dict[str, Any]], None], tmp_path: Path, own_cache: Path
) -> None:
    folder = chat_model(tmp_path / "model")
    settings = json.loads((folder / "tokenizer.json").read_text())
    change(settings)
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=says("tokenizer.json", folder, "cannot be used")):
        load_tokenizer(folder)
    assert not own_cache.exists()


@pytest.mark.parametrize(
    ("template", "fact", "is_option"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", f"{MOST_CPU_S} s", True),
        ("{{ 'a' * 10000000000 }}", "memory", True),
        ("{{ 'a' * 10000000000 }}", "memory", False),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "10,000,000 characters", False),
    ],
    ids=["loop", "one text", "one text in the model", "many texts"],
)
def test_a_template_that_hangs_or_grows_too_large_raises_an_error(
    template: str, fact: str, is_option: bool, tmp_path: Path, own_cache: Path
) -> None:
    folder = chat_model(tmp_path / "model", template=CHATML)
    if not is_option:
        (folder / "chat_template.jinja").unlink()
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    with pytest.raises(ValueError, match=says("chat template", folder, fact)):
        load_tokenizer(folder, chat_template=template if is_option else None)
    assert not own_cache.exists()


def test_only_a_new_or_changed_tokenizer_is_tried(tmp_path: Path, own_cache: Path) -> None:
    folder = chat_model(tmp_path / "model")
    load_tokenizer(folder)
    (first,) = own_cache.iterdir()
    load_tokenizer(chat_model(tmp_path / "copy"))
    assert list(own_cache.iterdir()) == [first]
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    load_tokenizer(folder)
    assert len(list(own_cache.iterdir())) == 2


def test_templates_that_reject_or_mark_assistant_messages_pass_the_trial(tmp_path: Path, own_cache: Path) -> None:
    for number, template in enumerate(
        [
            "{{ raise_exception('roles must alternate') }}",
            "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}",
        ]
    ):
        try_tokenizer(chat_model(tmp_path / f"model{number}", template=template))
    assert len(list(own_cache.iterdir())) == 2
    try_tokenizer(tmp_path)  # without a tokenizer there is nothing to try
