"""Metrics of a step under verl's names, and the balancing of responses over ranks.

Metrics without a name in verl keep the name that all recipes here use.

Legend: `B` sequences, `N` tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from components.batch import Batch
from components.rl.masked import sequence_means
from training.run.rollouts import rollout_metrics
from training.run.validation import validation_metrics
from training.tracking.metrics import METRICS

if TYPE_CHECKING:
    from .config import VerlPPOConfig

KEPT = ("timing_s/step", "rollout/truncated_share")
"""Metrics that are logged under both names: verl's and the one of all recipes here."""
NAMES = {metric.same_as: metric.name for metric in METRICS if metric.same_as and metric.same_as not in KEPT}
"""Name in all recipes here -> verl's name. verl's ppo_kl is the mean log-ratio and may be negative; here it is the k3
estimate of the same KL.
"""
REPLACED = {"reward/reward", "reward/shaped", "rollout/response_length"}
"""Metrics of `rollout_metrics` that `experience_metrics` replaces by more detailed ones under verl's names."""

ATTENTION = 1 / 24576
"""Relative cost of attention per pair of tokens. verl's value for a 7B model."""

PER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")
"""Phases whose time is logged per token of prompts and responses. `gen` is logged per token of the responses."""


def renamed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics under verl's names, if verl has one."""
    return {NAMES.get(name, name): value for name, value in metrics.items()}


def experience_metrics(experience: Batch, config: VerlPPOConfig, failed: Batch | None = None) -> dict[str, float]:
    """Compute the metrics of a step's responses.

    Args:
        experience: batch of the step, with the columns of `rollout_metrics`. With rejected tokens it has
            `sampled_mask` [N], which includes them, while `action_mask` does not. `reward` is the reward before the KL
            is subtracted, `shaped_reward` the reward after that.
        config: configuration of the run.
        failed: responses of the step without a reward, which are not trained on.

    Returns:
        critic/: `{score,rewards}/{mean,max,min}` over the responses that are not empty,
        `{advantages,returns,values}/...` over the tokens that are trained on, `vf_explained_var`. `response_length/...`
        and, without the empty responses, `response_length_non_aborted/...`, in tokens, those of an agent's environment
        included; their `clip_ratio` counts those that were cut off. `prompt_length/...`, whose `clip_ratio` counts
        those of data.max_prompt_tokens tokens. `num_turns/...` of episodes. Where the trainer computed
        log-probabilities of its own, `training/...` and `rollout_corr/...`. And what is left of `rollout_metrics`.
    """
    algorithm = config.algorithm
    by_token = algorithm.correction != "none" and algorithm.correction_level == "token"
    bounds = algorithm.correction_range if by_token else (None, None)
    every = experience
    if "sampled_mask" in experience:
        # The engine sampled rejected tokens too, so they belong to the comparison of engine and trainer.
        every = experience.with_tokens(action_mask=experience["sampled_mask"])
    common = renamed(rollout_metrics(every, *bounds, failed))
    metrics = {name: value for name, value in common.items() if name not in REPLACED}
    metrics |= _learning(experience) | _lengths(experience, config.data.max_prompt_tokens)
    if "num_turns" in experience:
        metrics |= _spread("num_turns", experience["num_turns"])
    if "logprob" in every:
        metrics |= _probabilities(every) | _perplexities(every)
    if "sampled_mask" in experience:
        kept = int(experience["action_mask"].sum()) / int(every["action_mask"].sum())
        metrics["rollout_corr/rollout_rs_masked_fraction"] = 1.0 - kept
    if "correction" in experience:
        metrics |= _weights(every)
    return metrics


def _spread(name: str, x: Tensor) -> dict[str, float]:
    x = x.float()
    return {f"{name}/mean": float(x.mean()), f"{name}/max": float(x.max()), f"{name}/min": float(x.min())}


def _learning(experience: Batch) -> dict[str, float]:
    mask_N, nonempty_B = experience["action_mask"], experience.lengths > experience["prompt_length"]
    nonempty_B = nonempty_B if bool(nonempty_B.any()) else ~nonempty_B  # if all are empty, all are counted
    metrics = _spread("critic/score", experience["reward"][nonempty_B])
    metrics |= _spread("critic/rewards", experience["shaped_reward"][nonempty_B])
    return_N = experience["return"][mask_N]
    metrics |= _spread("critic/advantages", experience["advantage"][mask_N]) | _spread("critic/returns", return_N)
    if "value" in experience:
        value_N = experience["value"][mask_N]
        metrics |= _spread("critic/values", value_N)
        left, whole = (x_N.var(correction=0) for x_N in (return_N - value_N, return_N))
        # The constant keeps the quotient finite if all returns are equal.
        metrics["critic/vf_explained_var"] = 1.0 - float(left / (whole + 1e-5))
    return metrics


def _lengths(experience: Batch, most_prompt: int) -> dict[str, float]:
    prompt_B = experience["prompt_length"]
    response_B, cut_B = experience.lengths - prompt_B, experience["truncated"].float()
    metrics = _spread("response_length", response_B) | {"response_length/clip_ratio": float(cut_B.mean())}
    nonempty_B = response_B > 0
    metrics["response/aborted_ratio"] = 1.0 - float(nonempty_B.float().mean())
    if bool(nonempty_B.any()):
        metrics |= _spread("response_length_non_aborted", response_B[nonempty_B])
        metrics["response_length_non_aborted/clip_ratio"] = float(cut_B[nonempty_B].mean())
    full = {"prompt_length/clip_ratio": float((prompt_B >= most_prompt).float().mean())}
    return metrics | _spread("prompt_length", prompt_B) | full


def _probabilities(samples: Batch) -> dict[str, float]:
    """Compute the differences between the probabilities of trainer and engine."""
    mask_N = samples["action_mask"]
    trainer_N, engine_N = (samples[name][mask_N].float().exp() for name in ("logprob", "rollout_logprob"))
    gap_N = (trainer_N - engine_N).abs()
    spread = {"max": gap_N.max(), "mean": gap_N.mean(), "std": gap_N.std(correction=0)}
    metrics = {"training/rollout_probs_diff_valid": 1.0}
    metrics |= {f"training/rollout_probs_diff_{name}": float(x) for name, x in spread.items()}
    # Pearson correlation: the cosine of the centered values.
    trainer_N, engine_N = (x_N - x_N.mean() for x_N in (trainer_N, engine_N))
    scale = trainer_N.norm() * engine_N.norm()
    if scale > 0:  # the correlation is undefined if all tokens have the same probability
        metrics["training/rollout_actor_probs_pearson_corr"] = float((trainer_N * engine_N).sum() / scale)
    return metrics


def _perplexities(samples: Batch) -> dict[str, float]:
    """Compute the responses' perplexities under trainer and engine. `log_ppl_diff` is trainer minus engine, in nats."""
    mask_N, lengths_B = samples["action_mask"], samples.lengths
    acts_B = samples.sum_tokens(mask_N) > 0
    trainer_B, engine_B = (
        -sequence_means(samples[name], mask_N, lengths_B)[acts_B] for name in ("logprob", "rollout_logprob")
    )
    diff_B = trainer_B - engine_B
    columns = {"training_ppl": trainer_B.exp(), "training_log_ppl": trainer_B, "rollout_ppl": engine_B.exp()}
    columns |= {"rollout_log_ppl": engine_B, "log_ppl_diff": diff_B, "log_ppl_abs_diff": diff_B.abs()}
    columns["ppl_ratio"] = diff_B.exp()
    means = {f"rollout_corr/{name}": float(x_B.mean()) for name, x_B in columns.items()}
    most = {"rollout_corr/log_ppl_diff_max": float(diff_B.max()), "rollout_corr/log_ppl_diff_min": float(diff_B.min())}
    return means | most


def _weights(samples: Batch) -> dict[str, float]:
    """Compute metrics of the importance weights of the token losses."""
    weight_N = samples["correction"][samples["action_mask"]]
    metrics = _spread("rollout_corr/rollout_is", weight_N)
    # verl separates the last part of these names by an underscore.
    metrics = {name.replace("/rollout_is/", "/rollout_is_"): value for name, value in metrics.items()}
    metrics["rollout_corr/rollout_is_std"] = float(weight_N.std(correction=0))
    size = weight_N.mean().square() / weight_N.square().mean().clamp(min=1e-8)
    return metrics | {"rollout_corr/rollout_is_eff_sample_size": float(size)}


def performance(experience: Batch, took: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Compute the speed of a step.

    Args:
        experience: batch of the step.
        took: durations `timing_s/<phase>` and `timing_s/step`, in seconds.
        ranks: number of processes (or GPUs) of the run.

    Returns:
        `perf/total_num_tokens`, including prompts; `perf/time_per_step` in seconds; `perf/throughput` in tokens per
        second and rank; `timing_per_token_ms/<phase>` in milliseconds.
    """
    seconds, every = took["timing_s/step"], experience.num_tokens
    responses = every - int(experience["prompt_length"].sum())
    tokens = {"gen": responses} | dict.fromkeys(PER_ALL_TOKENS, every)
    metrics = {
        f"timing_per_token_ms/{name}": 1000 * took[f"timing_s/{name}"] / max(count, 1)
        for name, count in tokens.items()
        if f"timing_s/{name}" in took
    }
    speed = every / max(seconds, 1e-9) / ranks
    return metrics | {"perf/total_num_tokens": float(every), "perf/time_per_step": seconds, "perf/throughput": speed}


def heldout_metrics(responses: Batch) -> dict[str, float]:
    """Compute validation metrics of scored responses. Majority votes use `info_pred`, if the reward function returns
    `pred`.
    """
    logged = {name.removeprefix("log_"): responses[name] for name in responses.names if name.startswith("log_")}
    metrics = validation_metrics(
        responses["reward"],
        responses["prompt_id"],
        responses["datasource"],
        {"score": responses["score"], **logged},
        responses.objects.get("info_pred"),
    )
    return metrics | (_spread("val-aux/num_turns", responses["num_turns"]) if "num_turns" in responses else {})


def balanced(experience: Batch, ranks: int) -> tuple[Batch, dict[str, float]]:
    """Reorder a batch so that the `ranks` parts of `Batch.split` take about equal work; `unbalanced` reverts it.

    If samples have several sequences (`branch`), which must stay adjacent, the order is not changed.

    Returns:
        The batch, and metrics of the number of tokens per part: `global_seqlen/{min,max,minmax_diff,mean}` before,
        and `balanced_min` and `balanced_max` after reordering.
    """
    before = [part.num_tokens for part in experience.split(ranks)]
    experience = experience.with_sequences(place=torch.arange(len(experience)))
    if "branch" not in experience or not bool(experience["branch"].any()):
        # Larger parts first, as `split` cuts them.
        shares = sorted(experience.balanced_shares(ranks, ATTENTION), key=len, reverse=True)
        experience = experience.select(torch.cat(shares))
    after = [part.num_tokens for part in experience.split(ranks)]
    metrics = {"min": min(before), "max": max(before), "minmax_diff": max(before) - min(before)}
    metrics |= {"balanced_min": min(after), "balanced_max": max(after), "mean": sum(before) / ranks}
    return experience, {f"global_seqlen/{name}": float(value) for name, value in metrics.items()}


def unbalanced(experience: Batch) -> Batch:
    """Restore the order from before `balanced`, so that mini-batches do not depend on the number of ranks."""
    return experience.select(experience["place"].argsort()).without("place") if "place" in experience else experience
