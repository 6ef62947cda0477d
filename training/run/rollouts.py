"""What a step's scored responses look like: as numbers for the metrics, as text for a person. B responses, N tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from components.data.cells import label_text
from components.rl.advantages import group_std
from components.rl.correction import mismatch_metrics
from training.tracking import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch

SHOW_SAMPLES_EVERY = 10
SHOWN_SAMPLES = 8
"""How many responses W&B and TensorBoard show, and of how many steps one."""
STATUSES = ("finished", "truncated", "aborted", "error")
"""How an episode may have ended."""


def rollout_metrics(
    samples: Batch, low: float | None = None, high: float | None = None, failed: Batch | None = None
) -> dict[str, float]:
    """Means over one step's responses, and how far the engine's log-probabilities are from the trainer's.

    Args:
        samples: with `tokens`, `action_mask`, `rollout_logprob` (the engine's) and, where there was a pass for them,
            `logprob` (the trainer's) per token; `reward`, `score`, `shaped_reward`, `truncated`, `prompt_id` and any
            `log_...` per response, NaN where a response lacks it; of episodes `num_turns` and `status`; and what
            `check_staleness` adds.
        low: of the importance weights, beyond which a token counts as outside; None: not counted.
        high: the same, above.
        failed: the step's responses without a reward, which are not among the samples.

    Returns:
        reward/: `reward`, `score`, `shaped`, `failed` (a count) and the logged ones that are there; where prompts have
        several responses `group_std`, and `zero_variance_share` of responses whose prompt's responses all earned the
        same. actor/: `kl_to_reference` in nats, where there is one.
        rollout/: `response_length` in tokens, `truncated_share`, `logprob_gap_mean` and `_max` in nats, and the
        `mismatch_metrics`; of episodes a share for each status, and `turns_mean`; in versions that the weights were
        behind `staleness_mean` and `_max`, by responses, whose oldest token counts, and `token_staleness_mean`.
    """
    mask_N, reward_B = samples["action_mask"], samples["reward"]
    metrics = {
        "reward/reward": float(reward_B.mean()),
        "reward/score": float(samples["score"].mean()),
        "reward/shaped": float(samples["shaped_reward"].mean()),
        "reward/failed": float(0 if failed is None else len(failed)),
        "rollout/response_length": float(mask_N.sum() / len(samples)),
        "rollout/truncated_share": float(samples["truncated"].float().mean()),
    }
    if len(samples["prompt_id"].unique()) < len(samples):
        std_B = group_std(reward_B, samples["prompt_id"])
        metrics["reward/group_std"] = float(std_B.mean())
        metrics["reward/zero_variance_share"] = float((std_B == 0).float().mean())
    if "logprob" in samples:
        columns = (samples["logprob"], samples["rollout_logprob"], mask_N)
        gap_N = (columns[0] - columns[1]).abs()[mask_N]
        mismatch = mismatch_metrics(*columns, samples.lengths, low=low, high=high)
        mismatch |= {"logprob_gap_mean": float(gap_N.mean()), "logprob_gap_max": float(gap_N.max())}
        metrics |= {f"rollout/{name}": value for name, value in mismatch.items()}
        if "reference_logprob" in samples:
            metrics["actor/kl_to_reference"] = float((samples["logprob"] - samples["reference_logprob"])[mask_N].mean())
    return metrics | _logged(samples) | _episode_metrics(samples, failed) | _staleness_metrics(samples)


def _logged(samples: Batch) -> dict[str, float]:
    means = {name: float(samples[name].nanmean()) for name in samples.names if name.startswith("log_")}
    return {f"reward/{name.removeprefix('log_')}": mean for name, mean in means.items() if not math.isnan(mean)}


def _episode_metrics(samples: Batch, failed: Batch | None) -> dict[str, float]:
    if "num_turns" not in samples:
        return {}
    ended = [*samples["status"], *([] if failed is None else failed["status"])]
    shares = {f"rollout/{status}_share": ended.count(status) / len(ended) for status in STATUSES}
    return shares | {"rollout/turns_mean": float(samples["num_turns"].float().mean())}


def _staleness_metrics(samples: Batch) -> dict[str, float]:
    if "staleness" not in samples:
        return {}
    stale_B = samples["staleness"]
    metrics = {"rollout/staleness_mean": float(stale_B.float().mean()), "rollout/staleness_max": float(stale_B.max())}
    if "token_version" in samples:
        version_N, trained_B = samples["token_version"], samples["weight_version"] + stale_B
        stale_N = (trained_B[samples.sequence_ids] - version_N)[version_N >= 0]
        metrics["rollout/token_staleness_mean"] = float(stale_N.float().mean())
    return metrics


def readable(samples: Batch, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """The first responses of a step as text, with what they were worth."""
    some = samples.select(slice(0, count))
    rows = []
    for i in range(len(some)):
        tokens, start = some.row(i, "tokens").tolist(), int(some["prompt_length"][i])
        numbers = {name: float(some[name][i]) for name in ("reward", "score")}
        # Of an episode the prompt is what its environment has made of the data's.
        texts = {"prompt": tokenizer.decode(tokens[:start]), "response": tokenizer.decode(tokens[start:])}
        texts["label"] = label_text(some["label"][i])
        rows.append(texts | numbers | {"status": some["status"][i]})
    return rows


def record_step(
    tracker: Tracker,
    step: int,
    steps: int,
    metrics: dict[str, float],
    samples: Batch,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write one step down, and tell those who watch.

    Args:
        tracker: of the run.
        step: its number.
        steps: how many the run is to have.
        metrics: of the step. Where no pass was made for the trainer's log-probabilities, their gap to the engine's in
            the first optimizer step, which is of the same weights, is told as `rollout/logprob_gap_mean` too.
        samples: what it was trained on, scored, with `status`.
        tokenizer: turns one of them into text, and now and then a few, for whoever shows samples.
    """
    if (gap := metrics.get("actor/first_engine_gap")) is not None:
        metrics = {"rollout/logprob_gap_mean": gap} | metrics
    tracker.log(step, metrics, steps=steps, sample=lambda: readable(samples, tokenizer, 1)[0])
    tracker.rollouts(step, samples)
    tracker.keep_tokenizer(tokenizer)
    if step % SHOW_SAMPLES_EVERY == 1:
        tracker.samples(step, lambda: readable(samples, tokenizer, SHOWN_SAMPLES))
    tracker.update_summary(steps=step)


def check_staleness(samples: Batch, version: int, most: int = 0) -> Batch:
    """Find out how far behind `version` the weights were that drew each response.

    Args:
        samples: with `weight_version`, of the oldest token of a response.
        version: of the weights that are trained, or of those that every engine should have.
        most: so many versions may they be behind.

    Returns:
        With `staleness`, that number for each response.

    Raises:
        RuntimeError: they are further behind. A sampler that missed an update would quietly train the wrong policy.
    """
    stale_B = version - samples["weight_version"]
    wrong_B = (stale_B > most) | (stale_B < 0)
    if bool(wrong_B.any()):
        found = sorted(set(samples["weight_version"][wrong_B].tolist()))
        allowed = f", of which they may be {most} behind" if most else ""
        raise RuntimeError(
            f"{int(wrong_B.sum())} responses were sampled from weights of version {found}, but the trainer is at "
            f"version {version}{allowed}; a rollout engine missed an update"
        )
    return samples.with_sequences(staleness=stale_B)
