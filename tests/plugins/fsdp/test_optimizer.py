"""AdamW on local tensors against torch's, and its calls of the dispatcher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from components.models.loading import load_policy
from components.train.optimizer import adam_of
from plugins.fsdp.engine import FSDPEngine
from plugins.fsdp.optimizer import LocalAdamW, local
from tests.components.helpers import train_cases as cases

MOST_CALLS = 19


class Calls(TorchDispatchMode):
    """Count the calls of the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def trained(kind: type[torch.optim.AdamW]) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a model after three steps. One parameter has no gradient in the first step, and one is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    last: Any = model[2]
    last.bias.requires_grad = False
    optimizer = adam_of(model, cases.config(), kind)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.01 * (3 - step)
        model(torch.randn(11, 7)).square().sum().backward()
        if step == 0:
            last.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_steps_equal_those_of_torch_to_the_bit() -> None:
    (model, optimizer), (expected, of_torch) = trained(LocalAdamW), trained(torch.optim.AdamW)
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)
        state, other_state = optimizer.state[parameter], of_torch.state[other]
        assert state.keys() == other_state.keys()
        for key, value in other_state.items():
            assert torch.equal(state[key], value)
            assert state[key].dtype == value.dtype


def opened(model: Path, max_grad_norm: float, adam_offload: bool) -> FSDPEngine:
    config = cases.config(max_grad_norm=max_grad_norm, zero_stage=3, adam_offload=adam_offload)
    return FSDPEngine(load_policy(model), config)


def counting(method: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """Return a method that appends the number of its dispatcher calls to a list."""

    def counted(*arguments: Tensor | float) -> Any:
        with Calls() as mode:
            result = method(*arguments)
        calls.append(mode.count)
        return result

    return counted


@pytest.mark.parametrize(("max_grad_norm", "adam_offload"), [(0.05, False), (0.0, False), (0.05, True)])
def test_an_optimizer_step_makes_few_calls(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch, max_grad_norm: float, adam_offload: bool
) -> None:
    """Norm, clipping and update of 26 DTensors: the number of calls does not depend on the number of parameters."""
    engine = opened(tied_model, max_grad_norm, adam_offload)
    engine.train_step(cases.minibatches()[0], cases.nll)
    calls: list[int] = []
    for name in ("_read", "_step"):
        monkeypatch.setattr(engine, name, counting(getattr(engine, name), calls))
    engine.train_step(cases.minibatches()[1], cases.nll)
    assert len(engine.adam.state) == 26
    assert len(calls) == 2
    assert sum(calls) <= MOST_CALLS


def test_an_offloaded_optimizer_takes_the_same_steps(tied_model: Path) -> None:
    """Two clipped steps with several micro-batches. Weights, gradients and moments of both are equal to the bit."""
    engines = [opened(tied_model, 0.05, adam_offload) for adam_offload in (False, True)]
    for minibatch in cases.minibatches()[:2]:
        one, other = (engine.train_step(minibatch, cases.nll) for engine in engines)
        assert one == other
    (on_device, in_memory) = engines
    for parameter, shard in zip(on_device.model.parameters(), in_memory.model.parameters(), strict=True):
        assert torch.equal(local(parameter), local(shard))
        for key, value in on_device.adam.state[parameter].items():
            assert torch.equal(local(value), local(in_memory.adam.state[shard][key]))
