"""The plan of a run without the plug-in that computes memory, and checks without a plug-in."""

import json
from collections.abc import Iterator
from importlib import import_module

import pytest

from components import registry

RECIPES = ("grpo", "openrlhf_ppo", "sft", "verl_ppo")


@pytest.fixture
def without_plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A project without the plug-in."""
    packages = [package for package in registry.packages() if not package.endswith(".plan")]
    monkeypatch.setattr(registry, "packages", lambda: packages)
    registry._provided.cache_clear()
    yield
    registry._provided.cache_clear()


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_the_plug_in_a_plan_notes_that_memory_is_not_checked(
    recipe: str, without_plan: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert import_module(f"recipes.{recipe}.main").main(["--dry_run", "--assume_devices=8x2"]) == 0
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert "memory" not in plan
    assert any("of 8 GPUs" in line for line in plan["nodes"])
    (line,) = [line for line in shown.err.splitlines() if f"{recipe}: memory" in line]
    assert "not checked" in line


def test_without_the_plug_in_axes_that_do_not_divide_the_model_are_refused(
    without_plan: None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["train.packing=true", "train.engine=fsdp", "train.zero_stage=3", "parallel.context=3"]
    assert import_module("recipes.grpo.main").main(["--dry_run", "--assume_devices=3", *options]) == 2
    assert "4 attention heads" in capsys.readouterr().err
