"""What a step's scored answers look like: as numbers for the metrics, as text for a person. B answers, N tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from components.rl.advantages import group_std
from components.rl.correction import mismatch_metrics

if TYPE_CHECKING:
    from components.batch import Batch


def rollout_metrics(samples: Batch, low: float | None = None, high: float | None = None) -> dict[str, float]:
    """Means over one step's answers, and how far the engine's log-probabilities are from the trainer's.

    Args:
        samples: with `tokens`, `action_mask`, `logprob` (the trainer's) and `rollout_logprob` (the engine's) per token;
            `reward`, `score`, `shaped_reward`, `reward_failed`, `truncated`, `prompt_id` and any `log_...` per answer.
        low: of the importance weights, beyond which a token counts as outside; None: not counted.
        high: the same, above.

    Returns:
        reward/: `reward`, `score`, `shaped`, `failed` (a count) and the logged ones; where prompts have several
        answers `group_std`, and `zero_variance_share` of answers whose prompt's answers all earned the same.
        rollout/: `response_length` in tokens, `truncated_share`, `logprob_gap_mean` and `_max` in nats, and the
        `mismatch_metrics`.
    """
    mask_N, reward_B = samples["action_mask"], samples["reward"]
    logprob_N, rollout_logprob_N = samples["logprob"], samples["rollout_logprob"]
    gap_N = (rollout_logprob_N - logprob_N).abs()[mask_N]
    metrics = {
        "reward/reward": float(reward_B.mean()),
        "reward/score": float(samples["score"].mean()),
        "reward/shaped": float(samples["shaped_reward"].mean()),
        "reward/failed": float(samples["reward_failed"].sum()),
        "rollout/response_length": float(mask_N.sum() / len(samples)),
        "rollout/truncated_share": float(samples["truncated"].float().mean()),
        "rollout/logprob_gap_mean": float(gap_N.mean()),
        "rollout/logprob_gap_max": float(gap_N.max()),
    }
    if len(samples["prompt_id"].unique()) < len(samples):
        std_B = group_std(reward_B, samples["prompt_id"])
        metrics["reward/group_std"] = float(std_B.mean())
        metrics["reward/zero_variance_share"] = float((std_B == 0).float().mean())
    mismatch = mismatch_metrics(logprob_N, rollout_logprob_N, mask_N, samples.lengths, low=low, high=high)
    metrics |= {f"rollout/{name}": value for name, value in mismatch.items()}
    logged = [name for name in samples.names if name.startswith("log_")]
    return metrics | {f"reward/{name.removeprefix('log_')}": float(samples[name].mean()) for name in logged}


def readable(samples: Batch, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """The first answers of a step as text, with what they were worth."""
    some = samples.select(slice(0, count))
    rows = []
    for i in range(len(some)):
        tokens = some.row(i, "tokens").tolist()[int(some["prompt_length"][i]) :]
        numbers = {name: float(some[name][i]) for name in ("reward", "score")}
        texts = {"prompt": some["prompt"][i], "answer": tokenizer.decode(tokens), "label": str(some["label"][i])}
        rows.append(texts | numbers | {"status": some["status"][i]})
    return rows


def check_version(samples: Batch, version: int) -> None:
    """RuntimeError unless all answers were sampled from weights of this version.

    A sampler that is behind would quietly train the wrong policy.
    """
    behind = samples["weight_version"] != version
    if bool(behind.any()):
        found = sorted(set(samples["weight_version"][behind].tolist()))
        raise RuntimeError(
            f"{int(behind.sum())} answers were sampled from weights of version {found}, but the trainer is at version "
            f"{version}; a rollout engine missed an update"
        )
