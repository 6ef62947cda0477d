"""Formulas of OpenRLHF 0.11.0 and verl 0.10.0.dev on right-padded rows, and random steps to test them with.

Legend: B sequences; T tokens of the longest; N all tokens of a step end to end; P prompts of G responses; K rewards.
All tensors are float64. Masks are 1 for tokens of the policy.

The formulas are written term by term from the behaviour of those systems, slow and plain. A `+ 1e-8` in a denominator
is theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass
class Step:
    """A step in both layouts: sequences end to end in float32 for our functions, and padded in float64 for the formulas
    here.
    """

    lengths: Tensor
    mask_N: Tensor
    group_B: Tensor
    """Groups of different sizes in random order, including a group of one by default."""
    reward_B: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @cached_property
    def mask(self) -> Tensor:
        return self.padded(self.mask_N)

    def row(self, name: str) -> Tensor:
        return self.padded(self.columns[name])

    def padded(self, x_N: Tensor) -> Tensor:
        parts = x_N.double().split(self.lengths.tolist())
        return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)

    def flat(self, x_BT: Tensor) -> Tensor:
        return torch.cat([row[:size] for row, size in zip(x_BT, self.lengths.tolist(), strict=True)])


@cache
def make_step(seed: int, *, gaps: bool = True, singletons: bool = True, empty: bool = True) -> Step:
    """Numbers are multiples of 1/64, exact in float32, so that no ratio lies within rounding of a limit.

    Args:
        gaps: the environment writes in between; else one prompt and one response.
        singletons: some groups are of one response.
        empty: in some sequences, but the first, the policy does nothing.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high + 1, (size,), generator=generator)

    sizes = integers(1 if singletons else 2, 4, int(integers(1, 3, 1)))
    group_B = (7 * torch.arange(len(sizes)) - 5).repeat_interleave(sizes)
    group_B = group_B[torch.randperm(len(group_B), generator=generator)]
    lengths = integers(3, 20, len(group_B))
    parts = []
    for size in lengths.tolist():
        start, end = sorted(integers(0, size, 2).tolist())
        must = not empty or not parts
        if must:
            start = min(start, size - 2)
            end = max(end, start + 2)
        place = torch.arange(size)
        acts = (place >= start) & (place < end)
        if gaps:
            acts &= integers(0, 9, size) < 7
        if must:
            acts[start : start + 2] = True
        parts.append(acts)
    mask_N = torch.cat(parts)
    size = len(mask_N)
    old_N = integers(-200, -20, size)
    moved = integers(-90, 90, size) * (integers(0, 3, size) > 0)
    columns = {
        "x": (old_N + moved).clamp(max=-2),
        "old": old_N,
        "other": old_N + integers(-80, 80, size),
        "advantage": integers(-128, 128, size),
        "reward": integers(-64, 64, size),
        "value": integers(-64, 64, size),
        "old_value": integers(-64, 64, size),
        "return": integers(-64, 64, size),
        "weight": integers(-64, 64, size),
    }
    reward_B = integers(-64, 64, len(group_B)).float() / 64
    return Step(lengths, mask_N, group_B, reward_B, {name: x_N.float() / 64 for name, x_N in columns.items()})


def steps(*, gaps: bool = True, singletons: bool = True, empty: bool = True) -> st.SearchStrategy[Step]:
    return st.builds(
        make_step, st.integers(0, 199), gaps=st.just(gaps), singletons=st.just(singletons), empty=st.just(empty)
    )


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def assert_same_tokens(ours_N: Tensor, theirs_BT: Tensor, step: Step) -> None:
    """Compare the tokens of the policy. Our result is 0 elsewhere."""
    assert_same(ours_N[step.mask_N], step.flat(theirs_BT)[step.mask_N])
    assert not ours_N[~step.mask_N].any()


def assert_same_loss(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], step: Step) -> None:
    """Return the loss of each token, and the gradient of their weighted sum."""
    x_N = step["x"].clone().requires_grad_()
    x_BT = step.row("x").requires_grad_()
    loss_N = ours(x_N)
    loss_BT = theirs(x_BT)
    assert_same_tokens(loss_N, loss_BT, step)
    (loss_N * step["weight"]).sum().backward()
    (loss_BT * step.mask * step.row("weight")).sum().backward()
    assert_same_gradients(x_N, x_BT, step)


def assert_same_gradients(x_N: Tensor, x_BT: Tensor, step: Step) -> None:
    assert x_N.grad is not None
    assert x_BT.grad is not None
    assert_same(x_N.grad, step.flat(x_BT.grad), 1e-5)


# OpenRLHF: from reward to advantages.


def openrlhf_shaped(reward_PG: Tensor, estimator: str, low: float, high: float) -> Tensor:
    size = reward_PG.shape[1]
    if estimator == "rloo":
        reward_PG = reward_PG - (reward_PG.sum(1, keepdim=True) - reward_PG) / (size - 1)
    elif estimator in ("reinforce_baseline", "dr_grpo"):
        reward_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    elif estimator == "group_norm":
        reward_PG = (reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-9)
    return reward_PG.clamp(low, high)


def openrlhf_token_rewards(reward_B: Tensor, kl_BT: Tensor, beta: float, mask_BT: Tensor) -> Tensor:
    reward_BT = -max(beta, 0.0) * kl_BT
    for i, acts in enumerate(mask_BT.tolist()):
        last = max((t for t, m in enumerate(acts) if m), default=len(acts) - 1)
        reward_BT[i, last] += reward_B[i]
    return reward_BT


def openrlhf_gae(
    reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    reward_BT = reward_BT * mask_BT
    value_BT = value_BT * mask_BT
    advantage_BT = torch.zeros_like(reward_BT)
    next_value_B = next_advantage_B = torch.zeros(len(reward_BT), dtype=torch.float64)
    for t in reversed(range(reward_BT.shape[1])):
        delta_B = reward_BT[:, t] + gamma * next_value_B - value_BT[:, t]
        advantage_BT[:, t] = next_advantage_B = delta_B + gamma * lambd * next_advantage_B
        next_value_B = value_BT[:, t]
    return advantage_BT, advantage_BT + value_BT


def openrlhf_returns(reward_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    return_BT = reward_BT * mask_BT
    for t in reversed(range(reward_BT.shape[1] - 1)):
        return_BT[:, t] += gamma * return_BT[:, t + 1]
    return return_BT


def openrlhf_whiten(x_BT: Tensor, mask_BT: Tensor, no_std_norm: bool) -> Tensor:
    mean = (x_BT * mask_BT).sum() / mask_BT.sum()
    if no_std_norm:
        return x_BT - mean
    variance = ((x_BT - mean).square() * mask_BT).sum() / mask_BT.sum()
    return (x_BT - mean) * variance.clamp(min=1e-8).rsqrt()


def openrlhf_kl(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    d = logprob - ref_logprob
    return {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[kind].clamp(-10, 10)


def adaptive_kl(value: float, kl: float, target: float, horizon: float, steps: int) -> float:
    """Rewards of both systems, which have different KL penalties."""
    return value * (1 + min(max(kl / target - 1, -0.2), 0.2) * steps / horizon)


def openrlhf_overlong(reward: float, length: int, max_length: int, buffer: int, factor: float) -> float:
    exceed = min(length - (max_length - buffer), buffer)
    if exceed <= 0:
        return reward
    return reward - exceed / buffer * factor


def openrlhf_stop_properly(reward: float, truncated: bool, coef: float) -> float:
    if not truncated:
        return reward
    if coef < 0:
        return coef
    return reward * coef


# OpenRLHF: losses.


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """PPO loss of both systems. OpenRLHF maximises a gain, verl minimises a cost."""
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is None:
        return -gain
    return -torch.where(advantage < 0, torch.maximum(gain, dual * advantage), gain)


def token_ratio(logprob: Tensor, old_logprob: Tensor) -> Tensor:
    return (logprob - old_logprob).clamp(-20, 20).exp()


def openrlhf_gspo_ratio(logprob_BT: Tensor, old_logprob_BT: Tensor, mask_BT: Tensor) -> Tensor:
    mean_B = ((logprob_BT - old_logprob_BT) * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)
    return mean_B.exp()[:, None] * mask_BT


def openrlhf_correction(
    old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, kind: str, low: float, high: float
) -> Tensor:
    """Factor [B, T] of each token's loss."""
    w_BT = (old_BT - rollout_BT).exp()
    if kind == "tis":
        return w_BT.clamp(low, high)
    if kind == "icepop":
        return w_BT * ((w_BT >= low) & (w_BT <= high))
    g_B = (((old_BT - rollout_BT) * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)).exp()
    return w_BT * ((g_B >= low) & (g_B <= high))[:, None]


def openrlhf_aggregate(loss_BT: Tensor, mask_BT: Tensor, mode: str, batch_tokens: int, batch_size: int) -> Tensor:
    """Aggregation on one rank, with the counts of the complete optimizer step."""
    if mode == "token":
        return (loss_BT * mask_BT).sum() / batch_tokens
    count_B = mask_BT.sum(1)
    mean_B = (loss_BT * mask_BT).sum(1) / (count_B + 1e-8)
    return mean_B[count_B > 0].sum() / batch_size


def openrlhf_value(value: Tensor, old_value: Tensor, target: Tensor, clip: float) -> Tensor:
    kept = old_value + (value - old_value).clamp(-clip, clip)
    return 0.5 * torch.maximum((kept - target).square(), (value - target).square())


# verl: KL and advantages.


def verl_kl(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    d = logprob - ref_logprob
    if kind.endswith("+"):
        k2 = d.square() / 2
        value = verl_kl(logprob, ref_logprob, kind[:-1])
        return k2 - k2.detach() + value.detach()
    if kind == "k3":
        minus = (-d).clamp(-20, 20)
        return (minus.exp() - minus - 1).clamp(-10, 10)
    return {"k1": d, "abs": d.abs(), "k2": d.square() / 2}[kind]


def verl_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    # Both add 1e-8 to the count, which changes float64 results but not float32 ones.
    return (x_BT * mask_BT).sum() / mask_BT.sum()


def verl_whiten(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    count = mask_BT.sum()
    if count < 2:
        raise ValueError("no unbiased variance of fewer than two tokens")
    mean = verl_mean(x_BT, mask_BT)
    variance = verl_mean((x_BT - mean).square(), mask_BT) * count / (count - 1)
    return (x_BT - mean) * (variance + 1e-8).rsqrt()


def verl_gae(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    advantage_BT = torch.zeros_like(reward_BT)
    next_value_B = last_B = torch.zeros(len(reward_BT), dtype=torch.float64)
    for t in reversed(range(reward_BT.shape[1])):
        acts_B = mask_BT[:, t] > 0
        new_B = reward_BT[:, t] + gamma * next_value_B - value_BT[:, t] + gamma * lambd * last_B
        last_B = torch.where(acts_B, new_B, last_B)
        next_value_B = torch.where(acts_B, value_BT[:, t], next_value_B)
        advantage_BT[:, t] = last_B
    return verl_whiten(advantage_BT, mask_BT), advantage_BT + value_BT


def each_group(reward_B: Tensor, group_B: Tensor, of_group: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the results [B] of `of_group`, which gets the rewards of each group and their positions."""
    out_B = torch.zeros_like(reward_B)
    for group in group_B.unique():
        place = (group_B == group).nonzero().squeeze(1)
        out_B[place] = of_group(reward_B[place], place)
    return out_B


def verl_centred(reward: Tensor) -> Tensor:
    """Return the rewards of a group minus their mean. The mean of a group of one counts as 0."""
    if len(reward) == 1:
        return reward
    return reward - reward.mean()


def verl_grpo(reward_B: Tensor, group_B: Tensor, by_std: bool) -> Tensor:
    def of_group(reward: Tensor, place: Tensor) -> Tensor:
        if not by_std:
            return verl_centred(reward)
        std = torch.ones(()) if len(reward) == 1 else reward.std()
        return verl_centred(reward) / (std + 1e-6)

    return each_group(reward_B, group_B, of_group)


def verl_passk(reward_B: Tensor, group_B: Tensor, by_std: bool) -> Tensor:
    def of_group(reward: Tensor, place: Tensor) -> Tensor:
        if len(reward) < 2:
            raise ValueError("a group of one has no second best")
        out = torch.zeros_like(reward)
        order = reward.argsort(descending=True)
        lead = reward[order[0]] - reward[order[1]]
        if by_std:
            lead = lead / (reward.std() + 1e-6)
        out[order[0]] = lead
        return out

    return each_group(reward_B, group_B, of_group)


def verl_rloo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    def of_group(reward: Tensor, place: Tensor) -> Tensor:
        return verl_centred(reward) * (len(reward) / max(len(reward) - 1, 1))

    return each_group(reward_B, group_B, of_group)


def verl_opo(reward_B: Tensor, length_B: Tensor, group_B: Tensor) -> Tensor:
    def of_group(reward: Tensor, place: Tensor) -> Tensor:
        weight = length_B[place].double()
        if len(reward) == 1:
            return reward
        return reward - (weight * reward).sum() / weight.sum()

    return each_group(reward_B, group_B, of_group)


def verl_gpg(reward_B: Tensor, group_B: Tensor, f_norm: float) -> Tensor:
    alpha = len(reward_B) / max(int(reward_B.count_nonzero()), 1)
    return alpha / f_norm * each_group(reward_B, group_B, lambda reward, place: verl_centred(reward))


def verl_gdpo(reward_BK: Tensor, group_B: Tensor, weights: list[float], mask_BT: Tensor) -> Tensor:
    total_B = torch.zeros(len(group_B), dtype=torch.float64)
    for reward_B, weight in zip(reward_BK.unbind(1), weights, strict=True):
        total_B += weight * verl_grpo(reward_B, group_B, by_std=True)
    return verl_whiten(total_B[:, None] * mask_BT, mask_BT) * mask_BT


def verl_reinforce_pp(reward_BT: Tensor, mask_BT: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    return_BT = torch.zeros_like(reward_BT)
    running_B = torch.zeros(len(reward_BT), dtype=torch.float64)
    for t in reversed(range(reward_BT.shape[1])):
        acts_B = mask_BT[:, t] > 0
        running_B = torch.where(acts_B, reward_BT[:, t] + gamma * running_B, running_B)
        return_BT[:, t] = torch.where(acts_B, running_B, 0.0)
    return verl_whiten(return_BT, mask_BT) * mask_BT, return_BT


def verl_reinforce_pp_baseline(reward_B: Tensor, group_B: Tensor, mask_BT: Tensor) -> Tensor:
    centred_B = each_group(reward_B, group_B, lambda reward, place: verl_centred(reward))
    return verl_whiten(centred_B[:, None] * mask_BT, mask_BT) * mask_BT


def verl_remax(reward_BT: Tensor, greedy_B: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    return_BT = (reward_BT * mask_BT).flip(1).cumsum(1).flip(1)
    return return_BT - greedy_B[:, None] * mask_BT, return_BT


# verl: losses.


def verl_gspo(
    logprob_BT: Tensor, old_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, low: float, high: float
) -> Tensor:
    mean_B = ((logprob_BT - old_BT) * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)
    log_ratio_BT = logprob_BT - logprob_BT.detach() + mean_B.detach()[:, None]
    return surrogate(log_ratio_BT.clamp(max=10).exp(), advantage_BT, low, high)


def verl_dppo(
    logprob: Tensor, old: Tensor, advantage: Tensor, kind: Literal["tv", "kl"], low: float, high: float, cap: float
) -> Tensor:
    p = logprob.detach().exp()
    p_old = old.exp()
    if kind == "tv":
        kept = torch.where(advantage > 0, p - p_old <= high, p - p_old >= -low)
    else:
        kl = p_old * (old - logprob.detach()) + (1 - p_old) * ((1 - p_old) / (1 - p)).log()
        kept = torch.where(advantage > 0, (kl <= high) | (p <= p_old), (kl <= low) | (p >= p_old))
    return -advantage * token_ratio(logprob, old).clamp(max=cap).detach() * logprob * kept


def verl_sapo(logprob: Tensor, old: Tensor, advantage: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    tau = torch.where(advantage > 0, tau_positive, tau_negative).double()
    return -advantage * torch.sigmoid(tau * (token_ratio(logprob, old) - 1)) * 4 / tau


def verl_cispo(logprob: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return -token_ratio(logprob, old).clamp(1 - low, 1 + high).detach() * advantage * logprob


def verl_geo_mean(
    logprob_BT: Tensor, old_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, low: float, high: float
) -> Tensor:
    """Return the loss [B] of each row. verl takes its mean over a micro-batch."""
    d_BT = logprob_BT - old_BT
    sign_BT = advantage_BT.sign()
    kept_BT = sign_BT * torch.minimum(sign_BT * d_BT, sign_BT * d_BT.clamp(-low, high))
    count_B = mask_BT.sum(1) + 1e-8
    ratio_B = ((kept_BT * mask_BT).sum(1) / count_B).exp()
    return -(advantage_BT * mask_BT).sum(1) / count_B * ratio_B


def verl_covariances(logprob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
    centred = (x_BT - verl_mean(x_BT, mask_BT) for x_BT in (logprob_BT, advantage_BT))
    return torch.where(mask_BT > 0, next(centred) * next(centred), -torch.inf)


def verl_count(share: float, mask_BT: Tensor) -> int:
    """Return the maximum number of tokens that Clip-Cov and KL-Cov select."""
    return max(int(share * int(mask_BT.sum())), 1)


def verl_agg(loss_BT: Tensor, mask_BT: Tensor, mode: str, tokens: int, sequences: int, scale: int | None) -> Tensor:
    """Aggregation on one rank, with the counts of the complete mini-batch."""
    sum_B = (loss_BT * mask_BT).sum(1)
    count_B = mask_BT.sum(1)
    if mode == "token-sum":
        return sum_B.sum()
    if mode == "token-mean":
        return sum_B.sum() / tokens
    if mode == "seq-mean-token-mean":
        return (sum_B / (count_B + 1e-8))[count_B > 0].sum() / sequences
    total = sum_B[count_B > 0].sum() / sequences
    if mode == "seq-mean-token-sum":
        return total
    return total / (scale or loss_BT.shape[1])


# verl: rollout correction, with d = log p - log q.


def verl_is(d_BT: Tensor, mask_BT: Tensor, level: str, high: float, low: float | None = None) -> Tensor:
    if level == "sequence":
        d_BT = (d_BT * mask_BT).sum(1, keepdim=True).expand_as(d_BT)
    w_BT = d_BT.clamp(-20, 20).exp() * mask_BT
    if low is None:
        return w_BT.clamp(max=high)
    return torch.where((w_BT >= low) & (w_BT <= high), w_BT, 0.0)


def verl_rs(d_BT: Tensor, mask_BT: Tensor, option: str, high: float, low: float = 0.0) -> Tensor:
    """Factor [B, T] of verl's mask. `option` is, for example, token_k1, seq_sum_k2 or seq_mean_k3."""
    level, kind = option.rsplit("_", 1)
    d_BT = d_BT.clamp(-20, 20)
    stat_BT = {"k1": -d_BT, "k2": d_BT.square() / 2, "k3": d_BT.exp() - 1 - d_BT}[kind] * mask_BT
    if level != "token":
        stat_BT = stat_BT.sum(1, keepdim=True).expand_as(d_BT)
    if level == "seq_mean":
        stat_BT = stat_BT / (mask_BT.sum(1, keepdim=True) + 1e-8)
    if kind == "k1":
        stat_BT = stat_BT.exp()
    return ((stat_BT <= high) & (stat_BT >= low)) * mask_BT


def verl_offpolicy(d_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    safe_BT = d_BT.clamp(-20, 20)
    sum_B = (d_BT * mask_BT).sum(1).clamp(-20, 20)
    return {
        "kl": verl_mean(-d_BT, mask_BT).item(),
        "k3_kl": verl_mean(d_BT.exp() - d_BT - 1, mask_BT).item(),
        "chi2_token": verl_mean(safe_BT.exp().square(), mask_BT).item() - 1,
        "chi2_seq": (2 * sum_B).exp().mean().item() - 1,
    }


def verl_eff_sample_size(weight_BT: Tensor, mask_BT: Tensor) -> float:
    return 1 / verl_mean((weight_BT / (verl_mean(weight_BT, mask_BT) + 1e-8)).square(), mask_BT).item()
