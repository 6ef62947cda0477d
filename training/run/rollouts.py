"""Metrics and readable text of the scored responses of a step.

B: number of responses. N: number of tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from components.data.values import label_text
from components.models.routers import route_columns
from components.rl.advantages import group_std
from components.rl.mismatch import mismatch_metrics
from training.tracking import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch

SHOW_SAMPLES_EVERY = 10
SHOWN_SAMPLES = 8
"""Number of responses that W&B and TensorBoard show, once every `SHOW_SAMPLES_EVERY` steps."""
STATUSES = ("finished", "truncated", "aborted", "error")
"""Possible values of the status of an episode."""


def rollout_metrics(
    samples: Batch, low: float | None = None, high: float | None = None, failed: Batch | None = None
) -> dict[str, float]:
    """Return means over the responses of a step, and the gap between the log-probabilities of engine and trainer.

    Args:
        samples: responses with the columns `tokens`, `action_mask`, `rollout_logprob` (of the engine) and, if they were
            computed, `logprob` (of the trainer) per token; `reward`, `score`, `shaped_reward`, `truncated`, `prompt_id`
            and any `log_...` per response, NaN if a response has no value; for episodes `num_turns` and `status`; and
            the columns of `check_staleness`.
        low: lower bound of the importance weights. Tokens below it are counted. None counts none.
        high: upper bound of the importance weights.
        failed: responses of the step without a reward. They are not among the samples.

    Returns:
        reward/: `reward`, `score`, `shaped`, `failed` (a count) and the logged values. If prompts have several
        responses, `group_std`, and `zero_variance_share`: the share of responses to prompts whose responses all have
        the same reward.
        actor/: `kl_to_reference` in nats, if there is a reference model.
        rollout/: `response_length` in tokens, `truncated_share`, `logprob_gap_mean` and `_max` in nats, and the
        `mismatch_metrics`. For episodes, a share per status, and `turns_mean`. The staleness in weight versions:
        `staleness_mean` and `_max` of the oldest token of each response, and `token_staleness_mean` of all tokens.
    """
    mask_N = samples["action_mask"]
    reward_B = samples["reward"]
    metrics = {
        "reward/reward": float(reward_B.mean()),
        "reward/score": float(samples["score"].mean()),
        "reward/shaped": float(samples["shaped_reward"].mean()),
        "reward/failed": float(len(failed or ())),
        "rollout/response_length": float(mask_N.sum() / len(samples)),
        "rollout/truncated_share": float(samples["truncated"].float().mean()),
    }
    # With one response per prompt every deviation is 0, and the share would be 1 without a meaning.
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
    ended = list(samples["status"])
    # An episode that failed often has no reward. Without it, `rollout/error_share` would always be 0.
    if failed is not None:
        ended += failed["status"]
    shares = {f"rollout/{status}_share": ended.count(status) / len(ended) for status in STATUSES}
    return shares | {"rollout/turns_mean": float(samples["num_turns"].float().mean())}


def _staleness_metrics(samples: Batch) -> dict[str, float]:
    if "staleness" not in samples:
        return {}
    stale_B = samples["staleness"]
    metrics = {"rollout/staleness_mean": float(stale_B.float().mean()), "rollout/staleness_max": float(stale_B.max())}
    if "token_version" in samples:
        version_N = samples["token_version"]
        trained_B = samples["weight_version"] + stale_B
        # -1 marks tokens that no engine sampled: those of the prompt and of an environment.
        stale_N = (trained_B[samples.sequence_ids] - version_N)[version_N >= 0]
        metrics["rollout/token_staleness_mean"] = float(stale_N.float().mean())
    return metrics


def readable(samples: Batch, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Return the first responses of a step as text, with reward, score and status."""
    first = samples.select(slice(0, count))
    rows = []
    for i in range(len(first)):
        tokens = first.row(i, "tokens").tolist()
        start = int(first["prompt_length"][i])
        numbers = {name: float(first[name][i]) for name in ("reward", "score")}
        # Decoded from the tokens, because the environment of an episode may have changed the prompt of the data.
        texts = {"prompt": tokenizer.decode(tokens[:start]), "response": tokenizer.decode(tokens[start:])}
        texts["label"] = label_text(first["label"][i])
        rows.append(texts | numbers | {"status": first["status"][i]})
    return rows


def record_step(
    tracker: Tracker,
    step: int,
    steps: int,
    metrics: dict[str, float],
    samples: Batch,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Log a step: its metrics, its rollouts, and samples as text.

    Args:
        tracker: tracker of the run.
        step: number of the step.
        steps: total number of steps of the run.
        metrics: metrics of the step. If there was no pass for the log-probabilities of the trainer, the gap in the
            first optimizer step, which has the same weights, is also logged as `rollout/logprob_gap_mean`.
        samples: scored batch that the step was trained on, with `status`.
        tokenizer: decodes one sample per step, and several every `SHOW_SAMPLES_EVERY` steps.
    """
    if (gap := metrics.get("actor/first_engine_gap")) is not None:
        metrics = {"rollout/logprob_gap_mean": gap} | metrics
    tracker.log(step, metrics, steps=steps, sample=lambda: readable(samples, tokenizer, 1)[0])
    # Routes would take more space than everything else, and are computed again where they are needed.
    tracker.rollouts(step, samples.without(*route_columns(samples.per_token)))
    tracker.keep_tokenizer(tokenizer)
    if step % SHOW_SAMPLES_EVERY == 1:
        tracker.samples(step, lambda: readable(samples, tokenizer, SHOWN_SAMPLES))
    tracker.update_summary(steps=step)


def check_staleness(samples: Batch, version: int, most: int = 0) -> Batch:
    """Compute the staleness of each response: the number of versions between its weights and `version`.

    Args:
        samples: responses with `weight_version`, the version of their oldest token.
        version: version of the weights that are trained, or that every engine should have.
        most: maximum staleness in versions.

    Returns:
        The responses with the column `staleness`.

    Raises:
        RuntimeError: a response exceeds the maximum. Without this check, an engine that missed an update would produce
            off-policy samples without any sign of it.
    """
    stale_B = version - samples["weight_version"]
    wrong_B = (stale_B > most) | (stale_B < 0)
    if bool(wrong_B.any()):
        versions = sorted(set(samples["weight_version"][wrong_B].tolist()))
        raise RuntimeError(
            f"{int(wrong_B.sum())} responses were sampled from weights of version {versions}, but the trainer is at "
            f"version {version} (maximum staleness: {most}); a rollout engine missed an update"
        )
    return samples.with_sequences(staleness=stale_B)
