"""Policy losses of each token: numbers worked out by hand, and the formulas of the papers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from components.batch import Batch
from components.rl.aggregation import TokenLoss
from components.rl.policy_losses import gspo_loss, ppo_loss, reinforce_loss
from components.rl.ratio_losses import cispo_loss, dppo_loss, dro_loss, geo_mean_loss, sapo_loss
from tests.components.rl.loss_cases import LOSSES, steps
from tests.messages import says

LN2 = math.log(2.0)


@dataclass
class Acting:
    """Return an action token. `x` is a float64 tensor with gradient. x.item() stops the gradient."""

    x: Tensor
    old: float
    advantage: float

    @property
    def log_ratio(self) -> Tensor:
        moved = self.x - self.old
        return moved if abs(moved.item()) <= 20 else torch.tensor(math.copysign(20.0, moved.item()))


Cost = tuple[Tensor, dict[str, float]]  # Return the loss of one token, with its metrics.
Slow = Callable[[list[Acting]], list[Cost]]


def near(log_ratio: Tensor) -> dict[str, float]:
    d = log_ratio.item()
    return {"ratio_mean": math.exp(d), "approx_kl": math.exp(d) - 1 - d}


def slow_surrogate(log_ratio: Tensor, advantage: float, low: float, high: float, dual: float = math.inf) -> Cost:
    ratio = log_ratio.exp()
    kept = ratio if 1 - low <= ratio.item() <= 1 + high else torch.tensor(min(max(ratio.item(), 1 - low), 1 + high))
    gain = ratio * advantage
    kept_gain = kept * advantage
    loss = -min(gain, kept_gain, key=Tensor.item)
    metrics = {"clip_frac": float(kept_gain.item() < gain.item()), **near(log_ratio)}
    if dual < math.inf:
        bounded = advantage < 0 and loss.item() > -dual * advantage
        metrics["dual_clip_frac"] = float(bounded)
        loss = torch.tensor(-dual * advantage) if bounded else loss
    return loss, metrics


def slow_gspo(response: list[Acting]) -> list[Cost]:
    mean = sum(token.log_ratio.item() for token in response) / len(response)
    # s_i,t = sg(s_i) p_t / sg(p_t): the ratio of the response with the gradient of the token.
    costs = []
    for token in response:
        loss, metrics = slow_surrogate(mean + token.log_ratio - token.log_ratio.item(), token.advantage, 0.1, 0.2)
        costs.append((loss, metrics | near(token.log_ratio)))
    return costs


def slow_geo_mean(response: list[Acting]) -> list[Cost]:
    product = torch.tensor(1.0, dtype=torch.float64)
    metrics = []
    for token in response:
        d = token.log_ratio.item()
        cut = d > 0.4 if token.advantage > 0 else d < -0.3
        kept = torch.tensor(0.4 if d > 0 else -0.3, dtype=torch.float64) if cut else token.log_ratio
        product = product * (kept / len(response)).exp()
        metrics.append({"clip_frac": float(cut), **near(token.log_ratio)})
    loss = -product * (sum(token.advantage for token in response) / len(response))
    return [(loss, of_token) for of_token in metrics]


def slow_cispo(token: Acting) -> Cost:
    ratio = math.exp(token.log_ratio.item())
    weight = min(max(ratio, 0.5), 1.28)
    return -weight * token.advantage * token.x, {"clip_frac": float(weight != ratio), **near(token.log_ratio)}


def slow_sapo(token: Acting) -> Cost:
    tau = 1.0 if token.advantage > 0 else 2.0
    gate = 4 / tau / (1 + (-tau * (token.log_ratio.exp() - 1)).exp())
    return -token.advantage * gate, near(token.log_ratio)


def slow_dppo(token: Acting, divergence: str, low: float, high: float, cap: float) -> Cost:
    new = math.exp(token.x.item())
    old = math.exp(token.old)
    if divergence == "tv":
        distance = abs(new - old)
    elif (old > 0 and new == 0) or (old < 1 and new == 1):
        distance = math.inf
    else:
        distance = (old * math.log(old / new) if old else 0.0) + (
            (1 - old) * math.log((1 - old) / (1 - new)) if old < 1 else 0.0
        )
    limit = high if new > old else low
    dropped = (new - old) * token.advantage > 0 and distance > limit
    weight = 0.0 if dropped else min(math.exp(token.log_ratio.item()), cap)
    return -weight * token.advantage * token.x, {"clip_frac": float(dropped), **near(token.log_ratio)}


def each(cost: Callable[[Acting], Cost]) -> Slow:
    return lambda response: [cost(token) for token in response]


SLOW: dict[str, Slow] = {
    "ppo": each(lambda token: slow_surrogate(token.log_ratio, token.advantage, 0.2, 0.28)),
    "dual": each(lambda token: slow_surrogate(token.log_ratio, token.advantage, 0.2, 0.2, 3.0)),
    "gspo": slow_gspo,
    "geo_mean": slow_geo_mean,
    "cispo": each(slow_cispo),
    "sapo": each(slow_sapo),
    "dppo tv": each(lambda token: slow_dppo(token, "tv", 0.1, 0.2, 20.0)),
    "dppo kl": each(lambda token: slow_dppo(token, "kl", 0.05, 0.07, 2.0)),
    "dro": each(
        lambda token: (-token.advantage * token.x + 0.25 * token.log_ratio**2, near(token.log_ratio)),
    ),
    "reinforce": each(lambda token: (-token.advantage * token.x, {})),
}


def close_to(expected: list[float]) -> object:
    return pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", SLOW)
@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_losses_agree_with_a_scalar_loop(name: str, step: Batch) -> None:
    x_N = step["x"].clone().requires_grad_()
    actual = LOSSES[name](x_N, step)
    # Each token has another weight, so that no two gradients can be exchanged.
    weight_N = 1.0 + torch.arange(step.num_tokens) % 7
    acts_N = step["mask"]
    (actual.loss_N * weight_N).sum().backward()
    assert x_N.grad is not None
    costs: list[Cost] = []
    acting: list[Acting] = []
    for i in range(len(step)):
        mask = step.row(i, "mask").tolist()
        numbers = zip(*(step.row(i, column).tolist() for column in ("x", "old", "advantage")))
        response = [
            Acting(torch.tensor(x, dtype=torch.float64, requires_grad=True), old, advantage)
            for acts, (x, old, advantage) in zip(mask, numbers)
            if acts
        ]
        costs += SLOW[name](response) if response else []
        acting += response
    slow_loss = sum((cost * w for (cost, _), w in zip(costs, weight_N[acts_N].tolist())), torch.zeros(()))
    if slow_loss.requires_grad:
        slow_loss.backward()
    slopes = [0.0 if token.x.grad is None else token.x.grad.item() for token in acting]
    assert actual.loss_N[acts_N].tolist() == close_to([cost.item() for cost, _ in costs])
    # The slope of a gate that is almost open has few correct digits in float32.
    assert x_N.grad[acts_N].tolist() == pytest.approx(slopes, rel=1e-4, abs=1e-4)
    for metric, of_N in actual.metrics.items():
        assert of_N[acts_N].tolist() == close_to([of_token[metric] for _, of_token in costs]), metric
        assert not of_N.requires_grad
    assert all(of_token.keys() == actual.metrics.keys() for _, of_token in costs)
    # Tokens outside of the action mask have no loss and no gradient.
    assert not actual.loss_N[~acts_N].any()
    assert not x_N.grad[~acts_N].any()


def of_ratios(
    loss: Callable[..., TokenLoss],
    ratios: list[float],
    advantages: list[float],
    lengths: list[int] | None = None,
    **limits: Any,
) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Return loss, gradient and metrics of action tokens whose old probability is 1/8."""
    old_N = torch.full((len(ratios),), -3 * LN2)
    x_N = (old_N + torch.tensor(ratios).log()).requires_grad_()
    more = [torch.tensor(lengths)] if lengths else []
    values = loss(x_N, old_N, torch.tensor(advantages), torch.ones(len(ratios)).bool(), *more, **limits)
    values.loss_N.sum().backward()
    assert x_N.grad is not None
    return values.loss_N.tolist(), x_N.grad.tolist(), {name: of_N.tolist() for name, of_N in values.metrics.items()}


def test_ppo_equals_a_calculation_by_hand() -> None:
    # -min(r A, clip(r, 0.8, 1.2) A): 1.5 -> -1.2 and no gradient; 0.5 -> -0.5; 0.5 with A = -1 -> 0.8 and none;
    # 1.5 with A = -1 -> 1.5; within the range 1.125 -> -2.25. approx_kl: r - 1 - ln r.
    loss, slope, metrics = of_ratios(
        ppo_loss, [1.5, 0.5, 0.5, 1.5, 1.125], [1.0, 1.0, -1.0, -1.0, 2.0], clip_low=0.2, clip_high=0.2
    )
    assert loss == pytest.approx([-1.2, -0.5, 0.8, 1.5, -2.25])
    assert slope == pytest.approx([0.0, -0.5, 0.0, 1.5, -2.25])
    assert metrics["clip_frac"] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert metrics["ratio_mean"] == pytest.approx([1.5, 0.5, 0.5, 1.5, 1.125])
    assert metrics["approx_kl"] == pytest.approx([0.094535, 0.193147, 0.193147, 0.094535, 0.007217], abs=1e-6)


def test_the_bounds_of_ppo_are_separate() -> None:
    loss, _, _ = of_ratios(ppo_loss, [1.5, 0.5], [1.0, -1.0], clip_low=0.4, clip_high=0.25)
    assert loss == pytest.approx([-1.25, 0.6])


def test_the_dual_clip_equals_a_calculation_by_hand() -> None:
    # A = -1: r = 4 would cost 4 and is limited to 3, without gradient. r = 2 costs 2. For A = 1 there is no such limit.
    loss, slope, metrics = of_ratios(
        ppo_loss, [4.0, 2.0, 4.0], [-1.0, -1.0, 1.0], clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )
    assert loss == pytest.approx([3.0, 2.0, -1.2])
    assert slope == pytest.approx([0.0, 2.0, 0.0])
    assert metrics["dual_clip_frac"] == [1.0, 0.0, 0.0]
    assert metrics["clip_frac"] == [0.0, 0.0, 1.0]


def test_gspo_equals_a_calculation_by_hand() -> None:
    # First response: ratios 2 and 1/2, whose geometric mean is 1: loss -A, gradient -A, unlike with token ratios.
    # Second: 4 and 1, geometric mean 2 > 1.2: -1.2 A and no gradient. With A = -1: loss 2, gradient 2.
    loss, slope, metrics = of_ratios(
        gspo_loss, [2.0, 0.5, 4.0, 1.0], [1.0, 3.0, 1.0, -1.0], [2, 2], clip_low=0.2, clip_high=0.2
    )
    assert loss == pytest.approx([-1.0, -3.0, -1.2, 2.0])
    assert slope == pytest.approx([-1.0, -3.0, 0.0, 2.0])
    assert metrics["clip_frac"] == [0.0, 0.0, 1.0, 0.0]
    # Metrics of the token ratios, which measure the distance of the policy.
    assert metrics["ratio_mean"] == pytest.approx([2.0, 0.5, 4.0, 1.0])
    # r - 1 - ln r
    assert metrics["approx_kl"] == pytest.approx([1 - LN2, LN2 - 0.5, 3 - 2 * LN2, 0.0], abs=1e-6)


def test_all_tokens_of_a_response_have_exactly_its_ratio() -> None:
    # With the paper's clip range of a few 1e-4, the rounding of a token's large ratio would decide about clipping.
    moved_N = torch.tensor([8.0, -7.0, 0.1, -1.0, 3e-4])
    actual = gspo_loss(moved_N, 0 * moved_N, torch.ones(5), moved_N < 9, torch.tensor([5]), clip_low=1, clip_high=1)
    assert len(set(actual.loss_N.tolist())) == 1


def test_the_geometric_mean_loss_equals_a_calculation_by_hand() -> None:
    # A = 3 and 1, mean 2. Ratios 4 and 1/4, the first clipped at e^ln2 = 2: sqrt(2 / 4) = 0.707107. The clipped token
    # has no gradient, the other has -2 * 0.707107 / 2 for each of the two tokens with this loss. A = -1: of 4 and 1/4
    # the second is clipped at 1/2: sqrt(4 / 2) = 1.414214, which is also the loss.
    loss, slope, metrics = of_ratios(
        geo_mean_loss, [4.0, 0.25, 4.0, 0.25], [3.0, 1.0, -1.0, -1.0], [2, 2], clip_low=LN2, clip_high=LN2
    )
    root = math.sqrt(2)
    assert loss == pytest.approx([-root, -root, root, root])
    assert slope == pytest.approx([0.0, -root, root, 0.0])
    assert metrics["clip_frac"] == [1.0, 0.0, 0.0, 1.0]
    assert metrics["ratio_mean"] == pytest.approx([4.0, 0.25, 4.0, 0.25])


def test_cispo_equals_a_calculation_by_hand() -> None:
    # -w A log p with w = 3/2 for ratios above it, and log p = ln(r / 8); every token has the gradient -w A.
    loss, slope, metrics = of_ratios(cispo_loss, [2.0, 0.5, 1.0], [1.0, 1.0, -2.0], clip_low=1.0, clip_high=0.5)
    assert loss == pytest.approx([1.5 * 2 * LN2, 0.5 * 4 * LN2, -2 * 3 * LN2])
    assert slope == pytest.approx([-1.5, -0.5, 2.0])
    assert metrics["clip_frac"] == [1.0, 0.0, 0.0]
    loss, slope, metrics = of_ratios(cispo_loss, [0.5], [1.0], clip_low=0.25, clip_high=0.5)
    assert (loss, slope, metrics["clip_frac"]) == (pytest.approx([0.75 * 4 * LN2]), [-0.75], [1.0])


def test_dro_equals_a_calculation_by_hand() -> None:
    # -A log p + (log r)^2 / 4 with log p = ln(r / 8); the gradient is -A + log r / 2.
    loss, slope, _ = of_ratios(dro_loss, [2.0, 0.5, 1.0], [1.0, 1.0, -2.0], beta=0.5)
    assert loss == pytest.approx([2 * LN2 + LN2**2 / 4, 4 * LN2 + LN2**2 / 4, -2 * 3 * LN2])
    assert slope == pytest.approx([-1 + LN2 / 2, -1 - LN2 / 2, 2.0])


def test_sapo_equals_a_calculation_by_hand() -> None:
    # r = 1: sigmoid(0) = 1/2, so -A 2 / tau, with the slope -A of plain REINFORCE. r = 2, A = 1, tau = 1:
    # -4 sigmoid(1) = -2.924234, slope -4 s (1 - s) r = -4 * 0.731059 * 0.268941 * 2 = -1.572896.
    # r = 1/2, A = -1, tau = 2: 2 sigmoid(-1) = 0.537883, slope 4 * 0.196612 / 2 = 0.393224.
    loss, slope, metrics = of_ratios(
        sapo_loss, [1.0, 1.0, 2.0, 0.5], [1.0, -1.0, 1.0, -1.0], tau_positive=1.0, tau_negative=2.0
    )
    assert loss == pytest.approx([-2.0, 1.0, -2.924234, 0.537883], abs=1e-6)
    assert slope == pytest.approx([-1.0, 1.0, -1.572896, 0.393224], abs=1e-6)
    assert set(metrics) == {"ratio_mean", "approx_kl"}


def test_dppo_equals_a_calculation_by_hand() -> None:
    # From 1/8: 3/8 is 0.25 away, 1/16 is 0.0625 away. Larger moves up with A > 0 and down with A < 0 are dropped.
    limits: dict[str, Any] = {"clip_low": 0.05, "clip_high": 0.2, "ratio_cap": 2.0, "divergence": "tv"}
    loss, slope, metrics = of_ratios(dppo_loss, [3.0, 3.0, 0.5, 0.5, 2.0], [1.0, -1.0, -1.0, 1.0, 1.0], **limits)
    assert metrics["clip_frac"] == [1.0, 0.0, 1.0, 0.0, 0.0]
    # The weight of the second, 3, is capped at 2. Its log p is ln(3/8). The others have -4 ln 2 and -2 ln 2.
    assert loss == pytest.approx([0.0, 2 * math.log(3 / 8), 0.0, 0.5 * 4 * LN2, 2 * 2 * LN2])
    assert slope == pytest.approx([0.0, 2.0, 0.0, -0.5, -2.0])
    # KL of 1/8 and 3/8: ln(1/3) / 8 + 7/8 ln(7/5) = 0.157087; of 1/8 and 1/16: ln(2) / 8 + 7/8 ln(14/15) = 0.026274.
    for low, high, dropped in [(0.0262, 0.157, [1.0, 1.0]), (0.0263, 0.1571, [0.0, 0.0])]:
        _, _, metrics = of_ratios(
            dppo_loss, [3.0, 0.5], [1.0, -1.0], divergence="kl", clip_low=low, clip_high=high, ratio_cap=2.0
        )
        assert metrics["clip_frac"] == dropped


def test_reinforce_equals_a_calculation_by_hand() -> None:
    x_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    actual = reinforce_loss(x_N, torch.tensor([3.0, -0.5]), torch.ones(2).bool())
    actual.loss_N.sum().backward()
    assert actual.loss_N.tolist() == [3.0, -1.0]
    assert x_N.grad is not None
    assert x_N.grad.tolist() == [-3.0, 0.5]
    assert actual.metrics == {}


@pytest.mark.parametrize("name", sorted(SLOW.keys() - {"geo_mean"}))
def test_at_the_first_update_the_gradient_is_that_of_reinforce(name: str) -> None:
    x_N = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantage_N = torch.tensor([2.0, -1.0, 4.0])
    mask_N = torch.ones(3).bool()
    step = Batch([2, 1], {"old": x_N.detach(), "advantage": advantage_N, "mask": mask_N})
    actual = LOSSES[name](x_N, step)
    actual.loss_N.sum().backward()
    assert x_N.grad is not None
    assert x_N.grad.tolist() == [-2.0, 1.0, -4.0]
    assert not actual.metrics.get("approx_kl", torch.zeros(3)).any()
    assert not actual.metrics.get("clip_frac", torch.zeros(3)).any()


def refused(facts: list[str], loss: Callable[..., TokenLoss], *more: Tensor, **limits: Any) -> None:
    one_N = torch.ones(2)
    with pytest.raises(ValueError, match=says(*facts)):
        loss(one_N, one_N, one_N, one_N.bool(), *more, **limits)


def test_bad_settings_raise_an_error() -> None:
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    for tau in (0.0, -1.0, math.nan):
        refused([f"tau_positive={tau}", "tau_negative=1.05"], sapo_loss, tau_positive=tau)
        refused(["tau_positive=1.0", f"tau_negative={tau}"], sapo_loss, tau_negative=tau)
    refused(["divergence='js'", "tv", "kl"], dppo_loss, divergence="js", **clip)
    for loss in (gspo_loss, geo_mean_loss):
        refused(["lengths_B", "3 tokens", "2"], loss, torch.tensor([3]), **clip)


def test_the_divergence_is_precise_for_a_nearly_certain_token() -> None:
    # p_old = e^-0.01 = 0.990050, p = 1 - 1e-9: 0.990050 * (-0.01) + 0.009950 * (ln 0.009950 - ln 1e-9) = 0.1504.
    # Float32 rounds such a p to 1, which loses the second term.
    arguments = (torch.tensor([-1e-9]), torch.tensor([-1e-2]), torch.ones(1), torch.ones(1).bool())
    for limit, dropped in ((0.149, 1.0), (0.152, 0.0)):
        actual = dppo_loss(*arguments, divergence="kl", clip_low=limit, clip_high=limit)
        assert actual.metrics["clip_frac"].tolist() == [dropped]
