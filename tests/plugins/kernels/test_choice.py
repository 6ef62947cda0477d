"""plugins/kernels/choice.py: fused kernels where they can run, and the reason where they cannot."""

import importlib.util
from importlib import import_module
from pathlib import Path

import pytest

from plugins.kernels.choice import choose, why_plain
from tests.messages import says
from tests.recipes.tiny_models import write_policy


def test_fused_is_refused_on_a_cpu_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module("recipes.grpo.main").main(["--dry_run", "train.kernels=fused"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for word in ("kernels=fused", "CPU", "kernels=plain"):
        assert word in line


@pytest.mark.parametrize(("kernels", "text"), [("auto", "fused kernels (output layer"), ("fused", "not run on a GPU")])
def test_the_plan_of_a_run_on_gpus_says_that_no_gpu_has_run_the_kernels(
    kernels: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dry_run", "--assume_devices=1x80GB", f"train.kernels={kernels}"]
    assert import_module("recipes.grpo.main").main(arguments) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert text in shown


def test_auto_selects_plain_kernels_on_a_cpu_for_unknown_families_and_without_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_policy(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "on a CPU" in choose("auto", path, on_gpu=False)
    assert "fused kernels" in choose("auto", path, on_gpu=True)
    assert "gpt2" in str(why_plain("auto", "gpt2", on_gpu=True))
    # The model is made or fetched later.
    assert why_plain("auto", "", on_gpu=True) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "Triton is not installed" in choose("auto", path, on_gpu=True)
    with pytest.raises(ValueError, match=says("kernels=fused", "Triton is not installed")):
        choose("fused", path, on_gpu=True)


def test_the_interpreter_runs_fused_kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_plain("fused", "qwen2", on_gpu=False) is None
    assert "CPU" in str(why_plain("auto", "qwen2", on_gpu=False))
