"""The model of vLLM's worker, in versions that keep it elsewhere. The workers are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from plugins.vllm_weights.worker import TESTED, model_of
from tests.architecture import ROOT
from tests.messages import says

MODEL = nn.Linear(1, 1)


@pytest.mark.parametrize(
    "worker",
    [
        SimpleNamespace(get_model=lambda: MODEL, model_runner=SimpleNamespace()),
        SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: MODEL)),
        SimpleNamespace(model_runner=SimpleNamespace(model=MODEL)),
    ],
)
def test_the_model_is_found_by_the_public_function_or_in_the_model_runner(worker: Any) -> None:
    assert model_of(worker) is MODEL


def test_a_worker_without_a_model_raises_an_error_with_the_version_that_works() -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace(runs=MODEL))
    with pytest.raises(RuntimeError, match=says("get_model", "model_runner.model", TESTED, "rollout.engine=hf")):
        model_of(worker)
    assert f"vllm=={TESTED}\n" in (ROOT / "constraints.txt").read_text()
